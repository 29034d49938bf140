#!/usr/bin/env bash
# One of the two calls of the GPU check, on a machine without network and without FlashInfer.
#
#   release/gpu_session.sh PARTS OUT CALL [options of radixcache.bench.gpu.check]
#
# PARTS is a folder with the archive of release.pack_flashinfer, flashinfer*.tgz, and wheels of
# whatever else python3 lacks there. Without an archive attention runs in Triton or plain torch. OUT
# receives one archive, results-CALL.tgz, of rows, log and traces, however the call ends. CALL is 1
# or 2, each of ten minutes at most. What is unpacked stays on the machine for the next call.
set -euo pipefail
parts=$(realpath "${1:?folder with flashinfer*.tgz and wheels}")
out=$(realpath -m "${2:?folder for the results}")
call=${3:?which call: 1 or 2}
shift 3
cd "$(dirname "$0")/.."

# Links to the packages that a copy of the tree has left out, or made files of.
for name in bench kernels runtime; do
    [ -d "radixcache/$name" ] || ln -sfn "../$name" "radixcache/$name"
done

kept=${TMPDIR:-/tmp}/radixcache-gpu
results=$(mktemp -d)
mkdir -p "$kept/wheels" "$out"
trap 'tar czf "$out/results-$call.tgz" -C "$results" .' EXIT
for archive in "$parts"/flashinfer*.tgz; do
    [ -e "$archive" ] || continue
    [ -e "$kept/env.sh" ] || tar xzf "$archive" -C "$kept"
    source "$kept/env.sh"
done
for wheel in "$parts"/*.whl; do
    [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" "$kept/wheels"
done
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$kept/wheels PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

python3 -m radixcache.bench.gpu.check --out "$results" --call "$call" "$@" 2>&1 \
    | tee "$results/session.log"
