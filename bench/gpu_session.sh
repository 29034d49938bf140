#!/usr/bin/env bash
# One of the two calls of the GPU check, on a machine without network and without FlashInfer.
#
#   bench/gpu_session.sh PARTS OUT CALL [options of radixcache.bench.gpu.check]
#
# PARTS is a folder with the archive of radixcache.bench.gpu.pack, flashinfer*.tgz, and wheels of
# whatever else python3 lacks there; pure Python only, since they are not unpacked. Without an
# archive attention runs in plain torch. OUT receives rows, logs and traces. CALL is 1 or 2, each
# of nine minutes at most. What is unpacked stays on the machine for the next call.
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
mkdir -p "$kept" "$out"
for archive in "$parts"/flashinfer*.tgz; do
    [ -e "$archive" ] || continue
    [ -e "$kept/env.sh" ] || tar xzf "$archive" -C "$kept"
    source "$kept/env.sh"
done
for wheel in "$parts"/*.whl; do
    [ ! -e "$wheel" ] || PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$wheel
done
export PYTHONPATH=${PYTHONPATH:-} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

python3 -m radixcache.bench.gpu.check --out "$out" --call "$call" "$@" 2>&1 | tee "$out/session$call.log"
