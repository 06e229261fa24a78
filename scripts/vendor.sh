#!/usr/bin/env bash
# Copies the headers and static libraries of a build, except the CUDA toolkit and a compiler, from this machine to
# build/deps, for a machine without a package manager. Copy the folder there; it has a few MB.
#   scripts/vendor.sh        then, on that machine: make check-gpu
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_deps.sh test
rm -rf build/deps
mkdir -p build/deps/include build/deps/lib
for header in nlohmann gtest; do cp -rL "/usr/include/$header" build/deps/include/; done
cp -L /usr/include/pcre2.h build/deps/include/
for library in libgtest.a libgtest_main.a libpcre2-8.a; do
    cp -L "$(find /usr/lib -name "$library" | head -n 1)" build/deps/lib/
done
# The optional libraries as well, if static versions exist.
while read -r package _; do
    [[ $package != \#* ]] || continue
    dpkg-query -L "$package" | grep '\.a$' >/dev/null || continue
    for file in $(dpkg-query -L "$package" | grep -E '\.(h|a)$'); do
        if [[ $file == *.a ]]; then cp -L "$file" build/deps/lib/; else cp -L "$file" build/deps/include/; fi
    done
done <scripts/libraries.txt
du -sh build/deps
