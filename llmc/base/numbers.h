// Numbers as people type them: 10k, 10_000, 10,000, 1.5B; durations: 90s, 5min, 1h30m. Returns NaN for anything else, so that
// the caller can name the option in its error.
#pragma once
#include <algorithm>
#include <cctype>
#include <cmath>
#include <exception>
#include <string>

#include "check.h"

// `text` without the underscores between its digits.
inline std::string without_underscores(const std::string& text) {
    const auto digit = [&](size_t i) { return i < text.size() && isdigit((unsigned char)text[i]); };
    std::string plain;
    for (size_t i = 0; i < text.size(); i++)
        if (text[i] != '_' || i == 0 || !digit(i - 1) || !digit(i + 1)) plain += text[i];
    return plain;
}
// "10,000" without the commas that group its digits in threes; unchanged if they do not: 0,001 and 1,5 are not whole numbers.
inline std::string without_commas(const std::string& text) {
    const size_t first = text.find(','), digits = std::min(text.find_first_not_of("0123456789,"), text.size());
    if (first == std::string::npos || first == 0 || first > 3 || text[0] == '0' || (digits - first) % 4) return text;
    std::string plain;
    for (size_t i = 0; i < text.size(); i++) {
        const bool here = i >= first && i < digits && (i - first) % 4 == 0;
        if ((text[i] == ',') != here) return text;
        if (!here) plain += text[i];
    }
    return plain;
}

inline double typed_number(const std::string& text) {
    const std::string plain = without_underscores(text);
    size_t used = 0;
    double value = NAN;
    try {
        value = std::stod(plain, &used);
    } catch (const std::exception&) {
    }
    return used == 0 || used != plain.size() ? NAN : value;
}

// A whole number, which may end in k, m, b or t, in either case.
inline double typed_count(const std::string& text) {
    const std::string plain = without_commas(text);
    const size_t unit = plain.empty() ? std::string::npos : std::string("kmbt").find((char)tolower(plain.back()));
    if (unit == std::string::npos) return typed_number(plain);
    if (plain.size() < 2 || !isdigit((unsigned char)plain[plain.size() - 2])) return NAN;
    return typed_number(plain.substr(0, plain.size() - 1)) * std::pow(1000.0, (double)unit + 1);
}

// Seconds in "90", "90s", "30m", "5min", "2 hours", "1h30m", "2d"; NAN for anything else, also for "1h30",
// whose second unit is not clear.
inline double parse_duration(const std::string& text) {
    struct Unit {
        double seconds;
        const char* names;
    };
    constexpr Unit units[] = {{1, " s sec secs second seconds "},
                              {60, " m min mins minute minutes "},
                              {3600, " h hr hrs hour hours "},
                              {86400, " d day days "}};
    double total = 0;
    size_t i = 0;
    const auto take = [&](auto belongs) {
        const size_t from = i;
        while (i < text.size() && belongs((unsigned char)text[i])) i++;
        return text.substr(from, i - from);
    };
    const auto blanks = [&] { take([](int c) { return c == ' '; }); };
    while (i < text.size()) {
        const bool first = i == 0;
        const double value = typed_number(take([](int c) { return isdigit(c) || c == '.' || c == '_'; }));
        blanks();
        std::string name = take([](int c) { return isalpha(c) != 0; });
        blanks();
        const bool whole = first && i == text.size();
        if (!(value >= 0) || !std::isfinite(value) || (name.empty() && !whole)) return NAN;
        for (char& c : name) c = (char)tolower(c);
        double seconds = name.empty() ? 1 : NAN;
        for (const Unit& unit : units)
            if (!name.empty() && std::string(unit.names).find(" " + name + " ") != std::string::npos) seconds = unit.seconds;
        total += value * seconds;
    }
    return text.empty() ? NAN : total;
}
inline double duration_of(const char* option, const std::string& text) {
    const double seconds = parse_duration(text);
    refuse_value(!(seconds > 0), option, text, "a duration (90s, 30m, 5h30m)");
    return seconds;
}
