"""A pretended GPU on which the stand-in for FlashInfer runs, and the backend over it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.kernels import fake_flashinfer
from tests.pretend_cuda import Device, DeviceTensor, pretend_cuda, unwrap

_BACKEND = "radixcache.kernels.flashinfer_backend"


class Gpu(NamedTuple):
    """A pretended device, the stand-in for FlashInfer there, and the backend's module over it."""

    device: Device
    flashinfer: ModuleType
    backend: ModuleType


@contextmanager
def pretend_gpu(any_dtype: bool = True, index: int = 0) -> Iterator[Gpu]:
    """A GPU with FlashInfer, which whoever imports the backend by its name gets.

    With `any_dtype` it takes float32 and heads of 16, too, which the real kernels do not.
    """
    with pretend_cuda(index) as device:
        fake_flashinfer.reset()
        fake_flashinfer.ALLOW_FLOAT32 = fake_flashinfer.ALLOW_ANY_HEAD_DIM = any_dtype
        flashinfer = flashinfer_on(device)
        with patch.dict(sys.modules, {"flashinfer": flashinfer}):
            backend = _fresh_copy(_BACKEND)
        if any_dtype:
            backend.DTYPES = (*backend.DTYPES, torch.float32)  # type: ignore[attr-defined]
            backend.HEAD_DIMS = (16, *backend.HEAD_DIMS)  # type: ignore[attr-defined]
        backend._WORKSPACE = 16 << 20  # type: ignore[attr-defined]  # zeroing more takes long
        with patch.dict(sys.modules, {"flashinfer": flashinfer, _BACKEND: backend}):
            yield Gpu(device, flashinfer, backend)
        fake_flashinfer.reset()


def _fresh_copy(name: str) -> ModuleType:
    """The module of that name, executed anew; the one that is imported, if any, stays."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{name}_on_stand_in", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {spec.name: module}):  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def flashinfer_on(device: Device) -> ModuleType:
    """The stand-in for FlashInfer with its kernels on a pretended device."""
    module = ModuleType("flashinfer")
    module.__dict__.update(vars(fake_flashinfer))
    for name, value in vars(fake_flashinfer).items():
        if name.startswith("Batch"):
            setattr(module, name, _wrapper_on(device, value))

    def append(*, kv_indices: torch.Tensor, **arrays: Any) -> None:
        # A kernel gets the address alone: a graph may read more page numbers than at its capture.
        length = kv_indices.untyped_storage().nbytes() // 4 - kv_indices.storage_offset()
        everything = kv_indices.as_strided((length,), (1,))
        fake_flashinfer.append_paged_kv_cache(kv_indices=everything, **arrays)

    names = (
        "merge_state_in_place", "top_k_renorm_probs", "top_p_renorm_probs", "rmsnorm",
        "fused_add_rmsnorm", "silu_and_mul", "apply_rope_with_cos_sin_cache_inplace",
    )  # fmt: skip
    kernels = {name: getattr(fake_flashinfer, name) for name in names}
    for name, kernel in {"append_paged_kv_cache": append, **kernels}.items():
        launch = functools.partial(device.launch, kernel)
        setattr(module, name, functools.update_wrapper(launch, kernel))
    return module


def _wrapper_on(device: Device, wrapper: type) -> type:
    class OnDevice(wrapper):
        def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
            for name, value in {"the workspace": workspace, **options}.items():
                assert not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor), (
                    f"{name} is not on the device"
                )
            with _disable_current_modes():
                super().__init__(unwrap(workspace), **unwrap(options))

        def plan(self, **arrays: Any) -> None:
            assert device.capturing is None, "plan() in a capture"
            for name, value in arrays.items():
                if isinstance(value, torch.Tensor):
                    on_device = isinstance(value, DeviceTensor)
                    assert on_device == name.endswith("indices"), f"{name} is on the wrong side"
                    assert on_device or device.is_pinned(value), f"{name} is not pinned"
            with _disable_current_modes():
                super().plan(**unwrap(arrays))

        def run(self, *args: Any, **kwargs: Any) -> Any:
            return device.launch(super().run, *args, **kwargs)

    return OnDevice
