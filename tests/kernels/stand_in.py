"""The FlashInfer backend as a module of its own that runs on the stand-in for the package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

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


def what_a_graph_keeps(step: Any) -> list[object]:
    """Addresses and wrappers of a captured step; the wrappers have buffers of their own."""
    kept = [None if step.in_group is None else step.in_group.data_ptr()]
    for part in [*step.parts, *([] if step.shared is None else [step.shared])]:
        kept += [part.rows, *map(id, part.wrappers.values())]
        assert all(wrapper._graph for wrapper in part.wrappers.values())  # buffers of its own
    for part in step.parts:
        tables = part.tables
        appended = (tables.sequence, tables.position, tables.kv_indptr, tables.indices)
        kept += [array.device.data_ptr() for array in appended]
    return kept
