#!/usr/bin/env bash
# Run a command only if the files it depends on have changed since it last succeeded.
#
#   tools/stamped.sh STAMP PRODUCT COMMAND FILE_OR_FOLDER...
#
# The stamp holds a digest of the command and of the files' names and contents, so that a fresh checkout, a touched
# file or a switched branch costs nothing. PRODUCT is a glob that must match for the stamp to count.
set -euo pipefail

stamp=$1 product=$2 command=$3
shift 3

digest() {
  {
    printf '%s\n' "$command"
    # A folder that does not exist yet has no files; find says so by its exit code.
    { find "$@" -type f ! -path '*/__pycache__/*' ! -path '*/target/*' ! -name '*.so' -print0 2>/dev/null || true; } |
      sort -z | xargs -0 -r sha256sum
  } | sha256sum | cut -d' ' -f1
}

wanted=$(digest "$@")
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && compgen -G "$product" >/dev/null; then
  exit 0
fi
rm -f "$stamp"
bash -euo pipefail -c "$command"
mkdir -p "$(dirname "$stamp")"
printf '%s\n' "$wanted" >"$stamp"
