// "Did you mean": the existing names closest to an unknown one.
#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

// Edit distance: insertions, deletions, replacements and swaps of neighboring characters.
inline size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); i++)
        for (size_t j = 0; j <= b.size(); j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[a.size()][b.size()];
}

// Names close to `given`: names that start with it up to an underscore; else names that differ in at most one letter of four;
// else names that contain it.
inline std::vector<std::string> similar_names(const std::string& given, const std::vector<std::string>& names) {
    std::vector<std::string> found;
    if (given.size() < 3 || given.size() > 100) return found;
    for (const std::string& name : names)
        if (name.compare(0, given.size() + 1, given + "_") == 0) found.push_back(name);
    if (!found.empty()) return found;
    size_t least = (given.size() + 3) / 4;
    for (const std::string& name : names) {
        const size_t d = edit_distance(given, name);
        if (d > least) continue;
        if (d < least) found.clear();
        least = d;
        found.push_back(name);
    }
    if (!found.empty()) return found;
    for (const std::string& name : names)
        if (("-" + name + "-").find("-" + given + "-") != std::string::npos) found.push_back(name);
    return found;
}
// The part of an error message that suggests names: "; did you mean a, b or c?", or ";" if there are none.
inline std::string did_you_mean(const std::string& given, const std::vector<std::string>& names,
                                const std::string& dashes = "") {
    const std::vector<std::string> found = similar_names(given, names);
    std::string text;
    for (size_t i = 0; i < found.size() && i < 5; i++)
        text += (i == 0 ? "; did you mean " : i + 1 == std::min<size_t>(found.size(), 5) ? " or " : ", ") + dashes + found[i];
    return text.empty() ? ";" : text + "?";
}

// An existing path close to `path`: its first missing part is replaced by the nearest name in that folder. "" if there is none.
inline std::string similar_path(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code error;
    std::vector<fs::path> parts;
    for (const fs::path& part : fs::path(path))
        if (!part.empty()) parts.push_back(part);
    fs::path folder, rest;
    size_t i = 0;
    while (i < parts.size() && fs::exists(folder / parts[i], error)) folder /= parts[i++];
    if (i == parts.size()) return "";
    std::vector<std::string> names;
    for (fs::directory_iterator entry(folder.empty() ? "." : folder, error), end;
         !error && entry != end && names.size() < 10000; entry.increment(error))
        names.push_back(entry->path().filename().string());
    std::sort(names.begin(), names.end());
    for (size_t k = i + 1; k < parts.size(); k++) rest /= parts[k];
    for (const std::string& name : similar_names(parts[i].string(), names)) {
        const fs::path found = rest.empty() ? folder / name : folder / name / rest;
        if (fs::exists(found, error)) return found.string();
    }
    return "";
}
// The hint at the end of an error about a missing path, or "".
inline std::string did_you_mean_path(const std::string& path) {
    const std::string found = similar_path(path);
    return found.empty() ? "" : "; did you mean " + found + "?";
}
