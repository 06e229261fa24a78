// The rows of Parquet files (parquet.h) as documents or conversations.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"
#include "document_source.h"
#include "parquet.h"

inline nlohmann::json parquet_json(const parquet::Column& column, const parquet::Value& value) {
    if (value.null) return nullptr;
    if (column.type == parquet::byte_array) return std::string(value.bytes);
    if (column.type == parquet::boolean) return value.number != 0;
    if (column.type == parquet::float32 || column.type == parquet::float64) return value.real;
    if (column.no_sign && column.type == parquet::int32) return (uint32_t)value.number;
    if (column.no_sign) return (uint64_t)value.number;
    return value.number;
}

// The lists of a column, as JSON.
class ParquetLists {
public:
    ParquetLists(const parquet::ListColumn& list, std::vector<parquet::ParquetColumn> leaves)
        : list_(&list), leaves_(std::move(leaves)), next_(leaves_.size()) {}
    const std::string& name() const { return list_->name; }
    int64_t position() const { return leaves_[0].position(); }

    nlohmann::json next() {
        nlohmann::json all;
        for (size_t leaf = 0; leaf < leaves_.size(); leaf++) read_row(leaf, all);
        return all;
    }

private:
    struct Entry {
        bool read = false;
        int definition = 0, repetition = 0;
        nlohmann::json value;
    };
    bool look(size_t leaf) {
        Entry& entry = next_[leaf];
        if (entry.read) return true;
        if (leaves_[leaf].values_left() <= 0) return false;
        const parquet::Value v = leaves_[leaf].next();
        entry = {true, v.definition, v.repetition, parquet_json(list_->leaves[leaf], v)};
        return true;
    }
    // The values of a row: the first starts it (repetition 0), the others continue it. Each leaf has an entry for each element.
    void read_row(size_t leaf, nlohmann::json& all) {
        size_t n = 0;
        for (bool first = true; look(leaf) && (first || next_[leaf].repetition > 0); first = false) {
            Entry& entry = next_[leaf];
            if (first && entry.repetition != 0) parquet::damaged("a list has no start");
            entry.read = false;
            if (entry.definition <= list_->empty_definition) {  // no element
                if (leaf == 0 && entry.definition == list_->empty_definition) all = nlohmann::json::array();
                continue;
            }
            if (leaf == 0) all.push_back(nlohmann::json());
            if (!all.is_array() || n >= all.size()) parquet::damaged("the fields of a list have different lengths");
            nlohmann::json& element = all[n++];
            if (entry.definition < list_->element_definition) continue;
            (list_->of_structures ? element[list_->fields[leaf]] : element) = std::move(entry.value);
        }
        if (all.is_array() ? n != all.size() : n > 0) parquet::damaged("the fields of a list have different lengths");
    }

    const parquet::ListColumn* list_;
    std::vector<parquet::ParquetColumn> leaves_;
    std::vector<Entry> next_;
};

// The rows of a Parquet file as documents: the text in the column that --json-keys names, the other columns as fields. Of
// conversations, all columns of values, and lists of messages.
class ParquetDocuments : public DocumentSource {
public:
    ParquetDocuments(const std::string& path, const TextInput& input) : path_(path), mapping_(path), input_(input) {
        guarded([&] {
            if (mapping_.text().substr(0, 4) != parquet_magic) parquet::damaged("it is compressed as a whole");
            file_.emplace(mapping_.text());
            choose_columns();
        });
    }
    int64_t position() const override {
        return !readers_.empty() ? readers_[0].position() : !lists_.empty() ? lists_[0].position() : end_;
    }

    bool next(Chunk& chunk) override {
        bool found = false;
        guarded([&] {
            while (row_ == rows_)
                if (!next_group()) return;
            row_++;
            chunk.line = ++row_of_file_;
            if (!input_.open_record) {
                const parquet::Value text = readers_[0].next();
                if (text.null) chunk.left_out = "rows whose text is null";
                else if (text.bytes.empty()) chunk.left_out = "empty documents";
                else if (text.bytes.size() > most_document_bytes)
                    chunk.left_out = std::string("rows whose text is longer than ") + most_document_name;
                else chunk.text = text.bytes;
            }
            for (size_t i = input_.open_record ? 0 : 1; i < readers_.size(); i++)
                chunk.fields.add(columns_[i]->name, json_text(parquet_json(*columns_[i], readers_[i].next())));
            for (ParquetLists& list : lists_) chunk.fields.add(list.name(), json_text(list.next()));
            found = true;
        });
        return found;
    }

private:
    template <class F>
    void guarded(F f) const {
        try {
            f();
        } catch (const parquet::Damage& e) {
            fail("%s cannot be read as Parquet: %s; HINT: download or create it again or, if it is intact, %s", path_.c_str(),
                 e.what(), as_pipe(find_signature(parquet_magic)->command, path_, input_.reading).c_str());
        }
    }

    std::string converted() const { return as_pipe(find_signature(parquet_magic)->command, path_, input_.reading); }

    // All columns of values, and the lists that conversations have.
    void choose_columns_of_records(const std::string& names) {
        bool known = false;
        for (const parquet::Column& c : file_->columns) {
            const bool is_nested = c.repeated || c.children > 0;
            bool wanted = c.name == input_.json_key;
            for (const char* name : {"messages", "conversations", "prompt", "completion", "chosen", "rejected"})
                wanted |= c.name == name;
            known |= wanted || c.name == "instruction";
            if (!is_nested && is_value(c)) columns_.push_back(&c);
            if (!is_nested || (!wanted && c.name != "history" && c.name != "tools")) continue;
            const auto list =
                std::find_if(file_->lists.begin(), file_->lists.end(), [&](const auto& l) { return l.name == c.name; });
            if (list == file_->lists.end())
                fail("%s has a column '%s' of lists of lists, which are read only from JSON; HINT: %s", path_.c_str(),
                     c.name.c_str(), converted().c_str());
            list_columns_.push_back(&*list);
        }
        if (!known)
            fail(
                "%s has no columns of conversations: messages, prompt and completion, or instruction and output; its columns "
                "are %.300s; HINT: --json-keys COLUMN names the messages'",
                path_.c_str(), names.c_str());
    }
    static bool is_value(const parquet::Column& c) {
        return !c.repeated && c.type >= 0 && c.type != parquet::int96 && c.type < parquet::fixed_bytes && !c.decimal;
    }

    void choose_columns() {
        const std::string names = joined(file_->columns, [](const parquet::Column& c) { return c.name.substr(0, 40); });
        if (input_.open_record) return choose_columns_of_records(names);
        for (const parquet::Column& c : file_->columns) {
            if (c.name == input_.json_key) columns_.insert(columns_.begin(), &c);
            else if (input_.keep_fields && is_value(c)) columns_.push_back(&c);
        }
        if (columns_.empty() || columns_[0]->name != input_.json_key)
            fail("%s has no column '%s'; its columns are %.300s; HINT: --json-keys COLUMN names the text's", path_.c_str(),
                 input_.json_key.c_str(), names.c_str());
        const parquet::Column& text = *columns_[0];
        if (text.type != parquet::byte_array || text.repeated)
            fail(
                "column '%s' of %s is %s; one of strings at the top level is read; its columns are %.300s; HINT: --json-keys "
                "COLUMN",
                text.name.c_str(), path_.c_str(), text.repeated ? "a list" : parquet::type_name(text.type), names.c_str());
    }

    bool next_group() {
        if (group_ == file_->groups.size()) {
            readers_.clear();
            lists_.clear();
            end_ = (int64_t)mapping_.size();
            return false;
        }
        const parquet::RowGroup& group = file_->groups[group_++];
        lists_.clear();
        readers_ = file_->open(group, columns_);
        for (const parquet::ListColumn* list : list_columns_) {
            std::vector<const parquet::Column*> leaves;
            for (const parquet::Column& leaf : list->leaves) leaves.push_back(&leaf);
            lists_.emplace_back(*list, file_->open(group, leaves));
        }
        row_ = 0;
        rows_ = group.rows;
        return true;
    }

    std::string path_;
    MappedFile mapping_;
    TextInput input_;
    std::optional<parquet::ParquetFile> file_;
    std::vector<const parquet::Column*> columns_;  // the text's column and the fields'
    std::vector<const parquet::ListColumn*> list_columns_;
    std::vector<parquet::ParquetColumn> readers_;  // in the row group in hand
    std::vector<ParquetLists> lists_;
    size_t group_ = 0;
    int64_t row_ = 0, rows_ = 0, row_of_file_ = 0, end_ = 0;
};
