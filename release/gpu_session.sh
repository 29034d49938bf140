#!/usr/bin/env bash
# The tests of a GPU, on a machine without network and without FlashInfer.
#
#   release/gpu_session.sh PARTS OUT [tests, tests/gpu by default, and options of pytest]
#
# PARTS is a folder with the archive of release.pack_flashinfer, flashinfer*.tgz, and wheels of
# whatever else python3 lacks there. Without an archive attention runs in Triton or plain torch. OUT
# receives one archive, results.tgz, of the rows and what was said, however the call ends: after
# nine and a half minutes at the latest. What is unpacked stays on the machine for the next call.
set -euo pipefail
parts=$(realpath "${1:?folder with flashinfer*.tgz and wheels}")
out=$(realpath -m "${2:?folder for the results}")
shift 2
[ $# -gt 0 ] || set -- tests/gpu
cd "$(dirname "$0")/.."

# Links to the packages that a copy of the tree has left out, or made files of.
for name in bench kernels runtime; do
    [ -d "radixcache/$name" ] || ln -sfn "../$name" "radixcache/$name"
done

kept=${TMPDIR:-/tmp}/radixcache-gpu
results=$(mktemp -d)
mkdir -p "$kept/wheels" "$out"
trap 'tar czf "$out/results.tgz" -C "$results" .' EXIT
for archive in "$parts"/flashinfer*.tgz; do
    [ -e "$archive" ] || continue
    [ -e "$kept/env.sh" ] || tar xzf "$archive" -C "$kept"
    source "$kept/env.sh"
done
for wheel in "$parts"/*.whl; do
    [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" "$kept/wheels"
done
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$kept/wheels PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

timeout 570 python3 -m pytest -vv -rs -p no:cacheprovider "--junitxml=$results/rows.xml" -m gpu "$@" 2>&1 \
    | tee "$results/session.log"
