#!/usr/bin/env bash
# Build the release wheel into dist/ and print its path.
#
#   tools/build_wheel.sh VENV_BUILD CACHE_DIR
#
# First choice: link a static hwloc (tools/build_hwloc.sh) with zig against glibc 2.28, which gives a manylinux_2_28
# wheel without external libraries. Where no source package of hwloc can be had, the system's libhwloc is linked and
# maturin copies it into lvllm.libs/; the tag then follows the build machine's glibc (2.34 or newer). HWLOC=system asks
# for the second way.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$(cd "$1" && pwd)
mkdir -p "$2"
cache=$(cd "$2" && pwd)
glibc=2.28

say() { printf 'build_wheel: %s\n' "$*" >&2; }

export PATH="$venv/bin:$PATH"
# A CPU flag of the build machine in the wheel would be an illegal instruction on another.
unset CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_RUSTFLAGS
# Panic messages name source files; without this they would name the build machine's folders.
cargo fetch --locked --quiet
RUSTFLAGS="--remap-path-prefix=$PWD=lvllm"
for folder in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
  RUSTFLAGS+=" --remap-path-prefix=$folder=crates"
done
export RUSTFLAGS
rm -f dist/lvllm-*.whl

build() { maturin build --release --locked --interpreter "$venv/bin/python" --out dist "$@" >&2; }

# Notices of what is linked or copied in; pyproject.toml puts this folder into the wheel.
rm -rf licenses
mkdir licenses
if [[ ${HWLOC:-static} != system ]] && hwloc=$(tools/build_hwloc.sh "$venv/bin/python" "$cache" "$glibc"); then
  say "static hwloc at glibc $glibc"
  cp "$hwloc/COPYING" licenses/hwloc.txt
  PKG_CONFIG_PATH="$hwloc/lib/pkgconfig" PYTHON_SYS_EXECUTABLE="$venv/bin/python" \
    build --zig --compatibility "manylinux_${glibc/./_}"
else
  say "no static hwloc: linking the system's and copying it into the wheel"
  for package in libhwloc15 libudev1 libltdl7 libnuma1; do
    notice=/usr/share/doc/$package/copyright
    [[ ! -r $notice ]] || cp "$notice" "licenses/$package.txt"
  done
  build --auditwheel repair
fi
wheel=$(find dist -name 'lvllm-*.whl' | head -n 1)
[[ -n $wheel ]] || { say "maturin wrote no wheel"; exit 1; }
printf '%s\n' "$wheel"
