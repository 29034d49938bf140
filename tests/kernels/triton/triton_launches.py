"""Lets the simulated device launch Triton's kernels, which its interpreter runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.helpers.simulated_cuda import Device


class Launched:
    """A kernel that the simulated device launches, so that a graph records it."""

    def __init__(self, device: Device, kernel: Any) -> None:
        self._device, self._kernel = device, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def interpreted(*args: Any, **options: Any) -> None:
            self._kernel[grid](*args, **options)

        return partial(self._device.launch, interpreted)


def launch_triton(device: Device, monkeypatch: pytest.MonkeyPatch, splits: int = 2) -> None:
    """Launch all kernels there, with few parts of the keys: each takes its time."""
    from radixcache.kernels.triton import attention as triton_attention
    from radixcache.kernels.triton import experts as triton_experts
    from radixcache.kernels.triton import linear as triton_linear
    from radixcache.kernels.triton import prefill as triton_prefill

    monkeypatch.setattr(triton_attention, "SPLITS", splits)
    monkeypatch.setattr(triton_prefill, "splits_of", lambda tokens: splits)
    monkeypatch.setattr(triton_prefill, "SPLIT_TOKENS", 64)  # with which it is tried
    for module, name in (
        (triton_attention, "append_kernel"),
        (triton_attention, "decode_kernel"),
        (triton_prefill, "merge_kernel"),
        (triton_prefill, "prefill_kernel"),
        (triton_experts, "grouped_kernel"),
        (triton_linear, "linear_kernel"),
    ):
        monkeypatch.setattr(module, name, Launched(device, getattr(module, name)))
