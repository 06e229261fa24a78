// Models, adapters and tokenizers in Hugging Face's cache, by name (ORG/NAME): the directory filled by `hf download ORG/NAME`.
// Nothing is downloaded here.
#pragma once
#include <cstdlib>
#include <filesystem>
#include <string>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/similar.h"
#include "../base/utf8.h"

// HF_HUB_CACHE, else hub/ in HF_HOME, else in ~/.cache/huggingface.
inline std::string hub_cache() {
    const auto set = [](const char* name) {
        const char* const value = getenv(name);
        return std::string(value ? value : "");
    };
    for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
        if (!set(name).empty()) return set(name);
    if (!set("HF_HOME").empty()) return set("HF_HOME") + "/hub";
    return (set("XDG_CACHE_HOME").empty() ? set("HOME") + "/.cache" : set("XDG_CACHE_HOME")) + "/huggingface/hub";
}

// True if it may be the name of a model: ORG/NAME, or just NAME as for the first models.
inline bool is_hub_name(const std::string& name) {
    const char* const allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/";
    const size_t slash = name.find('/');
    return !name.empty() && name[0] != '.' && name.find_first_not_of(allowed) == std::string::npos && slash != 0 &&
           slash != name.size() - 1 && (slash == std::string::npos || name.find('/', slash + 1) == std::string::npos);
}

// The directory of the downloaded model, adapters or tokenizer of this name; empty if there is none.
inline std::string hub_snapshot(const std::string& name) {
    if (!is_hub_name(name)) return "";
    std::string folder = "models--" + name;
    if (const size_t slash = folder.find('/'); slash != std::string::npos) folder.replace(slash, 1, "--");
    const std::string model = hub_cache() + "/" + folder;
    if (!file_exists(model + "/refs/main")) return "";
    std::string commit = read_whole_file(model + "/refs/main");
    commit.erase(commit.find_last_not_of(" \r\n\t") + 1);
    const std::string directory = model + "/snapshots/" + commit;
    for (const char* file : {"/config.json", "/adapter_config.json", "/tokenizer.json", "/tokenizer.model"})
        if (file_exists(directory + file)) return directory;
    return "";
}

// The name in a file that is used instead of a symbolic link (point_link); empty: it is another file.
inline std::string named_by_file(const std::string& file) {
    std::string name = beginning_of(file);
    while (!name.empty() && (name.back() == '\n' || name.back() == '\r')) name.pop_back();
    return name.find_first_of("/\n") == std::string::npos && name.compare(0, 5, "step_") == 0 ? name : "";
}
// A path through a run's `latest` where that is such a file: RUN/latest, RUN/latest/ema.
inline std::string through_latest(const std::string& given) {
    std::filesystem::path path;
    for (const auto& part : std::filesystem::path(given)) {
        const std::filesystem::path next = path / part;
        const std::string name = part == "latest" && is_regular(next.string()) ? named_by_file(next.string()) : "";
        path = name.empty() ? next : path / name;
    }
    return path.string();
}

// The end of an error about a path that does not exist: an existing path close to it, else how a model of this name is
// downloaded, else the hint `other`. Only ORG/NAME names a model that may be downloaded, and not where ORG is a folder here or
// NAME a file's.
inline std::string hint_on_missing_path(const std::string& given, const std::string& other = "") {
    namespace fs = std::filesystem;
    if (const std::string similar = did_you_mean_path(given); !similar.empty()) return similar;
    const fs::path path(given);
    const std::string end = path.extension().string();
    bool file = false;
    for (const char* ending : {".json", ".jsonl", ".toml", ".txt", ".bin", ".idx", ".gguf", ".safetensors"})
        file |= end == ending;
    const bool gpt2 = given == "gpt2" || given == "gpt2-medium" || given == "gpt2-large" || given == "gpt2-xl";
    if (gpt2) return "; HINT: hf download openai-community/" + given + ", then openai-community/" + given;
    const bool model = is_hub_name(given) && given.find('/') != std::string::npos && !file && !fs::exists(path.parent_path());
    if (const std::string site = "https://huggingface.co/"; begins_with(given, site))
        return "; HINT: hf download " + given.substr(site.size());
    if (given == "latest" || given == "last")
        return "; HINT: a run's newest checkpoint is RUN/latest; --resume auto finds it in --out";
    return model ? "; HINT: hf download " + given : other.empty() ? "" : "; HINT: " + other;
}

// Returns a path unchanged, and the directory for the name of a downloaded model. Fails for anything else.
inline std::string local_path(const std::string& given) {
    if (const std::string path = through_latest(given); file_exists(path) || !is_hub_name(given)) return path;
    const std::string snapshot = hub_snapshot(given);
    if (snapshot.empty())
        fail("%s does not exist, neither here nor in Hugging Face's cache %s%s", given.c_str(), hub_cache().c_str(),
             hint_on_missing_path(given).c_str());
    return snapshot;
}
