"""Pages of another dtype than the model's give the bits of plain pages with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.kv_format import FP8, decode, encode, stored_dim
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.library import problem
from radixcache.kernels.torch.attention import TorchAttention
from tests.kernels.backends import attend, held
from tests.kernels.reference import random_step

F32, BF16, F16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
BACKENDS = [
    TorchAttention,
    pytest.param(NativeAttention, marks=pytest.mark.skipif(problem() is not None, reason="")),
]


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(INT8).numpy()


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("seed", range(24))
def test_attention_is_that_over_the_numbers_held(seed, make: Callable[[], AttentionBackend]):
    """With windows, caps, sinks and shared pages; slots without a token hold what is no number."""
    dtype = (INT8, F16, BF16)[seed % 3]
    step, options = random_step(seed, (32, 64, 96), (F32, BF16) if dtype == INT8 else (F32,))
    out, *sides = attend(step, make(), dtype, **options)
    plain, kind = held(step, dtype), step.query.dtype
    if make is NativeAttention:  # sums in float32, and rounds the result
        names = ("query", "key", "value", "k_pages", "v_pages")
        exact: dict[str, Any] = {name: getattr(step, name).float() for name in names}
        plain = held(replace(step, **exact), dtype)
    expected, *written = attend(plain, make(), plain.query.dtype, **options)
    assert out.dtype == kind
    np.testing.assert_array_equal(bits(out), bits(expected.to(kind)))
    for side, other in zip(sides, written, strict=True):  # a token is rounded by itself
        read = decode(side, other.dtype).float()
        np.testing.assert_array_equal(read.nan_to_num(7), other.float().nan_to_num(7))


def test_int8_is_all_numbers_and_a_float16_scale_for_each_32() -> None:
    heads = torch.zeros(4, 64)
    heads[0, :3] = torch.tensor([127.0, -63.4, 0.5])  # a tie goes to the even number
    heads[1, 40] = 1e-9  # a scale that float16 does not have
    heads[2, 33] = torch.nan
    heads[3, 1] = -2.0
    stored = encode(heads, INT8)
    assert stored.shape == (4, stored_dim(64, INT8)) == (4, 68)
    numbers, scales = stored.split([64, 4], -1)
    assert scales.contiguous().view(F16).nan_to_num(-1).tolist() == [
        [1, 0], [0, 0], [0, -1], [torch.tensor(2 / 127).half().item(), 0]
    ]  # fmt: skip
    assert numbers[0, :4].tolist() == [127, -63, 0, 0] and numbers[3, 1] == -127
    back = decode(stored, F32)
    assert back[2, 32:].isnan().all() and not back[[0, 1, 3]].isnan().any()
    assert (back - heads)[[0, 3]].abs().max() <= 0.5


def test_fp8_is_cut_off_where_it_ends() -> None:
    numbers = torch.tensor([1e6, -900.0, 448.0, 3.0, 0.0])
    assert encode(numbers, FP8).float().tolist() == [448, -448, 448, 3, 0]
    assert (encode(numbers, FP8, 2.0).float() * 2).tolist() == [896, -896, 448, 3, 0]
