// Chooses the matrix unit (matrix_unit.h): the one that the user requests, else the checkpoint's if it was saved on the same
// kind of CPU, else the fastest. All units of the CPU are measured once, for layers and for attention, on one thread with
// operands in its caches, which takes tens of milliseconds. The rates are cached in the user's cache folder for this CPU, its
// microcode and this build, so that the next run makes the same choice: another unit may round differently. Ranks on CPUs of
// the same model use the first rank's rates.
#pragma once
#include <time.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../base/build.h"
#include "../base/file.h"
#include "../ops.h"
#include "matrix_unit.h"

namespace cpu {

#if CPU_FAST_PATHS
namespace detail {

using UnitRates = std::map<std::string, double>;  // FLOP/s per thread, by the unit's name

// CPU seconds of this thread, so that other threads on its core do not count.
inline double thread_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The best of several rounds, in which units take turns; after the second, units below half the best rate are dropped.
inline UnitRates measure_units(Ctx& ctx, Products kind) {
    constexpr int N = 128, IC = 256, OC = 256, T = 256, HS = 64, rounds = 6;
    constexpr size_t most = std::max({N * IC, N * OC, IC * OC, T * 3 * HS});
    std::vector<floatX> x(most), y(most), out(most);
    for (size_t i = 0; i < x.size(); i++)  // not zeros, which some CPUs multiply faster
        x[i] = (floatX)(real)((double)(i * 2654435761u >> 8 & 0xfff) / 4096 - 0.5);
    std::reverse_copy(x.begin(), x.end(), y.begin());
    std::vector<real> gradient(IC * OC), lse(T);
    const auto layers = [&] {
        linear_forward(ctx, out.data(), x.data(), y.data(), nullptr, N, IC, OC);
        linear_backward_input(ctx, out.data(), x.data(), y.data(), N, IC, OC);
        linear_backward_weight(ctx, gradient.data(), nullptr, x.data(), y.data(), N, IC, OC, Acc::Set);
        return 6.0 * N * IC * OC;
    };
    std::vector<floatX> attended(T * HS);
    const auto attention = [&] {
        const AttentionShape shape{1, T, 1, 1, HS, 0.125f};
        attention_forward(ctx, attended.data(), lse.data(), x.data(), {}, shape);
        attention_backward(ctx, out.data(), y.data(), {x.data(), attended.data(), lse.data()}, {}, shape, nullptr);
        return 7.0 * T * T * HS;
    };
    const int threads = std::exchange(ctx.threads, 1);
    AnyUnit& unit = kind == Products::layers ? ctx.layers : ctx.attention;
    const AnyUnit before = unit;
    UnitRates rates;
    double best = 0;
    for (int round = 0; round < rounds; round++)
        for (const AnyUnit candidate : matrix_units<floatX>(kind)) {
            double& rate = rates[name_of(candidate)];
            if (round > 1 && rate < best / 2) continue;
            unit = candidate;
            const double start = thread_seconds();
            const double flops = kind == Products::layers ? layers() : attention();
            rate = std::max(rate, flops / std::max(thread_seconds() - start, 1e-9));
            best = std::max(best, rate);
        }
    unit = before;
    ctx.threads = threads;
    return rates;
}

// 0 if the unit was not measured: the virtual machine of the rank that measured may hide it.
inline double rate_of(AnyUnit unit, const UnitRates& rates) {
    const auto rate = rates.find(name_of(unit));
    return rate == rates.end() ? 0 : rate->second;
}
// Among equally fast units, the first one of `units`.
inline AnyUnit fastest(const std::vector<AnyUnit>& units, const UnitRates& rates) {
    return *std::max_element(units.begin(), units.end(),
                             [&](AnyUnit a, AnyUnit b) { return rate_of(a, rates) < rate_of(b, rates); });
}

// Identifies the CPU model, by its first processor.
inline std::string cpu_model(const char* path = "/proc/cpuinfo") {
    std::ifstream lines(path);
    std::string model;
    for (std::string line; std::getline(lines, line) && !line.empty();) {
        const std::string name = line.substr(0, line.find_first_of("\t:"));
        for (const char* wanted : {"model name", "cpu family", "model", "stepping", "microcode", "CPU implementer",
                                   "CPU variant", "CPU part", "CPU revision"})
            if (name == wanted && line.find(": ") != std::string::npos)
                model +=
                    (model.empty() ? "" : ", ") + (name == "model name" ? "" : name + " ") + line.substr(line.find(": ") + 2);
    }
    return model.empty() ? "unknown" : model;
}

// The key under which rates are cached. The leading number is increased when kernels change.
inline std::string rates_key(Products kind) {
    const std::string build = build_compiler() + ", " + build_cpu() + build_checks();
    return format("2; %s; %s; %s; %s", precision_name, kind == Products::layers ? "layers" : "attention", build.c_str(),
                  cpu_model().c_str());
}

// The rates cached in `file`, if it is valid and has each unit, else measured and cached if `file` can be written.
inline UnitRates rates_of(Ctx& ctx, Products kind, const std::string& file) {
    using nlohmann::ordered_json;
    const std::string key = rates_key(kind);
    ordered_json kept;
    try {
        kept = ordered_json::parse(read_whole_file(file));
        const UnitRates rates = kept.at(key).get<UnitRates>();
        const auto units = matrix_units<floatX>(kind);
        if (rates.size() == units.size() &&
            std::all_of(units.begin(), units.end(), [&](AnyUnit unit) { return rate_of(unit, rates) > 0; }))
            return rates;
    } catch (const std::exception&) {  // no file yet
    }
    const UnitRates rates = measure_units(ctx, kind);
    if (!kept.is_object()) kept = ordered_json::object();
    kept[key] = rates;
    try {
        if (!file.empty()) write_file_atomically(file, kept.dump(1) + "\n");
    } catch (const std::exception&) {  // a full disk: the next run measures again
    }
    return rates;
}

}  // namespace detail
#endif

// The record in a checkpoint: the CPU, and the units for layers and attention.
using UnitRecord = std::vector<std::string>;
// Gathers a string from every rank.
using AllGather = std::function<std::vector<std::string>(const std::string&)>;

// asked: a unit's name, or empty; before: the record of the resumed checkpoint, or empty.
inline UnitRecord choose_matrix_unit([[maybe_unused]] Ctx& ctx, const std::string& asked,
                                     [[maybe_unused]] const UnitRecord& before, [[maybe_unused]] int rank,
                                     [[maybe_unused]] const AllGather& all_gather) {
    if (ctx.plain) {
        refuse_together(!asked.empty(), "--matrix-unit", "--plain", "plain loops use no matrix unit");
        return {};
    }
#if CPU_FAST_PATHS
    using namespace detail;
    const std::string of_environment = unit_of_environment();  // replaces the fastest
    for (const auto& [from, name] : {std::pair("--matrix-unit", asked), std::pair("TRAIN_GPT_MATRIX_UNIT", of_environment)})
        if (!name.empty() && !unit_named<floatX>(Products::layers, name))
            fail_usage("%s is '%s'; for %s this CPU supports %s; HINT: omit it to use the fastest", from, name.c_str(),
                       precision_name, unit_names<floatX>().c_str());
    const std::string model = cpu_model(), folder = cache_directory(),
                      file = folder.empty() ? "" : folder + "/matrix_unit.json";
    const std::vector<std::string> models = all_gather(model);
    const size_t first = (size_t)(std::find(models.begin(), models.end(), model) - models.begin());
    UnitRecord record = {model};
    for (const Products kind : {Products::layers, Products::attention}) {
        const UnitRates mine = first == (size_t)rank ? rates_of(ctx, kind, file) : UnitRates();
        const UnitRates rates = nlohmann::json::parse(all_gather(nlohmann::json(mine).dump())[first]).get<UnitRates>();
        const bool of_layers = kind == Products::layers;
        AnyUnit unit = unit_named<floatX>(kind, of_environment).value_or(fastest(matrix_units<floatX>(kind), rates));
        if (before.size() == 3 && before[0] == model) unit = unit_named<floatX>(kind, before[of_layers ? 1 : 2]).value_or(unit);
        if (!asked.empty()) unit = unit_named<floatX>(kind, asked).value_or(unit);
        (of_layers ? ctx.layers : ctx.attention) = unit;
        (of_layers ? ctx.layers_rate : ctx.attention_rate) = rate_of(unit, rates);
        record.push_back(name_of(unit));
    }
    return record;
#else
    return {};
#endif
}

}  // namespace cpu
