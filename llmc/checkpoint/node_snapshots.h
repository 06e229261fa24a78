// Snapshots of a run on several nodes: the memory of each holds the parts of its own ranks (part_file.h) and a copy of the
// parts of the node before it in a ring, so that any one node may be lost. As in Gemini (Wang et al., 2023), but copies are
// sent in the background over MPI between steps (partners.h).
//   NodeSnapshots   saves: each rank writes its part and sends it to its partner; when every part and copy has arrived, all are
//                   renamed, and only then are older ones removed. After an error on any rank, the older snapshot remains
//   FoundParts      the parts on the nodes of a new start. assemble() writes the parts of a step into a checkpoint of OUT, for
//                   any number of ranks and nodes, after comparing checksums: in place of a part that is torn, damaged or of
//                   another save of this step, its copy is used
// Every function here is called by all ranks.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../parallel/partners.h"
#include "../parallel/rounds.h"
#include "part_choice.h"
#include "part_file.h"
#include "saver.h"
#include "snapshots.h"

// ---- the directories of all nodes ------------------------------------------------------------------------------------------
struct NamedSnapshots {
    std::string named, real_out;  // the directory's name, and OUT's; as the first rank reads them
};
inline NamedSnapshots snapshots_of_nodes(World& world, const std::string& out) {
    const bool first = world.rank() == 0;
    return {world.all_gather(first ? snapshots_named_in(out) : "")[0], world.all_gather(first ? real_path(out) : "")[0]};
}

// A run's snapshots on all nodes, and their name.
inline void remove_snapshots(World& world, const std::string& out) {
    const NamedSnapshots s = snapshots_of_nodes(world, out);
    if (world.local_rank() == 0) remove_snapshots_here(s.named, s.real_out);
    world.barrier();
    if (world.rank() == 0) unlink(snapshots_file(out).c_str());
}

// Before training continues from `step`, which is in OUT: later snapshots belong to an abandoned part of the run. Parts of
// earlier ones are removed, too, since this run does not replace them.
inline void remove_snapshots_after(World& world, const std::string& out, int64_t step) {
    const NamedSnapshots s = snapshots_of_nodes(world, out);
    const std::string root = world.local_rank() == 0 ? snapshots_here(s.named, s.real_out) : "";
    for (const int64_t later : root.empty() ? std::vector<int64_t>() : find_checkpoints(root))
        if (later > step) remove_checkpoint(root, later);
    for (const std::string& part : parts_in(root)) unlink((root + "/" + part).c_str());
    world.barrier();
}

// New directories on all nodes; returns this node's.
inline std::string make_snapshots_of_nodes(World& world, const std::string& out, const std::string& parent) {
    const NamedSnapshots old = snapshots_of_nodes(world, out);
    const std::string named = world.all_gather(world.rank() == 0 ? new_snapshots_name(parent, true) : "")[0];
    if (world.local_rank() == 0) {
        remove_snapshots_here(old.named, old.real_out);
        make_snapshots_here(named, old.real_out);
    }
    world.barrier();
    if (world.rank() == 0) write_file_atomically(snapshots_file(out), named);
    return on_this_node(named);
}

// ---- saving ----------------------------------------------------------------------------------------------------------------
class NodeSnapshots : public Saver {
public:
    // settings.out: this node's directory.
    NodeSnapshots(be::Ctx& ctx, Settings settings, const TrainingMemory& m, World& world)
        : Saver(ctx, std::move(settings), m), ring_(world.nodes()), transfer_(world) {}
    ~NodeSnapshots() override {
        retire();
        // After an error MPI may still use the memory of messages.
        if (sending_)
            for (auto& copy : copies_) (void)copy.release();
        if (sending_) (void)own_.release();
    }

private:
    // A file in memory for a part of another node's rank.
    class Copy {
    public:
        Copy(const std::string& path, size_t bytes) : path_(path), temporary_(temporary_name(path)), bytes_(bytes) {
            const int fd = create_new_file(temporary_);
            if (fd < 0) fail_to_write(path, errno);
            int error = posix_fallocate(fd, 0, (off_t)bytes);  // now: a missing page would end the process later
            void* p = error ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (!error && p == MAP_FAILED) error = errno;
            close(fd);
            if (error) {
                unlink(temporary_.c_str());
                fail_to_write(path, error, "the copy of another node's snapshot needs memory here");
            }
            data_ = (char*)p;
        }
        Copy(const Copy&) = delete;
        Copy& operator=(const Copy&) = delete;
        ~Copy() {
            munmap(data_, bytes_);
            unlink(temporary_.c_str());
        }
        char* data() const { return data_; }
        void check(const PartId& id, const std::function<void()>& tick) const {
            const PartFile part(temporary_, true, tick);
            if (part.id().save != id.save || part.id().step != id.step) fail("%s belongs to another save", path_.c_str());
        }
        void commit() const {
            if (rename(temporary_.c_str(), path_.c_str()) != 0) fail_to_write(path_, errno);
        }

    private:
        std::string path_, temporary_;
        size_t bytes_;
        char* data_;
    };

    Phase after(Phase phase) const override { return (Phase)((int)phase + 1); }
    bool uses_memory() const override { return phase_ == Phase::make || phase_ == Phase::write; }
    void open_written() override {
        part_ = std::make_unique<PartWriter>();
        written_.emplace(directory().path(), part_.get());
        id_ = {state_.step, 0, (uint32_t)world_->rank(), (uint32_t)world_->size()};
    }
    std::string path_of(uint32_t part) const {
        PartId id = id_;
        id.part = part;
        return settings_.out + "/" + part_name(id);
    }
    void run_phase(Phase phase) override {
        const std::string dir = directory().path();
        report_.clear();
        switch (phase) {
            case Phase::make:
                if (first() && settings_.lock) settings_.lock->hold();
                part_->open(path_of(id_.part));
                if (!first()) return;
                start_files(dir);
                report_ = std::to_string((uint64_t)std::random_device()() << 32 | std::random_device()());
                return;
            case Phase::write:
                write(dir);
                report_ = format("%zu\n", part_->finish(id_));
                return;
            case Phase::read:
                for (const int r : ring_.senders(world_->rank()))
                    copies_.push_back(std::make_unique<Copy>(path_of((uint32_t)r), sizes_[(size_t)r]));
                own_ = std::make_unique<MappedFile>(part_->unfinished_path());
                return;
            case Phase::publish:
                own_.reset();
                for (const auto& copy : copies_) copy->check(id_, [this] { written_->tick(); });
                for (const auto& copy : copies_) copy->commit();
                copies_.clear();
                part_->commit();
                return;
            case Phase::prune:
                if (world_->local_rank() == 0) remove_older_parts();
                return;
            default: return;
        }
    }
    // An error here leaves too many parts, but the new snapshot is complete.
    void remove_older_parts() const {
        try {
            for (const std::string& name : parts_in(settings_.out))
                if (part_of_name(name).step != id_.step) unlink((settings_.out + "/" + name).c_str());
        } catch (const Error& e) {
            print_line(stderr, std::string("warning: ") + e.what());
        }
    }
    void conclude(Phase phase, const std::string& reports) override {
        std::istringstream in(reports);
        if (phase == Phase::make) in >> id_.save;
        if (phase == Phase::write) sizes_ = {std::istream_iterator<size_t>(in), std::istream_iterator<size_t>()};
    }
    void give_up() override {
        part_.reset();
        own_.reset();
        copies_.clear();
        for (const int r : ring_.senders(world_->rank())) unlink(path_of((uint32_t)r).c_str());
        unlink(path_of(id_.part).c_str());
    }

    // Messages are sent and received by the thread that trains, between steps.
    void start_phase() override {
        if (phase_ != Phase::send) return Saver::start_phase();
        std::vector<PartnerTransfer::Message> receive;
        const std::vector<int> senders = ring_.senders(world_->rank());
        for (size_t i = 0; i < senders.size(); i++)
            receive.push_back({senders[i], copies_[i]->data(), sizes_[(size_t)senders[i]]});
        transfer_.start({ring_.partner(world_->rank()), const_cast<char*>(own_->data()), own_->size()}, receive);
        polled_ = monotonic_seconds();
        sending_ = true;
        done_ = false;
    }
    bool is_done() override {
        if (!sending_) return done_;
        // At most 1% of the time, except while training waits for the save.
        const double seconds = waits_ ? 0.05 : std::min(0.01 * (monotonic_seconds() - polled_), 0.5);
        if (!done_ && transfer_.poll(seconds)) done_ = true;
        polled_ = monotonic_seconds();
        if (done_) sending_ = false;
        return done_;
    }
    Activity current_wait() const override {
        if (!sending_) return Saver::current_wait();
        return {true, "sending a snapshot to the next node",     "",
                0,    monotonic_seconds() - transfer_.stalled(), "look at the network between the nodes"};
    }

    NodeRing ring_;
    PartnerTransfer transfer_;
    PartId id_;
    std::unique_ptr<PartWriter> part_;
    std::unique_ptr<MappedFile> own_;            // this rank's part, to be sent
    std::vector<std::unique_ptr<Copy>> copies_;  // of the ranks that send here
    std::vector<size_t> sizes_;                  // of all ranks' parts
    std::atomic<bool> sending_{false};
    double polled_ = 0;
};

// ---- resuming --------------------------------------------------------------------------------------------------------------
class FoundParts {
public:
    FoundParts(World& world, const std::string& out) : world_(world), ring_(world.nodes()) {
        const NamedSnapshots s = snapshots_of_nodes(world, out);
        root_ = snapshots_here(s.named, s.real_out);
        std::string lines;
        for (const std::string& name : world.local_rank() == 0 ? parts_in(root_) : Strings())
            if (const PartId id = id_of(name); part_name(id) == name)
                lines += format("%lld %llu %u %u\n", (long long)id.step, (unsigned long long)id.save, id.parts, id.part);
        const std::vector<std::string> all = world.all_gather(lines);
        for (int r = 0; r < world.size(); r++) {
            std::istringstream in(all[(size_t)r]);
            PartSave save;
            for (uint32_t part; in >> save.step >> save.number >> save.parts >> part;) found_.add(save, part, ring_.node_of(r));
        }
        saves_ = found_.complete();
    }
    // The saves of which the nodes have all parts, if these are intact.
    const std::vector<PartSave>& saves() const { return saves_; }

    // Writes a save as a checkpoint of OUT; returns the problem, or "".
    std::string assemble(const PartSave& save, const std::string& out, const KeptCheckpoints& kept) {
        mine_.clear();
        if (!together([&](auto& tick) { return read_parts(save, tick); })) return problem_;
        std::map<uint32_t, std::map<int, size_t>> intact;  // of each part, the ranks that have read it, and its bytes
        for (int r = 0; r < world_.size(); r++) {
            std::istringstream in(reports_[(size_t)r]);
            uint32_t part;
            for (size_t bytes; in >> part >> bytes;) intact[part][r] = bytes;
        }
        const std::map<uint32_t, int> readers = choose_readers(intact);
        size_t bytes = 0;
        for (uint32_t part = 0; part < save.parts; part++) {
            if (!readers.count(part))
                return format("the snapshot of step %lld is not whole: no node has an intact part %u of %u",
                              (long long)save.step, part, save.parts);
            bytes += intact.at(part).begin()->second;
        }
        const NewDirectory directory(step_directory(out, save.step));
        const std::string& dir = directory.path();
        const bool first = world_.rank() == 0;
        WrittenFiles written(dir);
        FileSums given;
        const bool done = together([&](auto&) {
                              if (first) make_space(out, save.step, kept, bytes);
                              if (first) directory.create();
                              return "";
                          }) &&
                          together([&](auto& tick) {
                              for (const auto& [part, file] : mine_)
                                  if (readers.at(part) == world_.rank()) write(*file, dir, written, tick);
                              return written.lines();
                          }) &&
                          together([&](auto& tick) {
                              WrittenFiles all(dir);
                              all.add_lines(all_reports());
                              given = all.sums();
                              return sum_lines(dir, names_of(given), world_.rank(), world_.size(), true, tick);
                          }) &&
                          together([&](auto&) {
                              check_against_disk(dir, given, sums_of(all_reports()));
                              if (first) directory.publish(given);
                              if (first) make_latest(out, step_directory(out, save.step));
                              return "";
                          });
        mine_.clear();
        if (!done && first) directory.remove();
        return problem_;
    }

private:
    // Calls f(tick) on all ranks, which may work for long; then reports_ has what each returned. Returns false if one failed.
    template <class F>
    bool together(F f) {
        Rounds rounds(world_);
        const auto tick = rounds.tick();
        std::string report, error;
        try {
            report = f(tick);
        } catch (const std::exception& e) {
            error = e.what();
        }
        reports_ = rounds.end(report);
        problem_ = first_problem(world_, error);
        return problem_.empty();
    }
    std::string all_reports() const {
        std::string text;
        for (const std::string& report : reports_) text += report;
        return text;
    }
    // Reads this rank's share of the parts on its node; returns numbers and bytes of the intact ones.
    std::string read_parts(const PartSave& save, const std::function<void()>& tick) {
        const std::vector<int>& here = ring_.with(world_.rank());
        std::string lines;
        size_t k = 0;
        for (const auto& [part, nodes] : found_.of(save)) {
            if (!nodes.count(ring_.node_of(world_.rank())) || here[k++ % here.size()] != world_.rank()) continue;
            try {
                const std::string name = part_name({save.step, save.number, part, save.parts});
                auto file = std::make_unique<PartFile>(root_ + "/" + name, true, tick);
                if (file->id().save != save.number) continue;
                lines += format("%u %zu\n", part, file->bytes());
                mine_[part] = std::move(file);
            } catch (const Error& e) {
                print_line(stderr, std::string("warning: ") + e.what());
            }
        }
        return lines;
    }
    PartId id_of(const std::string& name) const {
        try {
            return PartFile(root_ + "/" + name, false).id();
        } catch (const Error&) {  // torn
            return {};
        }
    }
    static void write(const PartFile& part, const std::string& dir, WrittenFiles& written, const std::function<void()>& tick) {
        struct Open {
            std::string path;
            size_t bytes;
            int fd = -1;
        };
        std::vector<Open> files;
        for (const auto& [name, bytes] : part.files()) files.push_back({inside(dir, name, "a snapshot"), bytes});
        const auto create = [](Open& f) {
            std::filesystem::create_directories(std::filesystem::path(f.path).parent_path());
            f.fd = open(f.path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
            if (f.fd < 0 || ftruncate(f.fd, (off_t)f.bytes) != 0) fail_to_write(f.path, errno);
        };
        const auto close_all = [&] {
            for (const Open& f : files)
                if (f.fd >= 0) close(f.fd);
        };
        try {
            part.for_each_piece([&](size_t file, size_t offset, const char* data, size_t bytes) {
                tick();
                CHECK(file < files.size() && offset <= files[file].bytes && bytes <= files[file].bytes - offset,
                      "a piece of a snapshot is outside its file");
                Open& f = files[file];
                if (f.fd < 0) create(f);
                const auto some = [&](size_t n) { return pwrite(f.fd, data + n, bytes - n, (off_t)(offset + n)); };
                if (!move_all(bytes, some)) fail_to_write(f.path, errno);
                written.add(f.path, offset, data, bytes, f.bytes - offset - bytes);
            });
            for (Open& f : files)
                if (f.bytes == 0) {  // has no piece
                    create(f);
                    written.add(f.path, 0, "", 0, 0);
                }
            for (const Open& f : files)
                if (f.fd >= 0 && fsync(f.fd) != 0 && errno != EINVAL) fail_to_write(f.path, errno);
        } catch (...) {
            close_all();
            throw;
        }
        close_all();
    }

    World& world_;
    NodeRing ring_;
    std::string root_;  // on this node
    PartsOfNodes found_;
    std::vector<PartSave> saves_;
    std::map<uint32_t, std::unique_ptr<PartFile>> mine_;  // intact ones that this rank has read
    std::vector<std::string> reports_;
    std::string problem_;
};
