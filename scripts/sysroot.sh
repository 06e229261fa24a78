#!/usr/bin/env bash
# Unpacks the libraries of a build for another kind of CPU into build/sysroot-TRIPLE, from Debian's packages of that kind; the
# packages of this machine stay as they are. Needs apt-get and dpkg, not root. Does nothing if the folder is complete.
#   scripts/sysroot.sh aarch64-linux-gnu       then: make CXX=aarch64-linux-gnu-g++ train_gpt
set -euo pipefail
cd "$(dirname "$0")/.."
triple=${1:-aarch64-linux-gnu}
case $triple in
    aarch64-linux-gnu) architecture=arm64 ;;
    *) echo "error: there are no packages for '$triple'; it must be aarch64-linux-gnu" >&2 && exit 1 ;;
esac
sysroot=build/sysroot-$triple
read -ra packages < <(scripts/install_deps.sh --list test)
wanted="$architecture ${packages[*]}"
[[ $(cat "$sysroot/complete" 2>/dev/null) != "$wanted" ]] || exit 0

# apt with lists, cache and a record of installed packages of its own.
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt/lists/partial" "$apt/archives/partial"
: >"$apt/status"
options=(-q -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture" -o "Dir::State=$apt" -o "Dir::Cache=$apt"
    -o "Dir::State::status=$apt/status" -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)")
echo "unpacking ${packages[*]} for $architecture in $sysroot"
apt-get "${options[@]}" update >"$apt/log" 2>&1 || { cat "$apt/log" >&2 && exit 1; }
# The packages and the libraries they need. The cross compiler has its own headers of the C and C++ libraries.
apt-get "${options[@]}" install --no-install-recommends -s "${packages[@]}" |
    awk '$1 == "Inst" && $2 ~ /^(lib|zlib|openmpi|nlohmann|googletest)/ &&
         $2 !~ /^lib(c6-dev|gcc-.*-dev|stdc.*-dev|gfortran-.*-dev|icu.*|perl.*|[althw]*san[0-9]*|binutils)$/ { print $2 }' \
        >"$apt/names"
(cd "$apt/archives" && xargs apt-get "${options[@]}" download <"$apt/names" >"$apt/log" 2>&1) || { cat "$apt/log" >&2 && exit 1; }
rm -rf "$sysroot"
mkdir -p "$sysroot"
for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$sysroot"; done
cd "$sysroot"
rm -rf usr/share/{doc,man,locale,lintian}
# All libraries in one folder, and no link that leaves it.
cp -a lib/. usr/lib/ && rm -r lib && ln -s usr/lib lib
find . -type l -lname '/*' | while read -r link; do ln -sfnr ".$(readlink "$link")" "$link"; done
echo "$wanted" >complete
du -sh "$PWD"
