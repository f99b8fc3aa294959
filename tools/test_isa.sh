#!/usr/bin/env bash
# Run lk-core's kernel and layer tests with the instruction set held down to each that this CPU has below its best.
#
#   tools/test_isa.sh [ISA...]      default: avx2 scalar
#
# The tests take every kernel of the chosen set from the library's own table, so nothing here lists kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

flags=" $(grep -m1 -E '^flags' /proc/cpuinfo | cut -d: -f2) "
has() { [[ $flags == *" $1 "* ]]; }

# Module paths of the unit tests, and names of the integration tests, that depend on the instruction set.
modules='kernel|moe|simd|engine|store'
# Kernels of the GPU do not depend on the host's instruction set.
gpu='cuda'
ran=0
(($#)) || set -- avx2 scalar
for isa; do
  case $isa in
    scalar) has avx2 || continue ;;
    avx2) has avx512f || continue ;;
    avx512) has avx512_bf16 || has avx512_vnni || continue ;;
    *)
      echo "test_isa: unknown instruction set $isa" >&2
      exit 2
      ;;
  esac
  echo "LVLLM_ISA=$isa"
  export LVLLM_ISA=$isa
  ran=1
  if command -v cargo-nextest >/dev/null; then
    cargo nextest run -p lk-core --locked --no-fail-fast \
      -E "(test(/(^|::)($modules)(::|$)/) | binary(/$modules/)) & not binary(/$gpu/)"
    continue
  fi
  # Module names select the unit tests; an integration test has none of them in its path and is named as a whole.
  cargo test -p lk-core --locked --no-fail-fast --lib -- kernel:: moe:: simd:: engine:: store::
  targets=()
  for file in crates/lk-core/tests/*.rs; do
    name=$(basename "$file" .rs)
    [[ $name =~ $modules && ! $name =~ $gpu ]] && targets+=(--test "$name")
  done
  ((${#targets[@]} == 0)) || cargo test -p lk-core --locked --no-fail-fast "${targets[@]}"
done
# Said in a runner's words, so that the count shows it: on such a CPU test-rust has covered the one set there is.
((ran)) || echo "0 passed, 0 failed, 1 skipped"
