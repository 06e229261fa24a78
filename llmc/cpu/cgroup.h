// Limits that control groups (cgroups) set on this process, in containers, SLURM jobs and systemd units. The limits of the
// groups above it apply, too. Version 1 has one hierarchy per controller (cpu, memory), version 2 a single one; both may be
// mounted. /proc/self/cgroup has this process's path in each hierarchy, /proc/self/mountinfo where each is mounted and which
// of its groups is at the mount point: a container may see its own group as the root.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace cpu {

struct CgroupLimits {
    double cores = 0;               // CPU time per wall time; 0: no limit
    size_t memory_left = SIZE_MAX;  // bytes until the nearest limit, with page cache counted as free; SIZE_MAX: no limit
};

namespace detail {

// The first number in a file; `none` if there is no such file, or no number ("max").
inline double number_in_file(const std::string& path, double none) {
    double value = none;
    std::ifstream(path) >> value ? void() : void(value = none);
    return value;
}

// The page cache in a group's memory, which the system reclaims when needed. Version 1 counts groups below it in total_*.
inline double file_cache_in(const std::string& memory_stat) {
    double own = 0, total = 0, value;
    std::string name;
    for (std::ifstream file(memory_stat); file >> name >> value;) {
        if (name == "active_file" || name == "inactive_file") own += value;
        if (name == "total_active_file" || name == "total_inactive_file") total += value;
    }
    return std::max(own, total);
}

inline void add_cores(CgroupLimits& limits, double quota, double period) {
    if (!(quota > 0 && period > 0)) return;
    limits.cores = limits.cores > 0 ? std::min(limits.cores, quota / period) : quota / period;
}

inline void add_memory(CgroupLimits& limits, double limit, double held, const std::string& group) {
    if (!(limit >= 0 && held >= 0 && limit < 0x1p62)) return;  // version 1 has almost 2^63 for no limit
    const double used = std::max(0.0, held - file_cache_in(group + "/memory.stat"));
    limits.memory_left = std::min(limits.memory_left, (size_t)std::max(0.0, limit - used));
}

// The limits of one group. Above memory.high a group is slowed down until its memory is reclaimed.
inline void add_limits_of(CgroupLimits& limits, const std::string& group, int version, bool cpu, bool memory) {
    const auto number = [&](const char* file) { return number_in_file(group + "/" + file, -1); };
    if (cpu && version == 2) {
        double quota = 0, period = 0;
        std::ifstream(group + "/cpu.max") >> quota >> period;
        add_cores(limits, quota, period);
    }
    if (cpu && version == 1) add_cores(limits, number("cpu.cfs_quota_us"), number("cpu.cfs_period_us"));
    if (memory && version == 2)
        for (const char* limit : {"memory.max", "memory.high"})
            add_memory(limits, number(limit), number("memory.current"), group);
    if (memory && version == 1) add_memory(limits, number("memory.limit_in_bytes"), number("memory.usage_in_bytes"), group);
}

inline bool has_word(const std::string& list, const std::string& word) {
    return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// A path of mountinfo, in which \040 is a space.
inline std::string unescape_octal(const std::string& text) {
    std::string path;
    for (size_t i = 0; i < text.size(); i++)
        if (text[i] == '\\' && i + 3 < text.size()) {
            path += (char)strtol(text.substr(i + 1, 3).c_str(), nullptr, 8);
            i += 3;
        } else path += text[i];
    return path;
}

}  // namespace detail

// root: where /proc and the mounts are, for tests.
inline CgroupLimits cgroup_limits(const std::string& root = "") {
    struct Membership {
        std::string controllers, path;  // controllers: empty in version 2
    };
    std::vector<Membership> memberships;
    std::string line;
    for (std::ifstream file(root + "/proc/self/cgroup");
         std::getline(file, line);) {  // "4:memory:/slurm/job_7", "0::/user.slice"
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first != line.npos && second != line.npos)
            memberships.push_back({line.substr(first + 1, second - first - 1), line.substr(second + 1)});
    }
    CgroupLimits limits;
    // "31 23 0:28 ROOT PLACE rw,relatime shared:7 - cgroup2 cgroup2 rw", for version 1 "... - cgroup cgroup rw,cpu,cpuacct"
    for (std::ifstream file(root + "/proc/self/mountinfo"); std::getline(file, line);) {
        const size_t dash = line.find(" - ");
        if (dash == line.npos) continue;
        std::string id, parent, device, top, place, type, source, options;
        std::istringstream(line.substr(0, dash)) >> id >> parent >> device >> top >> place;
        std::istringstream(line.substr(dash + 3)) >> type >> source >> options;
        if (type != "cgroup" && type != "cgroup2") continue;
        const int version = type == "cgroup2" ? 2 : 1;
        const bool cpu = version == 2 || detail::has_word(options, "cpu");
        const bool memory = version == 2 || detail::has_word(options, "memory");
        top = detail::unescape_octal(top);
        place = root + detail::unescape_octal(place);
        for (const Membership& m : memberships) {
            if (version == 2 ? !m.controllers.empty()
                             : !((cpu && detail::has_word(m.controllers, "cpu")) ||
                                 (memory && detail::has_word(m.controllers, "memory"))))
                continue;
            // Below the group that is mounted; a path that is elsewhere is seen from outside of this container.
            std::string below = m.path;
            if (top != "/") below = below.compare(0, top.size(), top) == 0 ? below.substr(top.size()) : "";
            if (below.find("..") != below.npos || below == "/") below = "";
            for (;;) {
                detail::add_limits_of(limits, place + below, version, cpu, memory);
                if (below.empty()) break;
                below.erase(below.rfind('/'));
            }
        }
    }
    return limits;
}

}  // namespace cpu
