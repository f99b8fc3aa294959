#!/usr/bin/env bash
# Check for the system packages that the build needs and install what is missing with apt, as root or by password-less
# sudo; otherwise print the one line to run. Quick when nothing is missing.
set -euo pipefail

say() { printf 'system_deps: %s\n' "$*"; }
fail() {
  printf 'system_deps: error: %s\n' "$*" >&2
  exit 1
}

# The Python that everything else is built on: the first of these that is new enough and can make environments.
if [[ ${1:-} == --python ]]; then
  for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.14; do
    if command -v "$name" >/dev/null &&
      "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      exit 0
    fi
  done
  exit 1
fi

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v make >/dev/null || missing+=(make)
command -v objdump >/dev/null || missing+=(binutils)
if ! command -v pkg-config >/dev/null; then
  missing+=(pkg-config libhwloc-dev libudev-dev)
else
  pkg-config --exists hwloc || missing+=(libhwloc-dev)
  # hwloc's link line names udev, but Debian's libhwloc-dev does not depend on it.
  pkg-config --exists libudev || missing+=(libudev-dev)
fi
if ! "$0" --python >/dev/null; then
  if command -v python3 >/dev/null && python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    missing+=("python3-venv")
  else
    missing+=(python3 python3-venv)
  fi
fi

if ((${#missing[@]})); then
  line="apt-get install -y --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null || fail "this system lacks: ${missing[*]} (Debian's names); install them and run again"
  if [[ $(id -u) == 0 ]]; then
    as_root=()
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    fail "packages are missing; run: sudo apt-get update && sudo $line"
  fi
  say "installing: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # A repository that cannot be reached is no reason to stop: what counts is whether the packages can be had.
  ${as_root[@]+"${as_root[@]}"} apt-get update -q >/dev/null 2>&1 || say "apt-get update reported problems, going on"
  # shellcheck disable=SC2086
  ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive $line >/tmp/lvllm-apt.$$ 2>&1 || {
    tail -n 15 /tmp/lvllm-apt.$$ >&2
    rm -f /tmp/lvllm-apt.$$
    fail "apt could not install them; run by hand: $line"
  }
  rm -f /tmp/lvllm-apt.$$
fi

"$0" --python >/dev/null || fail "no Python >= 3.11 with venv; set PYTHON=/path/to/python3.11 or newer"
command -v cargo >/dev/null || fail "cargo is missing; install Rust with rustup (the toolchain in rust-toolchain.toml)"
rustc_version=$(rustc --version 2>/dev/null) || fail "rustc does not start; \`rustup toolchain install\` in this folder installs what rust-toolchain.toml names"
minor=$(sed -E 's/^rustc 1\.([0-9]+)\..*/\1/' <<<"$rustc_version")
((minor >= 89)) || fail "$rustc_version is too old, 1.89 is the minimum; install Rust with rustup"
