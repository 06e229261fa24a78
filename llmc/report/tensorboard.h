// TensorBoard's event files: the numbers of log.jsonl's records, step by step, as scalars.
//
// A file is a sequence of records in TFRecord framing: length (8 bytes, little-endian), its masked CRC-32C (4), the data, its
// masked CRC-32C (4). The data is a protobuf message, of which these fields are written (field number, type):
//   Event    1 double wall_time | 2 int64 step | one of: 3 string file_version, 5 Summary, 7 SessionLog
//   Summary  1 repeated Value: 1 string tag, 2 float simple_value
//   SessionLog  1 enum status: 1 START: TensorBoard discards events it has read from this step on, so that steps repeated after
//               a resume or a rollback do not appear twice
// (tensorflow/core/lib/io/record_writer.cc; tensorboard/compat/proto/event.proto, summary.proto)
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "../base/check.h"
#include "../base/crc32c.h"
#include "../base/file.h"

namespace tensorboard_detail {

template <class T>
std::string bytes_of(T x) {  // little-endian, as all supported machines are
    return std::string((const char*)&x, sizeof x);
}
inline std::string varint(uint64_t x) {
    std::string out;
    for (; x >= 0x80; x >>= 7) out += (char)(x | 0x80);
    return out + (char)x;
}
inline std::string field(int number, uint64_t x) { return varint((uint64_t)number << 3) + varint(x); }
inline std::string field(int number, double x) { return varint((uint64_t)number << 3 | 1) + bytes_of(x); }
inline std::string field(int number, float x) { return varint((uint64_t)number << 3 | 5) + bytes_of(x); }
inline std::string field(int number, const std::string& x) {  // a string or a message
    return varint((uint64_t)number << 3 | 2) + varint(x.size()) + x;
}

// The CRC of data that contains CRCs is weak, hence the mask.
inline uint32_t masked_crc(const std::string& data) {
    const uint32_t crc = crc32c(data.data(), data.size());
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}
inline std::string framed(const std::string& data) {
    const std::string length = bytes_of((uint64_t)data.size());
    return length + bytes_of(masked_crc(length)) + data + bytes_of(masked_crc(data));
}
inline std::string event(double time, int64_t step, const std::string& what) {
    return framed(field(1, time) + field(2, (uint64_t)step) + what);
}

inline void add_scalar(std::string& summary, const std::string& tag, const nlohmann::ordered_json& value) {
    if (value.is_number()) summary += field(1, field(1, tag) + field(2, value.get<float>()));
    if (value.is_object())  // one curve per entry
        for (const auto& [name, x] : value.items()) add_scalar(summary, tag + "/" + name, x);
}

}  // namespace tensorboard_detail

// An event file in `dir`, created if missing, for the steps after `step`; discards later steps in the directory's other files.
class TensorBoard {
public:
    TensorBoard(const std::string& dir, int64_t step) {
        using namespace tensorboard_detail;
        make_directory(dir);
        // TensorBoard reads files in the order of their names: this one must sort last, even if two runs start in the same
        // second.
        const std::string start = "events.out.tfevents.";
        long long number = (long long)time(nullptr);
        for (const auto& entry : std::filesystem::directory_iterator(dir)) {
            const std::string name = entry.path().filename().string();
            if (name.rfind(start, 0) == 0) number = std::max(number, atoll(name.c_str() + start.size()) + 1);
        }
        char host[256] = "host";
        (void)gethostname(host, sizeof host - 1);
        path_ = format("%s/%s%010lld.%s.%d", dir.c_str(), start.c_str(), number, host, (int)getpid());
        fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd_ < 0) fail_to_write(path_, errno, "give another --tensorboard-dir");
        append(event(now(), 0, field(3, std::string("brain.Event:2"))));
        forget_after(step);
    }
    TensorBoard(const TensorBoard&) = delete;
    TensorBoard& operator=(const TensorBoard&) = delete;
    ~TensorBoard() { close(fd_); }

    // Adds a record of log.jsonl; records without a step's numbers are ignored.
    void add(const nlohmann::ordered_json& record) {
        using namespace tensorboard_detail;
        const std::string kind = record.value("kind", "");
        const int64_t step = record.value("step", (int64_t)0);
        if (kind == "event" && record.value("event", "") == "rollback") return forget_after(step);
        if (kind != "step" && kind != "valid" && kind != "tasks") return;
        std::string summary;
        for (const auto& [key, value] : record.items()) {
            if (key == "step" || key == "tokens" || key == "consumed_samples" || key == "seconds" || key == "ms" ||
                key == "stderr")
                continue;
            const bool speed = key == "tokens_per_s" || key == "step_ms" || key == "model_tflops" || key == "mfu" ||
                               key == "eta_s" || key == "waiting_ms" || key == "memory_bytes" || key == "energy_joules";
            add_scalar(summary,
                       (kind == "tasks"   ? ""
                        : kind == "valid" ? "validation/"
                        : speed           ? "machine/"
                                          : "train/") +
                           (key == "sets" ? "loss" : key),
                       value);
        }
        append(event(now(), step, field(5, summary)));
    }

private:
    static double now() {
        timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }
    void forget_after(int64_t step) {
        using namespace tensorboard_detail;
        append(event(now(), step + 1, field(7, field(1, (uint64_t)1))));
    }
    void append(const std::string& record) { append_whole(fd_, path_, record); }

    std::string path_;
    int fd_ = -1;
};
