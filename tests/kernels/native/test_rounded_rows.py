"""Products of rows that are rounded to 8 bits: the bits of a plain rule, in every format, whatever
the number of rows or threads. As each processor has to give them, all have the same bits."""

from __future__ import annotations

import platform
import shutil
import subprocess
from ctypes import c_int32

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixcache.kernels.native.linear import PackedLinear
from radixcache.kernels.quantized import Quantized
from tests.helpers.native import needs_kernels
from tests.helpers.sources import ROOT
from tests.kernels.native.panels import COUNTS, FORMATS, WHOLE, bits, make

pytestmark = needs_kernels

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 32), (48, 64), (77, 160), (300, 1536)]
F = np.float32


def product_of(weight: Quantized, bias: torch.Tensor | None = None) -> PackedLinear:
    return PackedLinear(weight, bias, c_int32(1))


def rounded(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Whole numbers [rows, depth], and a scale [rows, blocks] for each 32 of them."""
    rows, depth = x.shape
    wide = np.zeros((rows, -(-depth // 32) * 32), F)
    wide[:, :depth] = x
    blocks = wide.reshape(rows, -1, 32)
    most = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        factor = np.where(most > 1e-30, F(127) / most, F(0)).astype(F)
    numbers = np.rint(blocks * factor[..., None])
    return numbers.reshape(rows, -1)[:, :depth], most / F(127)


def expected(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Whole numbers add up within a block of the weight; blocks in order, each step rounded."""
    numbers, scales, *minimums = (table.numpy() for table in weight.tables())
    if weight.levels:
        numbers = np.array(weight.levels)[numbers]
    size, (row_numbers, row_scales) = weight.block, rounded(x.float().numpy())
    sums = np.zeros((len(x), len(numbers)), F)
    for at in range(scales.shape[1]):
        part = slice(at * size, (at + 1) * size)
        own = row_numbers[:, part].astype(np.int64)
        whole = (own @ numbers[:, part].astype(np.int64).T).astype(F)
        total = own.sum(1).astype(F)[:, None]
        block = whole * scales[:, at]
        for minimum in minimums:
            block = block + total * minimum[:, at]
        sums = sums + block * row_scales[:, at * size // 32, None]
    out = torch.from_numpy(sums)
    return (out if bias is None else out + bias).to(x.dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize(("outer", "inner"), [*SHAPES, (33, 4224)])
def test_a_product_has_the_bits_of_the_rule(outer, inner, kind, dtype) -> None:
    weight, rng = make(kind, outer, inner), torch.Generator().manual_seed(outer)
    assert isinstance(weight, Quantized)
    bias = torch.randn(outer, generator=rng)
    product = product_of(weight, bias)
    x = torch.randn(140, inner, generator=rng).mul_(3).to(dtype)
    x[5] = 0
    x[6, : inner // 2] *= 1e-20
    want = bits(expected(x, weight, bias))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, *COUNTS):
            for first in (0, 140 - rows):
                got = bits(product(x[first : first + rows]))
                np.testing.assert_array_equal(got, want[first : first + rows])


@pytest.mark.parametrize("kind", WHOLE)
def test_torch_has_the_same_rule(kind) -> None:
    """Rows of bfloat16 are often halfway between two numbers."""
    weight, x = make(kind, 37, 96), torch.randn(900, 96).bfloat16().float()
    assert isinstance(weight, Quantized)
    np.testing.assert_array_equal(bits(weight.times_rounded(x)), bits(expected(x, weight)))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_row_alone(wrong) -> None:
    for kind in WHOLE:
        weight, x = make(kind, 64, 128), torch.randn(9, 128)
        assert isinstance(weight, Quantized)
        x[3, 7] = wrong
        out = product_of(weight)(x)
        assert (~out.isfinite()).any(1).tolist() == [row == 3 for row in range(9)]
        assert not out[3].isfinite().any()


def test_rows_are_rounded_only_while_they_shall_be_and_before_quantized_weights_alone() -> None:
    flag, x = c_int32(0), torch.randn(5, 64)
    for kind in FORMATS:
        weight = make(kind, 40, 64)
        product, plain = PackedLinear(weight, None, flag), PackedLinear(weight)
        flag.value = 0
        assert torch.equal(product(x), plain(x))
        flag.value = 1
        assert torch.equal(product(x), plain(x)) == (kind not in WHOLE)


X86 = "-march=x86-64"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86-64")
@pytest.mark.parametrize(
    ("flags", "fast"),
    [
        ([X86], False),
        ([f"{X86}-v2", "-mavx"], False),
        ([f"{X86}-v3"], True),
        ([f"{X86}-v3", "-mavx512f"], False),  # Xeon Phi: words of 32 bits alone
        ([f"{X86}-v4"], True),
    ],
    ids=str,
)
def test_a_processor_without_instructions_for_bytes_does_not_count_as_fast(flags, fast) -> None:
    """What "auto" asks for. No such processor need be here: nothing runs."""
    source = f'#include "rounded.h"\nstatic_assert(ROUNDS_FAST == {str(fast).lower()});\n'
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", "-I", str(ROOT / "kernels/native")]
    subprocess.run([*command, *flags, "-x", "c++", "-"], input=source, text=True, check=True)
