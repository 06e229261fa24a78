// The energy that this machine has used since a run was started, if the machine reports it: processors by RAPL (Linux' powercap
// files, which since 2020 are readable only by root by default), NVIDIA's GPUs by NVML. Includes all processes on the machine,
// but no memory, disks or fans. Without either source there is no number.
#pragma once
#include <dlfcn.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "../base/clock.h"

// One line of a small file as a number; NaN if it cannot be read.
inline double number_in_file(const std::string& path) {
    double x = NAN;
    std::ifstream(path) >> x;
    return x;
}

class EnergyMeter {
public:
    explicit EnergyMeter(const std::string& powercap = "/sys/class/powercap", const char* nvml = "libnvidia-ml.so.1") {
        find_processors(powercap);
        find_gpus(nvml);
        (void)joules();
    }
    EnergyMeter(const EnergyMeter&) = delete;
    EnergyMeter& operator=(const EnergyMeter&) = delete;

    // Since the meter was created, as of the last second; NaN: the machine does not report it.
    double joules() {
        if (counters_.empty() && gpus_.empty()) return NAN;
        if (const double now = monotonic_seconds(); now - looked_ >= 1) {
            looked_ = now;
            look();
        }
        return joules_;
    }
    // The same, at this moment.
    double joules_now() {
        looked_ = -INFINITY;
        return joules();
    }

private:
    // A counter that wraps to 0 after `range`.
    struct Counter {
        std::string file;
        double range = 0, last = NAN;  // microjoules
    };
    using Device = void*;
    using OfDevice = int (*)(Device, unsigned long long* millijoules);
    struct Gpu {
        Device device;
        unsigned long long last;
    };

    void find_processors(const std::string& powercap) {
        std::error_code none;
        for (const auto& zone : std::filesystem::directory_iterator(powercap, none)) {
            std::string name;
            std::ifstream(zone.path() / "name") >> name;
            if (name.rfind("package", 0) != 0) continue;  // its parts and the whole platform would be counted twice
            Counter c = {zone.path() / "energy_uj", number_in_file(zone.path() / "max_energy_range_uj")};
            c.last = number_in_file(c.file);
            if (std::isfinite(c.last) && std::isfinite(c.range)) counters_.push_back(c);
        }
    }
    void find_gpus(const char* nvml) {
        void* const library = dlopen(nvml, RTLD_NOW | RTLD_LOCAL);  // stays open
        if (!library) return;
        const auto init = (int (*)())dlsym(library, "nvmlInit_v2");
        const auto count = (int (*)(unsigned*))dlsym(library, "nvmlDeviceGetCount_v2");
        const auto handle = (int (*)(unsigned, Device*))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
        energy_of_ = (OfDevice)dlsym(library, "nvmlDeviceGetTotalEnergyConsumption");
        unsigned n = 0;
        if (!init || !count || !handle || !energy_of_ || init() != 0 || count(&n) != 0) return;
        for (unsigned i = 0; i < n; i++) {
            Gpu gpu{};
            if (handle(i, &gpu.device) == 0 && energy_of_(gpu.device, &gpu.last) == 0) gpus_.push_back(gpu);
        }
    }
    void look() {
        for (Counter& c : counters_) {
            const double now = number_in_file(c.file);
            if (!std::isfinite(now)) continue;
            joules_ += 1e-6 * (now - c.last + (now < c.last ? c.range : 0));
            c.last = now;
        }
        for (Gpu& gpu : gpus_) {
            unsigned long long now = 0;
            if (energy_of_(gpu.device, &now) != 0 || now < gpu.last) continue;
            joules_ += 1e-3 * (double)(now - gpu.last);
            gpu.last = now;
        }
    }

    std::vector<Counter> counters_;
    std::vector<Gpu> gpus_;
    OfDevice energy_of_ = nullptr;
    double joules_ = 0, looked_ = -INFINITY;
};

// Grams of CO2, at `per_kwh` grams per kWh.
inline double grams_of_co2(double joules, double per_kwh) { return joules / 3.6e6 * per_kwh; }
