// How this program was built: compiler, checks, target CPU.
#pragma once
#include <string>

inline std::string build_compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "g++ " __VERSION__;
#endif
}

// The checks that make this build slower; each name starts with a comma.
inline std::string build_checks() {
    std::string checks;
#if defined(__SANITIZE_ADDRESS__)
    checks += ", address sanitizer";
#endif
#if defined(__SANITIZE_THREAD__)
    checks += ", thread sanitizer";
#endif
#if !defined(__OPTIMIZE__)
    checks += ", without optimization";
#endif
    return checks;
}

// The compiler's target CPU.
inline std::string build_cpu() {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON with bf16";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "the least CPU of its kind";
#endif
}
