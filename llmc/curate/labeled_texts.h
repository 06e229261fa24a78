// Labeled texts, for training and measuring a classifier. An item of the command line is
//   LABEL:FILE     or a folder or a pattern, whose files all have this label: en:news/*.jsonl
//   FILE           labeled by its name up to the first dot: en.txt, ja.jsonl.gz
//   FOLDER         its files in the same way, and each folder in it labeled by its own name: texts/en/news.txt
// Memory is bounded: at most `most_bytes` are kept per label, drawn evenly from all of its documents; from a long document,
// pieces spread evenly over it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "../base/rng.h"
#include "../base/text.h"
#include "../text/document_reader.h"
#include "text_classifier.h"

struct LabeledFile {
    std::string label, path;
};

// `option` names the list, for messages.
inline std::vector<LabeledFile> labeled_files(const Strings& items, const std::string& option) {
    namespace fs = std::filesystem;
    std::vector<LabeledFile> files;
    const auto add = [&](const std::string& label, const std::string& path) {
        if (label.empty())
            fail_usage("--%s: %s has no label; HINT: LABEL:FILE, such as en:%s", option.c_str(), path.c_str(), path.c_str());
        LeftOut left_out;
        for (const InputFile& file : input_files({path}, left_out)) files.push_back({label, file.path});
    };
    const auto by_name = [&](const fs::path& path) {
        const std::string name = path.filename().string();
        add(name.substr(0, name.find('.')), path.string());
    };
    for (const std::string& item : items) {
        const size_t colon = item.find(':');
        if (fs::is_directory(item)) {
            std::set<fs::path> entries;
            for (const auto& entry : fs::directory_iterator(item))
                if (entry.path().filename().string()[0] != '.') entries.insert(entry.path());
            if (entries.empty()) fail_usage("--%s: there is no file in %s", option.c_str(), item.c_str());
            for (const fs::path& entry : entries) by_name(entry);
        } else if (colon == std::string::npos || fs::exists(item)) by_name(item);
        else add(item.substr(0, colon), item.substr(colon + 1));
    }
    return files;
}

struct LabeledTexts {
    std::vector<std::string> labels;  // in alphabetical order
    struct Item {
        std::string text;
        int label;
        uint64_t key;  // random; decides which texts are kept if there are too many, and which are held out
    };
    std::vector<Item> items;  // in the order of the files

    // split: how a text file is split into documents (document_reader.h). labels: of a model to be measured; none: the files'
    // own
    static LabeledTexts read(const std::vector<LabeledFile>& files, TextInput input, std::vector<std::string> labels,
                             uint64_t seed, int threads) {
        constexpr size_t most_bytes = 256 << 20, most_of_document = 64 << 10;
        LabeledTexts all;
        all.labels = std::move(labels);
        const bool given = !all.labels.empty();
        if (!given) {
            for (const LabeledFile& file : files) all.labels.push_back(file.label);
            std::sort(all.labels.begin(), all.labels.end());
            all.labels.erase(std::unique(all.labels.begin(), all.labels.end()), all.labels.end());
        }
        std::vector<int> label_of_file;
        input.files.clear();
        input.whole_documents = true;
        for (const LabeledFile& file : files) {
            const auto at = std::find(all.labels.begin(), all.labels.end(), file.label);
            if (at == all.labels.end())
                fail("%s is labeled '%s'; the model knows %s", file.path.c_str(), file.label.c_str(),
                     joined(all.labels).c_str());
            label_of_file.push_back((int)(at - all.labels.begin()));
            input.files.push_back(file.path);
        }
        std::vector<size_t> bytes(all.labels.size());
        uint64_t number = 0;
        DocumentReader reader(input);
        for_each_chunk(
            reader, threads, "reading", [](const Chunk&, size_t) {},
            [&](const Chunk& chunk, size_t) {
                const auto r = random_bits(seed, RngPurpose::documents, 1, number++);
                const int label = label_of_file[chunk.file];
                std::string buffer;
                all.items.push_back(
                    {std::string(sample_text(chunk.text, most_of_document, buffer)), label, (uint64_t)r[0] << 32 | r[1]});
                bytes[(size_t)label] += all.items.back().text.size();
                if (bytes[(size_t)label] > 2 * most_bytes) bytes[(size_t)label] = all.thin_out(label, most_bytes);
            },
            [](size_t) {}, false);
        for (size_t label = 0; label < all.labels.size(); label++)
            if (bytes[label] > most_bytes) all.thin_out((int)label, most_bytes);
        return all;
    }

private:
    // Keeps the documents of a label with the smallest keys, up to `most_bytes`; returns their bytes.
    size_t thin_out(int label, size_t most_bytes) {
        std::vector<std::pair<uint64_t, size_t>> sizes;
        for (const Item& item : items)
            if (item.label == label) sizes.emplace_back(item.key, item.text.size());
        std::sort(sizes.begin(), sizes.end());
        size_t bytes = 0;
        uint64_t limit = ~0ull;
        for (const auto& [key, size] : sizes) {
            if (bytes + size > most_bytes) {
                limit = key;
                break;
            }
            bytes += size;
        }
        items.erase(
            std::remove_if(items.begin(), items.end(), [&](const Item& i) { return i.label == label && i.key >= limit; }),
            items.end());
        return bytes;
    }
};
