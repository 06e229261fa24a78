// Aligned tables for people, and the same as JSON for programs.
#pragma once
#include <cctype>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "json.h"
#include "terminal.h"

// Sections of rows `label  value  note`. Labels align over the whole table; values are left-aligned and wrapped, or
// right-aligned in a section of amounts. The JSON form for programs has one object per section, named by the first word of its
// title, with the rows' values; exact() replaces a row's text there.
class Table {
public:
    enum class Values { text, amounts };

    // key: the section's name in JSON; by default the first word of its title
    void section(const std::string& title, Values values = Values::text, const std::string& key = "") {
        sections_.push_back({printable(title), values, key.empty() ? title.substr(0, title.find(' ')) : key, {}});
    }
    void row(const std::string& label, const std::string& value, const std::string& note = "") {
        if (sections_.empty()) section("");
        sections_.back().rows.push_back({printable(label), printable(value), printable(note), nullptr});
    }
    void exact(nlohmann::ordered_json value) { sections_.back().rows.back().exact = std::move(value); }

    nlohmann::ordered_json json() const {
        nlohmann::ordered_json all = nlohmann::ordered_json::object();
        for (const Section& s : sections_) {
            std::string key = s.key;
            for (char& c : key) c = (char)tolower((unsigned char)c);
            nlohmann::ordered_json& rows = all[key];
            for (const Row& r : s.rows) {
                const std::string once = key_of(r.label);
                std::string name = once;
                for (int n = 2; rows.contains(name); n++) name = once + "_" + std::to_string(n);
                rows[name] = r.exact.is_null() ? nlohmann::ordered_json(r.value) : r.exact;
            }
        }
        return all;
    }

    // Lines are at most `width` columns wide if they have spaces to break at.
    std::string str(const Paint& paint, int width) const {
        int label_width = 0;  // a label wider than half of the line gets its own line
        for (const Section& s : sections_)
            for (const Row& r : s.rows)
                if (const int w = display_width(r.label); w <= width / 2) label_width = std::max(label_width, w);
        const std::string indent(label_width + 4, ' ');
        const int room = std::max(20, width - label_width - 4);
        std::string out;
        for (const Section& s : sections_) {
            if (!s.title.empty()) out += paint.bold(s.title) + "\n";
            int amount_width = 0;
            for (const Row& r : s.rows) amount_width = std::max(amount_width, display_width(r.value));
            for (const Row& r : s.rows) {
                if (display_width(r.label) > label_width) out += "  " + paint.dim(r.label) + "\n" + indent;
                else out += "  " + paint.dim(pad_right(r.label, label_width)) + "  ";
                const bool amounts = s.values == Values::amounts;
                const std::vector<std::string> lines = wrap_text(amounts ? pad_left(r.value, amount_width) : r.value, room);
                for (size_t i = 0; i < lines.size(); i++) out += (i ? "\n" + indent : "") + lines[i];
                if (!r.note.empty()) {
                    const bool same_line = display_width(lines.back()) + 2 + display_width(r.note) <= room;
                    if (same_line) out += "  " + paint.dim(r.note);
                    else
                        for (const std::string& part : wrap_text(r.note, room)) out += "\n" + indent + paint.dim(part);
                }
                out += "\n";
            }
        }
        return out;
    }
    void print(FILE* f = stdout) const {
        StatusLine::clear_any();
        fputs(str(Paint::for_terminal(is_terminal(f)), terminal_width(f)).c_str(), f);
        fflush(f);
    }

private:
    // The JSON key of a label: "gradients (fp32)" becomes gradients_fp32.
    static std::string key_of(const std::string& label) {
        std::string key;
        for (const char c : label)
            if (isalnum((unsigned char)c) || c == '.' || (c == '-' && !key.empty()) || (c & 0x80)) key += c;
            else if (!key.empty() && key.back() != '_') key += '_';
        while (!key.empty() && (key.back() == '_' || key.back() == '-')) key.pop_back();
        return key;
    }
    struct Row {
        std::string label, value, note;
        nlohmann::ordered_json exact;  // null: JSON gets `value`
    };
    struct Section {
        std::string title;
        Values values;
        std::string key;
        std::vector<Row> rows;
    };
    std::vector<Section> sections_;
};

// With --json, the only text on standard output.
inline void print_json(const nlohmann::ordered_json& j) { puts(json_text(j, 2).c_str()); }
