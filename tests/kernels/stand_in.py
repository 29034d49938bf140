"""The FlashInfer backend as a module of its own that runs on the stand-in for the package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch

from tests.kernels import fake_flashinfer


class FakeFence:
    """As `Fence` on a GPU, with the stand-in's events."""

    def __init__(self, device: torch.device) -> None:
        self._event = fake_flashinfer.Event()

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


def load_backend() -> ModuleType:
    """A fresh copy of the module, which takes float32 and heads of any size.

    The module that is imported by its name, if any, stays on the real package.
    """
    found = importlib.util.find_spec("radixcache.kernels.flashinfer_backend")
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location("flashinfer_backend_on_stand_in", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    real = sys.modules.get("flashinfer")
    sys.modules["flashinfer"] = fake_flashinfer
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["flashinfer"], sys.modules[spec.name]
        if real is not None:
            sys.modules["flashinfer"] = real
    module.DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # type: ignore[attr-defined]
    module.HEAD_DIMS = (16, 64, 128, 256)  # type: ignore[attr-defined]
    module.Fence = FakeFence  # type: ignore[attr-defined]
    return module
