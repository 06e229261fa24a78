// The progress of `prepare --resume`: PREFIX.resume.json next to PREFIX.bin.partial and PREFIX.idx.partial, saved every few
// seconds and when the run ends with an error. A later run of the same command resumes after the last document on disk.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/clock.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../data/dataset.h"
#include "../text/document_reader.h"
#include "../options/options.h"

struct PrepareCounts {
    int64_t tokens = 0, bytes = 0, spelled = 0, lost = 0, in_loss = 0;
    PrepareCounts& operator+=(const PrepareCounts& more) {
        tokens += more.tokens;
        bytes += more.bytes;
        spelled += more.spelled;
        lost += more.lost;
        in_loss += more.in_loss;
        return *this;
    }
};

class PrepareState {
public:
    // Starts or resumes: when resuming, the reader starts where the last run stopped, and `counts` has that run's counts.
    // frame: the tokens that the tokenizer and the template put around any text.
    PrepareState(const PrepareOptions& o, const std::string& tokenizer_hash, const std::vector<int>& frame,
                 DocumentReader& reader, PrepareCounts& counts)
        : prefix_(o.output_prefix),
          path_(prefix_ + resume_ending),
          reader_(reader),
          counts_(counts),
          file_(reader.files_of_share().first) {
        if (!reader.can_be_read_again()) fail_usage("--resume needs files: a pipe cannot be read again");
        nlohmann::ordered_json same;
        same["input files"] = reader.input().files;
        same["tokenizer"] = tokenizer_hash;
        same["end of documents or template of conversations"] = frame;
        same["options"] = {o.split_documents,      o.json_keys, o.format,       o.on_bad_line, o.allow_binary, o.no_append_eod,
                           o.parse_special_tokens, o.chat,      o.chat_template};
        if (o.preference) same["options"].push_back("preference");
        if (!o.encoding.empty()) same["options"].push_back("encoding " + o.encoding);
        if (o.fim_rate > 0)
            same["options"].push_back(format("fim %.17g %.17g %lld", o.fim_rate, o.fim_spm_rate, (long long)o.seed));
        if (o.skip_bad_files) same["options"].push_back("skip-bad-files");
        const auto [first, end] = reader.files_of_share();
        const InputShare* share = reader.share();
        if (share) same["number of ranks"] = {share->size(), share->rank(), first, end};
        same_ = nlohmann::json::parse(json_text(same));
        refuse_other_ranks(o.output_prefix, share);
        if (file_exists(path_)) {
            undo_renames();
            load();
        }
    }
    const TokenDatasetWriter::Kept& kept() const { return kept_; }
    // True if the last run was killed after its data were complete, with only this file remaining.
    bool is_complete() const {
        namespace fs = std::filesystem;
        const auto there = [&](const std::string& ending) { return file_exists(prefix_ + ending); };
        for (const std::string ending : {".bin", ".idx", mask_ending})
            if (there(ending + partial_ending)) return false;
        if (kept_.documents == 0 || !there(".idx") || fs::last_write_time(prefix_ + ".idx") < fs::last_write_time(path_))
            return false;
        const TokenDataset data = TokenDataset::open(prefix_);
        return data.n_documents() >= kept_.documents && data.tokenizer().hash == same_["tokenizer"];
    }

    // True if this is the last document of the resumed run, read again: it shows that the text before the position is
    // unchanged.
    bool is_known(const Chunk& chunk) {
        if (last_.empty()) return false;
        if (chunk.file != file_ || chunk.number + 1 != chunk_ || hash_of(chunk.text) != last_) refuse_changed();
        last_.clear();
        return true;
    }
    // At the end of the input: fails if it ended before that document.
    void check_reached() const {
        if (!last_.empty()) refuse_changed();
    }
    // After a document was written: updates the state, and saves it every few seconds.
    void done(const Chunk& chunk, TokenDatasetWriter& writer) {
        file_ = chunk.file;
        chunk_ = chunk.number + 1;
        before_ = chunk.before;
        written_ = hash_of(chunk.text);
        done_ = counts_;
        kept_ = writer.place();
        if (monotonic_seconds() - saved_at_ > 5) save(writer);
    }
    // Saves the position after the last completed document. The writer's later data are written again when the run resumes.
    void save(TokenDatasetWriter& writer) {
        if (file_ >= reader_.files_of_share().second) return;  // a rank without files
        writer.keep();
        nlohmann::ordered_json j;
        j["same"] = same_;
        j["files"] = read_files(file_);
        j["at"] = {(int64_t)file_, chunk_};
        j["last"] = written_;
        j["judged"] = {before_.odd.bytes, before_.odd.nul, before_.odd.invalid, before_.lines, before_.bad, before_.bad_of_all};
        j["kept"] = {kept_.documents, kept_.tokens};
        for (const FileSum& sum : {kept_.bin, kept_.idx, kept_.mask})
            for (const size_t n : {sum.bytes, (size_t)sum.crc}) j["kept"].push_back(n);
        j["counts"] = {done_.tokens, done_.bytes, done_.spelled, done_.lost, done_.in_loss};
        write_file_atomically(path_, json_text(j) + "\n");
        saved_at_ = monotonic_seconds();
    }
    void finish() const { unlink(path_.c_str()); }
    // Removes the files of a rank above 0 after rank 0 has them.
    void remove_part() const {
        for (const std::string ending : {".bin", ".idx", mask_ending}) unlink((prefix_ + ending + partial_ending).c_str());
        finish();
    }

private:
    [[noreturn]] void refuse_changed() const {
        fail("%s has changed since %s was written; HINT: another --output-prefix, or omit --resume",
             reader_.input().files[file_].c_str(), path_.c_str());
    }
    // Fails if another number of ranks has left parts: nobody would resume from them.
    static void refuse_other_ranks(const std::string& part, const InputShare* share) {
        const std::string prefix = share && share->rank() > 0 ? part.substr(0, part.rfind(rank_mark)) : part;
        const auto [dir, begin] = folder_and_name(prefix + rank_mark);
        const std::string mine = share ? "-of-" + std::to_string(share->size()) + resume_ending : "";
        for (const std::string& name : names_in(dir))
            if (begins_with(name, begin) && ends_with(name, resume_ending) && (mine.empty() || !ends_with(name, mine)))
                fail(
                    "%s/%s belongs to a run with another number of ranks; HINT: repeat that run's command, or use another "
                    "--output-prefix, or omit --resume",
                    dir.c_str(), name.c_str());
    }
    static std::string hash_of(const std::string& text) { return format("%08x", crc32c(text.data(), text.size())); }
    // The first n files: sizes and modification times, each queried once. The current file may be edited after the part already
    // read.
    const std::vector<std::array<int64_t, 2>>& read_files(size_t n) {
        while (read_files_.size() < n) {
            const size_t i = read_files_.size();
            std::error_code error;
            const auto modified = std::filesystem::last_write_time(reader_.input().files[i], error);
            read_files_.push_back({reader_.file_sizes()[i], error ? 0 : (int64_t)modified.time_since_epoch().count()});
        }
        return read_files_;
    }

    // A process that was killed between renaming the tokens and renaming their index: both are resumed from.
    void undo_renames() const {
        const std::string idx = prefix_ + ".idx", bin = prefix_ + ".bin";
        if (file_exists(idx) || !file_exists(idx + partial_ending) || file_exists(bin + partial_ending)) return;
        if (!file_exists(bin) || !TokenDatasetWriter::is_index_of(idx + partial_ending, bin)) return;
        for (const std::string& path : {bin, prefix_ + mask_ending})
            if (file_exists(path) && rename(path.c_str(), (path + partial_ending).c_str()) != 0)
                fail("cannot rename %s to %s%s: %s", path.c_str(), path.c_str(), partial_ending, strerror(errno));
    }
    void load() {
        const nlohmann::json j = parse_json(read_whole_file(path_), path_);
        std::string other;
        std::array<int64_t, 2> at{};
        std::array<int64_t, 8> kept{};
        std::array<int64_t, 5> counts{};
        std::array<int64_t, 6> judged{};
        std::vector<std::array<int64_t, 2>> files;
        try {
            if (j.at("same").size() != same_.size()) other = "another number of ranks";
            else
                for (const auto& [name, value] : same_.items())
                    if (j.at("same").at(name) != value) other = (name == "number of ranks" ? "another " : "other ") + name;
            j.at("at").get_to(at);
            j.at("last").get_to(last_);
            j.at("kept").get_to(kept);
            j.at("counts").get_to(counts);
            j.at("judged").get_to(judged);
            j.at("files").get_to(files);
        } catch (const nlohmann::json::exception&) {
            other = "unknown content";
        }
        const size_t n_files = reader_.file_sizes().size();
        const auto negative = [](int64_t n) { return n < 0; };
        const bool changed = files.size() > n_files || files != read_files(files.size());
        const bool nowhere = at[0] >= (int64_t)n_files || std::any_of(at.begin(), at.end(), negative) ||
                             std::any_of(kept.begin(), kept.end(), negative);
        if (other.empty() && changed) other = "input files that have changed since";
        if (other.empty() && nowhere) other = "an invalid position";
        if (!other.empty())
            fail(
                "%s belongs to a run with %s; HINT: repeat that run's command, or use another --output-prefix, or omit "
                "--resume",
                path_.c_str(), other.c_str());
        file_ = (size_t)at[0];
        chunk_ = at[1];
        const auto sum = [&](size_t i) { return FileSum{(size_t)kept[i], (uint32_t)kept[i + 1]}; };
        kept_ = {kept[0], kept[1], sum(2), sum(4), sum(6)};
        counts_ = {counts[0], counts[1], counts[2], counts[3], counts[4]};
        done_ = counts_;
        written_ = last_;
        before_ = {{judged[0], judged[1], judged[2]}, judged[3], judged[4], judged[5]};
        reader_.begin_at(file_, last_.empty() ? chunk_ : chunk_ - 1, before_);
        print_line(stderr, format("note: resuming after %s, in %s", counted(kept_.documents, "document").c_str(),
                                  reader_.input().files[file_].c_str()));
    }

    std::string prefix_, path_;
    DocumentReader& reader_;
    PrepareCounts& counts_;  // now
    PrepareCounts done_;     // at the end of the last document
    nlohmann::json same_;    // must be the same in a resumed run
    TokenDatasetWriter::Kept kept_;
    size_t file_;
    int64_t chunk_ = 0;
    JudgedLines before_;  // before the last document
    std::vector<std::array<int64_t, 2>> read_files_;
    std::string written_, last_;  // hashes of the last written document; of the one still to be read again
    double saved_at_ = monotonic_seconds();
};
