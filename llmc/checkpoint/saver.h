// Copies the training memory, then saves it in the background while training continues; the space that a checkpoint needs, and
// the times when one is due.
#pragma once
#include <omp.h>
#include <sys/statvfs.h>

#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <thread>

#include "../base/clock.h"
#include "../base/numbers.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../model/arena.h"
#include "../ops.h"
#include "../optimizer/training_memory.h"
#include "../parallel/world.h"
#include "checkpoint.h"
#include "model_texts.h"
#include "training_state.h"

// Moments in 8 bits are stored in bf16, so that any other type can be resumed from them.
inline size_t bytes_in_files(const TrainingMemory& m) {
    size_t bytes = 0;
    for (const Moment& moment : m.moments()) bytes += (m.*moment.of).rounded() ? sizeof(bf16) : sizeof(real);
    return bytes;
}

// averages: the weights' average is saved, too.
inline size_t checkpoint_bytes(const ParameterTable& table, const ModelTexts& texts, size_t moment_bytes, bool averages) {
    const size_t models = averages ? 2 : 1, weights = (sizeof(floatX) == sizeof(real) ? 0 : sizeof(floatX)) + sizeof(real);
    return table.trained * (models * weights + moment_bytes) + models * (table.rows.size() * 1024 + texts.bytes()) + (64 << 10);
}

// Free bytes of the file system of OUT; infinite if unknown.
inline double free_space(const std::string& out) {
    struct statvfs fs;
    return statvfs(out.c_str(), &fs) == 0 ? (double)fs.f_bavail * (double)fs.f_frsize : INFINITY;
}

// Before the checkpoint of `step` is saved, which needs `needed` bytes: if space is short, first removes checkpoints that
// prune() would remove after it, except the newest, then checkpoints that a rollback might need. fail()s if that is not enough.
inline void make_space(const std::string& out, int64_t step, KeptCheckpoints kept, size_t needed) {
    const auto enough = [&] { return free_space(out) >= (double)needed; };
    if (!enough() && kept.newest > 0) {
        kept.newest = std::max<int64_t>(kept.newest - 1, 1);
        for (const int64_t way_back : {kept.way_back, int64_t{-1}}) {
            kept.way_back = way_back;
            for (const int64_t other : superfluous(out, step - 1, kept))
                if (!enough()) remove_checkpoint(out, other);
        }
    }
    if (!enough())
        fail("no space for a checkpoint in %s: it needs %s, %s are free; HINT: %s", out.c_str(),
             human_bytes((double)needed).c_str(), human_bytes(free_space(out)).c_str(),
             kept.newest == 1 ? "make space there" : "--keep 1, or make space there");
}

// ---- the background ---------------------------------------------------------------------------------------------------------
// Saves checkpoints on separate threads: save() copies the training memory into m.copy (or, if no copy of the moments was
// planned, saves while training waits). Every rank writes its shards into files that the first rank has created, and computes
// checksums of them in memory; then all share reading them back from the disk, which must give the same checksums; then the
// first rank renames the directory. Between these phases ranks synchronize in proceed(), which all must call after each step. A
// failure on any rank never throws: outcome() reports it on every rank, and the next save tries again.
class Saver {
public:
    struct Settings {
        std::string out;
        KeptCheckpoints kept;
        ModelTexts texts;
        std::string reference;                       // a file in each checkpoint (preference_reference.h); empty: none
        RunLock* lock = nullptr;                     // of out; held by the first rank only
        std::shared_ptr<Monitor> monitor = nullptr;  // notified of a disk that hangs; may be null
    };
    struct Outcome {
        int64_t step;
        double seconds;
        std::string error;  // empty: success
        bool taken;         // the directory is another run's by now: this one must end
    };

    Saver(be::Ctx& ctx, Settings settings, const TrainingMemory& m)
        : ctx_(ctx), world_(m.ranks->world), settings_(std::move(settings)), m_(m), whole_(trained_table(m.c)) {
        if (settings_.monitor) settings_.monitor->add(this, [this] { return wait_for_disk(); });
    }
    Saver(const Saver&) = delete;
    Saver& operator=(const Saver&) = delete;
    virtual ~Saver() { retire(); }

    // If parameters are not in the order of the shards, there must be a copy of this rank's shards of them.
    void save(const TrainingState& state) {
        wait();
        state_ = state;
        start_ = monotonic_seconds();
        tries_ = 0;
        parts_ = {m_.state(), m_.params};
        expert_biases_ = m_.expert_biases.values();
        if (encoded()) virtual_tokens_ = m_.virtual_tokens.computed(ctx_);
        const Parts& copy = m_.copy;
        if (copy.params) {
            parts_.params = copy.params;
            for (const Bucket& b : m_.shards.buckets)
                be::download(ctx_, copy.params + b.shard, m_.weights_of(b), b.n * sizeof(floatX));
        }
        if (m_.copies) {
            const size_t n = m_.shards.size;
            parts_ = copy;
            const auto read = [&](void* to, const void* from, size_t bytes) { read_state(ctx_, m_, to, from, bytes); };
            if (m_.master_low_bits) read(copy.master_low_bits, m_.master_low_bits, n * sizeof(LowerHalf));
            for (const Moment& moment : m_.moments()) {
                const Elements& from = m_.*moment.of;
                read((copy.*moment.of).data, from.data, moment.n * from.element_bytes());
            }
            if (m_.average) read(copy.average, m_.average, n * sizeof(real));
        } else {
            wait_for_device(ctx_);
        }
        begin();
        if (!m_.copies) wait_for_memory();
    }

    // For the watchdog, which asks on a thread of its own: since when the disk has not taken or given anything of a save.
    Activity wait_for_disk() { return done_ ? Activity() : current_wait(); }
    // Enters the next phase if all ranks have finished the last. wait() repeats this until the checkpoint is saved, so that a
    // rank that saves for longer than --distributed-timeout is not considered lost.
    void proceed() {
        while (phase_ != Phase::idle && everyone(is_done())) next_phase();
    }
    void wait() {
        waits_ = true;
        for (proceed(); phase_ != Phase::idle; proceed()) usleep(1000);
        waits_ = false;
    }
    // Until the copy of the training memory is free for another save.
    void wait_for_memory() {
        for (; uses_memory(); proceed()) usleep(1000);
    }
    bool idle() const { return phase_ == Phase::idle; }  // the same on every rank
    // The result of the last save, once, as soon as it is complete.
    std::optional<Outcome> outcome() { return std::exchange(outcome_, {}); }

protected:  // the form of a save, which NodeSnapshots (node_snapshots.h) replaces
    enum class Phase { make, write, read, send, publish, prune, idle };

    virtual Phase after(Phase phase) const {
        return phase == Phase::read ? Phase::publish : phase == Phase::publish ? Phase::idle : (Phase)((int)phase + 1);
    }
    virtual bool uses_memory() const { return phase_ != Phase::idle; }  // it still reads the training memory
    virtual bool is_done() { return done_; }                            // this rank, with the phase
    virtual Activity current_wait() const {
        return {true, "a save that makes no progress", "", 0, ticked(), "look at the disk or the file system of --out"};
    }
    virtual void open_written() { written_.emplace(directory().path()); }
    // After an error on any rank.
    virtual void give_up() {
        if (first()) directory().remove();
    }
    // Before a derived class's members are gone.
    void retire() {
        if (settings_.monitor) settings_.monitor->remove(this);
        if (thread_.joinable()) thread_.join();
    }

    NewDirectory directory() const { return NewDirectory(step_directory(settings_.out, state_.step)); }
    bool first() const { return !world_ || world_->rank() == 0; }
    // The trained tensors compute virtual tokens: these are the adapter, and the tensors are saved for resuming, only in fp32.
    bool encoded() const { return m_.c.virtual_tokens.encoded(); }
    bool has_masters() const { return has_lower_halves || encoded(); }
    bool everyone(bool mine) const {
        if (!world_) return mine;
        std::vector<char> all((size_t)world_->size());
        const char byte = mine;
        world_->all_gather(&byte, 1, all.data());
        return std::all_of(all.begin(), all.end(), [](char c) { return c != 0; });
    }

    double ticked() const {
        const std::lock_guard<std::mutex> lock(ticked_mutex_);
        return written_ ? written_->ticked() : monotonic_seconds();
    }
    void begin() {
        error_.clear();
        lost_ = taken_ = false;
        {
            const std::lock_guard<std::mutex> lock(ticked_mutex_);
            open_written();
        }
        phase_ = Phase::make;
        start_phase();
    }
    // Runs f, whose failure is the save's.
    template <class F>
    void guarded(F f) {
        try {
            f();
        } catch (const std::exception& e) {
            error_ = e.what();
            if (error_.empty()) error_ = "unknown error";
            lost_ = dynamic_cast<const LostBytes*>(&e);
            taken_ = dynamic_cast<const DirectoryTaken*>(&e);
        }
    }
    virtual void start_phase() {
        written_->tick();
        done_ = false;
        const auto work = [this] {
            guarded([this] {
                run_phase(phase_);
                // A single rank runs all phases without synchronization.
                for (Phase phase = phase_; !world_ && phase < Phase::publish;) {
                    conclude(phase, report_);
                    phase = after(phase);
                    run_phase(phase);
                }
            });
            done_ = true;
        };
        try {
            thread_ = std::thread([work] {
                cpu::op_threads() = 1;  // this thread only: the others belong to training
                omp_set_num_threads(1);
                work();
            });
        } catch (const std::system_error&) {  // no more threads: run here while training waits
            work();
        }
    }
    virtual void run_phase(Phase phase) {
        const NewDirectory directory = this->directory();
        report_.clear();
        switch (phase) {
            case Phase::make: return make(directory);
            case Phase::write: return write(directory.path());
            case Phase::read: return read(directory.path());
            case Phase::publish: return publish(directory);
            default: return;
        }
    }
    // After a phase, with all ranks' reports, which are the same on each.
    virtual void conclude(Phase phase, const std::string& reports) {
        const std::string dir = directory().path();
        if (phase == Phase::write) {
            WrittenFiles all(dir);
            all.add_lines(reports);
            given_ = all.sums();
        } else if (phase == Phase::read) check_against_disk(dir, given_, sums_of(reports));
    }
    void next_phase() {
        if (thread_.joinable()) thread_.join();
        if (world_) {  // exchange results and errors
            std::string errors, reports;
            const std::vector<std::string> all_errors = world_->all_gather(error_), all_reports = world_->all_gather(report_);
            for (size_t r = 0; r < all_errors.size(); r++) {
                if (errors.empty() && !all_errors[r].empty()) errors = format("rank %zu: %s", r, all_errors[r].c_str());
                reports += all_reports[r];
            }
            error_ = errors;
            lost_ = !everyone(!lost_);
            taken_ = !everyone(!taken_);
            if (error_.empty()) guarded([&] { conclude(phase_, reports); });
        }
        if (lost_ && uses_memory() && tries_++ < 2) {
            if (first()) print_line(stderr, "warning: " + error_ + "; the checkpoint is written again");
            return begin();
        }
        phase_ = !world_ || !error_.empty() ? Phase::idle : after(phase_);
        if (phase_ != Phase::idle) return start_phase();
        if (!error_.empty()) give_up();
        outcome_ = Outcome{state_.step, monotonic_seconds() - start_, error_, taken_};
    }

    // The files of a checkpoint; if the model's own weights are not fp32, fp32 weights are separate files.
    std::vector<TensorFiles> files(const std::string& dir) const {
        std::vector<TensorFiles> all;
        const char* const weights = m_.frozen ? "/adapter_model.safetensors" : "/model.safetensors";
        const std::vector<VectorInFile> biases =
            m_.frozen ? std::vector<VectorInFile>() : expert_biases_in_file(m_.c, expert_biases_);
        const auto add_model = [&](const std::string& path) {
            all.emplace_back(path, whole_, dtype_of<floatX>, TensorFiles::most_bytes, biases);
        };
        if (!encoded()) add_model(dir + weights);
        if (has_masters()) all.emplace_back(dir + "/training/master.safetensors", whole_, dtype_of<real>);
        for (const Moment& moment : m_.moments())
            all.emplace_back(dir + "/training/" + moment.name + ".safetensors", whole_,
                             (parts_.*moment.of).rounded() ? dtype_of<bf16> : dtype_of<real>);
        if (m_.average) add_model(dir + "/ema" + weights);
        if (m_.average && has_lower_halves) all.emplace_back(dir + "/training/ema.safetensors", whole_, dtype_of<real>);
        return all;
    }

    void make(const NewDirectory& directory) {
        if (!first()) return;
        if (settings_.lock) settings_.lock->hold();
        make_space(settings_.out, state_.step, settings_.kept,
                   checkpoint_bytes(whole_, settings_.texts, bytes_in_files(m_), m_.average) + settings_.reference.size());
        directory.create();
        try {
            make_directory(directory.path() + "/training");
            if (m_.average) make_directory(directory.path() + "/ema");
            start_files(directory.path());
        } catch (...) {
            directory.remove();
            throw;
        }
    }
    // The first rank writes the texts and the starts of all files.
    void start_files(const std::string& dir) {
        write_model_texts(dir, m_.c, settings_.texts, *written_);
        if (m_.average) write_model_texts(dir + "/ema", m_.c, settings_.texts, *written_);
        written_->write(state_file(dir), json_text(to_json(state_), 2) + "\n");
        if (!settings_.reference.empty()) written_->write(reference_file(dir), settings_.reference);
        for (const TensorFiles& f : files(dir)) f.create(*written_);
        if (encoded()) write_virtual_tokens(dir + "/adapter_model.safetensors");
    }
    void write_virtual_tokens(const std::string& path) {
        ModelConfig c = m_.c;
        c.virtual_tokens = c.virtual_tokens.computed();
        const ParameterTable table = trained_table(c);
        const TensorFiles files(path, table, dtype_of<floatX>);
        files.create(*written_);
        const Shards whole(table, {}, false, table.size);
        virtual_tokens_.resize(table.size);
        write_parts(files, table, whole, whole.not_duplicated(table), *written_, [&](size_t i) { return virtual_tokens_[i]; });
    }
    // In parallel if training leaves the cores idle; on a CPU one after another.
    static void run_all(const std::vector<std::function<void()>>& parts) {
        constexpr auto any = std::launch::async | std::launch::deferred;  // deferred if there are no more threads
        constexpr auto launch = be::memory_is_host ? std::launch::deferred : any;
        std::vector<std::future<void>> running;
        for (const auto& part : parts) running.push_back(std::async(launch, part));
        for (auto& part : running) part.get();
    }
    void write(const std::string& dir) {
        const std::vector<TensorFiles> all = files(dir);
        std::vector<std::function<void()>> parts;
        const auto write = [&](auto part) {
            const TensorFiles& f = all[parts.size()];
            parts.push_back([&f, part, this] { write_parts(f, m_.table, m_.shards, m_.not_duplicated, *written_, part); });
        };
        if (!encoded()) write([&](size_t i) { return parts_.params[i]; });
        if (has_masters()) write([&](size_t i) { return load_weight(parts_.params, parts_.master_low_bits, i); });
        for (const Moment& moment : m_.moments())
            (parts_.*moment.of).visit_moment([&, n = moment.n](const auto* x) {
                using E = std::decay_t<decltype(*x)>;
                using Stored = std::conditional_t<std::is_same_v<E, real>, real, bf16>;
                write([x, n](size_t i) { return i < n ? Stored((real)x[i]) : Stored(0.0f); });
            });
        const real* const average = parts_.average;
        if (average) write([average](size_t i) { return nearest_weight(average[i]); });
        if (average && has_lower_halves) write([average](size_t i) { return average[i]; });
        run_all(parts);
        report_ = written_->lines();
    }
    void read(const std::string& dir) {
        constexpr int at_once = 4;
        const int rank = world_ ? world_->rank() : 0, ranks = world_ ? world_->size() : 1;
        const Strings names = names_of(given_);
        std::string sums[at_once];
        std::vector<std::function<void()>> parts;
        for (int k = 0; k < at_once; k++)
            parts.emplace_back([&, k] {
                sums[k] = sum_lines(dir, names, rank + ranks * k, ranks * at_once, true, [this] { written_->tick(); });
            });
        run_all(parts);
        for (const std::string& lines : sums) report_ += lines;
    }
    void publish(const NewDirectory& directory) const {
        if (!first()) return;
        if (settings_.lock) settings_.lock->hold();
        sync_file(settings_.out + "/log.jsonl");  // no checkpoint is ahead of the log, whatever happens to the power
        directory.publish(given_);
        std::exception_ptr problem;
        try {
            make_latest(settings_.out, step_directory(settings_.out, state_.step));
        } catch (...) {
            problem = std::current_exception();  // rethrown after prune(), so that the disk does not fill up
        }
        prune(settings_.out, state_.step, settings_.kept);
        if (problem) std::rethrow_exception(problem);
    }

    be::Ctx& ctx_;
    World* world_;  // null for one rank
    Settings settings_;
    const TrainingMemory& m_;
    ParameterTable whole_;                // of the files, which hold all tensors
    std::vector<floatX> virtual_tokens_;  // the virtual tokens, if they are computed

    // State of the save in progress; owned by its thread while it runs. report_: lines of this rank's files, for the others.
    Phase phase_ = Phase::idle;
    TrainingState state_;
    Parts parts_;
    std::vector<real> expert_biases_;
    std::string error_, report_;
    bool lost_ = false;                    // the data read back differed from the data written
    bool taken_ = false;                   // another run has taken the directory
    int tries_ = 0;                        // saves of this step that ended so
    std::optional<WrittenFiles> written_;  // by this rank
    mutable std::mutex ticked_mutex_;      // of written_, between begin() and the watchdog
    FileSums given_;                       // by all
    double start_ = 0;
    std::thread thread_;
    std::atomic<bool> done_{true};
    bool waits_ = false;  // training does, for the save
    std::optional<Outcome> outcome_;
};

// ---- when ------------------------------------------------------------------------------------------------------------------
// "500": every 500 steps; "30m": every 30 minutes; "0": at the end; "never": not even then.
struct SaveInterval {
    int64_t steps = 0;
    double seconds = 0;
    bool never = false;
};
inline SaveInterval parse_save_interval(const std::string& text) {
    // A number alone is in steps; one with a unit of time is a duration, so that 30m is 30 minutes.
    const bool timed = text.find_first_of("smhdSMHD") != std::string::npos;
    if (const double steps = timed ? NAN : typed_count(text); steps >= 0 && steps <= 9e15 && steps == std::floor(steps))
        return {(int64_t)steps, 0};
    if (text == "never") return {0, 0, true};
    const double seconds = timed ? parse_duration(text) : NAN;
    refuse_value(!(seconds > 0), "--save-every", text, "a number of steps (500), a duration (90s, 30m, 2h), or never");
    return {0, seconds};
}
