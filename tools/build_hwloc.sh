#!/usr/bin/env bash
# Build hwloc as a static library from the distribution's own source package and print its prefix.
#
#   tools/build_hwloc.sh PYTHON CACHE_DIR [GLIBC]
#
# PYTHON has the `ziglang` package; zig's C compiler builds against GLIBC (default 2.28), so that the wheel which links
# the library loads on every system with that glibc or a newer one, and ships no shared library of its own. Device
# discovery (PCI, udev, OpenCL, CUDA ...) is left out: the engine asks hwloc for CPUs and NUMA nodes only.
# Works without root: apt's lists and downloads go to a private folder. Exit code 3: no source package to be had.
set -euo pipefail

python=$1
cache=$2
glibc=${3:-2.28}
arch=$(uname -m)

say() { printf 'build_hwloc: %s\n' "$*" >&2; }
no_source() {
  say "$*"
  exit 3
}

mkdir -p "$cache"
exec 9>"$cache/hwloc.lock"
flock 9

prefix=$(find "$cache" -maxdepth 1 -type d -name "hwloc-*-glibc$glibc-$arch-v2" 2>/dev/null | sort -V | tail -n 1)
if [[ -n $prefix && -f $prefix/lib/pkgconfig/hwloc.pc && -f $prefix/COPYING ]]; then
  printf '%s\n' "$prefix"
  exit 0
fi

command -v apt-get >/dev/null || no_source "no apt-get on this system"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{parts,lists/partial,archives/partial,download,source}

# The system's own package sources, asked for source packages instead of binaries. Third-party ones are passed over:
# they do not carry this release's name.
# shellcheck source=/dev/null
codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
[[ -n $codename ]] || no_source "no release name in /etc/os-release"
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [[ -r $list ]] || continue
  { grep -E "^deb[[:space:]].*[[:space:]]$codename" "$list" || true; } | sed -E 's/^deb[[:space:]]/deb-src /' \
    >>"$work/parts/from-lists.list"
done
for list in /etc/apt/sources.list.d/*.sources; do
  [[ -r $list ]] || continue
  awk -v RS= -v name="$codename" '$0 ~ "(^|\n)Suites:([^\n]* )?" name {
    gsub(/(^|\n)Types:[^\n]*/, "\nTypes: deb-src"); sub(/^\n/, ""); print $0 "\n" }' "$list" \
    >"$work/parts/$(basename "$list")"
done

apt=(apt-get -q -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$work/parts" -o "Dir::State::Lists=$work/lists"
  -o "Dir::Cache=$work" -o APT::Sandbox::User=root)
say "fetching the source package"
"${apt[@]}" update >"$work/apt.log" 2>&1 || true
(cd "$work/download" && "${apt[@]}" source --download-only hwloc) >>"$work/apt.log" 2>&1 || {
  tail -n 5 "$work/apt.log" >&2
  no_source "the package sources offer no source package of hwloc"
}
tarball=$(find "$work/download" -name 'hwloc_*.orig.tar.*' ! -name '*.asc' | head -n 1)
[[ -n $tarball ]] || no_source "no upstream archive in the source package"
version=$(basename "$tarball" | sed -E 's/^hwloc_(.*)\.orig\.tar\..*$/\1/')
"$python" -m tarfile -e "$tarball" "$work/source"
source_dir=$(find "$work/source" -mindepth 1 -maxdepth 1 -type d | head -n 1)
[[ -f $source_dir/configure ]] || no_source "the source package of hwloc $version has no configure script"
# Python's tarfile keeps the executable bits, its data filter may not.
find "$source_dir" \( -name configure -o -name 'config.*' -o -name install-sh -o -name missing -o -name '*.sh' \) \
  -exec chmod +x {} +

cat >"$work/cc" <<ZIG
#!/bin/sh
exec "$python" -m ziglang cc -target $arch-linux-gnu.$glibc "\$@"
ZIG
chmod +x "$work/cc"

say "building hwloc $version against glibc $glibc"
prefix=$cache/hwloc-$version-glibc$glibc-$arch-v2
staged=$work/prefix
if ! (
  cd "$source_dir"
  ./configure -q --prefix="$prefix" --sysconfdir=/etc --localstatedir=/var --runstatedir=/run --enable-static --disable-shared --with-pic --disable-io --disable-libxml2 \
    --disable-cairo --disable-libudev --disable-plugins --disable-doxygen --disable-readme \
    CC="$work/cc" AR="$python -m ziglang ar" RANLIB="$python -m ziglang ranlib" CFLAGS="-O2 -w -fno-sanitize=all"
  make -s -j"$(nproc)" -C hwloc
  for part in hwloc include; do make -s -C "$part" install DESTDIR="$staged"; done
) >"$work/build.log" 2>&1; then
  tail -n 30 "$work/build.log" >&2
  say "the build failed"
  exit 1
fi
mkdir -p "$staged$prefix/lib/pkgconfig"
cp "$source_dir/hwloc.pc" "$staged$prefix/lib/pkgconfig/"
cp "$source_dir/COPYING" "$staged$prefix/"
rm -f "$staged$prefix"/lib/*.la
rm -rf "$prefix"
mv "$staged$prefix" "$prefix"
say "ready"
printf '%s\n' "$prefix"
