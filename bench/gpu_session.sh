#!/usr/bin/env bash
# Runs the GPU check on a machine that has torch and transformers but no network and no FlashInfer.
#
#   bench/gpu_session.sh PARTS OUT [options of bench.gpu_check]
#
# PARTS is a folder with one archive flashinfer*.tgz (`env.sh` and `site/`, kernels built in) and
# wheels of whatever else python3 lacks there, sortedcontainers for one; pure Python only, since
# they are not unpacked. OUT receives gpu_check.json and gpu_check.log. Run it from the root of the
# checkout. A kernel that is not in the archive is an error there, not a compilation.
set -euo pipefail
parts=$(realpath "${1:?folder with flashinfer*.tgz and wheels}")
out=$(realpath -m "${2:?folder for the results}")
shift 2

unpacked=$(mktemp -d)
mkdir -p "$out"
tar xzf "$parts"/flashinfer*.tgz -C "$unpacked"
export FLASHINFER_WORKSPACE_BASE=$unpacked/workspace FLASHINFER_DISABLE_JIT=1
source "$unpacked/env.sh"
for wheel in "$parts"/*.whl; do
    [ ! -e "$wheel" ] || PYTHONPATH=$PYTHONPATH:$wheel
done
export PYTHONPATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

for name in torch transformers numpy sortedcontainers flashinfer; do
    python3 -c "import $name; print('$name', getattr($name, '__version__', ''))" \
        || { echo "$name cannot be imported by $(command -v python3)"; exit 2; }
done
python3 -m bench.gpu_check --out "$out/gpu_check.json" "$@" 2>&1 | tee "$out/gpu_check.log"
