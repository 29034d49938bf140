"""Finds the torch device and dtype that a user names."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

from radixcache.errors import InvalidRequest

_log = logging.getLogger("radixcache")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> Any:
    """The torch dtype of that name; "auto" stays where it is the checkpoint's.

    Raises:
        InvalidRequest: there is no such dtype.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else dtype
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPES.values():
        raise InvalidRequest(f"unknown dtype {dtype!r}: say auto, {', '.join(DTYPES)}")
    return kind


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """The torch device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        InvalidRequest: there is no such device here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if (driver := nvidia_driver()) is not None:
            _log.warning("the CPU is taken: %s", driver_problem(driver))
        return torch.device("cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(f"unknown device {device!r}: say auto, cpu or cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {str(device)!r} was asked for, but there is no CUDA here")
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        raise InvalidRequest(f"device {str(device)!r} was asked for; CUDA has {count} here")
    if place.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=place).item()
        except (RuntimeError, AssertionError):  # not built in, not here, or without memory (meta)
            raise InvalidRequest(f"device {str(device)!r} cannot be used here") from None
    return place


def nvidia_driver() -> str | None:
    """The version of this machine's NVIDIA driver; None if there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return "unknown" if found is None else found[0]


def driver_problem(driver: str) -> str:
    """Why torch does not see the GPU of this driver."""
    if torch.version.cuda is None:
        return (
            f"there is an NVIDIA driver ({driver}), but torch {torch.__version__} is built without "
            "CUDA: remove .venv and say make TORCH=cuda"
        )
    return (
        f"torch {torch.__version__} is for CUDA {torch.version.cuda}, and finds no GPU with the "
        f"NVIDIA driver {driver}: a newer driver, or a torch for an older CUDA"
    )
