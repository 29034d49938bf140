"""Reports the machine, the installed packages, and whether FlashInfer runs."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from radixcache.bench.gpu import kernels
from radixcache.bench.gpu.layers import try_layer
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report
from radixcache.kernels.attention import LayerKind

PACKAGES = (
    "torch", "flashinfer-python", "transformers", "tokenizers", "numpy", "sortedcontainers",
    "triton", "fastapi", "uvicorn",
)  # fmt: skip

COMMANDS = (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], ["nvcc", "--version"], ["lscpu"])


def run(place: Place, report: Report) -> None:
    device = torch.cuda.get_device_properties(place.device)
    report.note("device", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
                f"{device.multi_processor_count} SMs, {device.major}.{device.minor}")  # fmt: skip
    report.note("CUDA of torch", str(torch.version.cuda))
    report.note("python", platform.python_version())
    for package in PACKAGES:
        try:
            report.note(package, version(package))
        except PackageNotFoundError:
            report.note(package, "not installed by this name")
    for command in COMMANDS:
        report.note(" ".join(command), "", _output(command))
    report.measure("kernels of the first call", kernels.build, place)
    report.check("FlashInfer runs", _flashinfer, place)
    place.with_flashinfer = sys.modules.get("flashinfer") is not None


def _output(command: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return done.stdout.splitlines()


def _flashinfer(place: Place) -> str:
    """Try the backend once, on a layer like Llama's; its traceback shows what is wrong."""
    if not place.with_flashinfer:
        raise NotRun("it is left out")
    dim = place.sizes.head_dim
    kind = LayerKind(*place.sizes.heads[0], dim, dim, dim**-0.5)
    try_layer(place, place.make_backend, place.dtype, kind)
    return str(sys.modules["flashinfer"].__version__)
