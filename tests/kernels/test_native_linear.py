"""Products on packed weights: right against float64, in every format, and the same to the bit for a
row in any company, by any threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from radixcache.kernels.native.library import problem
from radixcache.kernels.native.linear import PackedLinear
from radixcache.kernels.quantized import E2M1, Quantized
from tests.kernels.test_native import bits

pytestmark = pytest.mark.skipif(problem() is not None, reason=str(problem()))

F32, BF16 = torch.float32, torch.bfloat16
FORMATS = ["float32", "bfloat16", "8 bits of 32", "8 bits of 16", "4 bits of 32"]
FORMATS += ["4 bits, floats of 32"]
COUNTS = (2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 25, 48, 95, 96, 97, 140)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(kind: str, outer: int, inner: int, seed: int = 0) -> torch.Tensor | Quantized:
    rng = torch.Generator().manual_seed(seed)
    if kind in ("float32", "bfloat16"):
        weight = torch.randn(outer, inner, generator=rng).mul_(inner**-0.5)
        return weight.to(getattr(torch, kind))
    number, block = int(kind[0]), int(kind[-2:])
    numbers = torch.randint(0, 1 << number, (outer, inner), generator=rng, dtype=torch.uint8)
    scales, minimums = torch.rand(2, outer, inner // block, generator=rng).mul_(0.01).half().float()
    levels = E2M1 if "floats" in kind else ()
    return Quantized(numbers, scales, -(1 << number - 1) * minimums, number, levels)


def dense(weight: torch.Tensor | Quantized) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.double()
    numbers, *tables = weight.tables()
    if weight.levels:
        numbers = torch.tensor(weight.levels)[numbers.long()]
    scales, minimums = (table.double().repeat_interleave(weight.block, 1) for table in tables)
    return numbers * scales + minimums


SHAPES = [(1, 32), (48, 64), (77, 160), (700, 1536), (130, 4224)]
ODD = [(70, 1), (70, 5), (70, 77), (70, 513)]  # depths that fill no words


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("kind", "outer", "inner"),
    [(kind, *s) for kind in FORMATS for s in (*SHAPES, *(ODD if kind in FORMATS[:2] else ()))],
)
def test_any_number_of_rows_gives_the_product(outer, inner, kind, dtype) -> None:
    weight, rng = make(kind, outer, inner), torch.Generator().manual_seed(outer)
    transposed = dense(weight).T
    for bias in (None, torch.randn(outer, generator=rng)):
        product = PackedLinear(weight, bias)
        for rows in (0, 1, *COUNTS):
            x = torch.randn(rows, inner, generator=rng).to(dtype)
            expected = x.double() @ transposed + (0 if bias is None else bias.double())
            got = product(x)
            assert got.shape == (rows, outer) and got.dtype == dtype
            if rows:
                error = (got - expected).abs().max() / expected.abs().max()
                assert error < (1e-5 if dtype == F32 else 1e-2), rows
    assert torch.equal(product.weight, transposed.T.float())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outer", "inner"), [(60, 64), (77, 96), (64, 1536)])
def test_a_row_has_the_same_bits_alone_and_in_any_company(outer, inner, kind, dtype) -> None:
    product = PackedLinear(make(kind, outer, inner), torch.randn(outer))
    x = torch.randn(140, inner).mul_(3).to(dtype)
    torch.set_num_threads(1)
    alone = bits(torch.cat([product(row) for row in x.split(1)]))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in COUNTS:
            for first in (0, 1, 140 - count):
                got = bits(product(x[first : first + count]))
                np.testing.assert_array_equal(got, alone[first : first + count])


@pytest.mark.parametrize("kind", FORMATS)
def test_fewer_bits_give_the_bits_of_the_float32_that_they_stand_for(kind) -> None:
    weight = make(kind, 100, 224)
    few, full = PackedLinear(weight), PackedLinear(dense(weight).float())
    for rows in (1, 2, 9, 100):
        x = torch.randn(rows, 224)
        np.testing.assert_array_equal(bits(few(x)), bits(full(x)))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_a_weight_are_read_from_its_panels(kind, dtype) -> None:
    weight = make(kind, 333, 96)
    product, ids = PackedLinear(weight), torch.randint(333, (50,))
    expected = weight.dense() if isinstance(weight, Quantized) else weight.float()
    assert torch.equal(product.rows(ids, dtype), expected[ids].to(dtype))
    assert torch.equal(product.weight, expected)
    assert product.rows(ids[:0], dtype).shape == (0, 96)
    for wrong in (-1, 333):
        with pytest.raises(IndexError):
            product.rows(torch.tensor([0, wrong]), dtype)


def test_rows_may_stand_apart_and_weights_may_be_columns() -> None:
    wide, x = torch.randn(64, 260), torch.randn(7, 300)
    product = PackedLinear(wide[:, :130])
    other, rows = PackedLinear(wide[:, :130].contiguous()), x[:, :130].contiguous()
    assert torch.equal(product(x[:, :130]), other(rows))


def test_what_is_no_number_spoils_its_row_alone() -> None:
    product, x = PackedLinear(make("bfloat16", 64, 128)), torch.randn(9, 128).bfloat16()
    x[3, 7] = torch.nan
    assert product(x).isnan().any(1).tolist() == [row == 3 for row in range(9)]


def test_what_does_not_fit_is_refused() -> None:
    product = PackedLinear(torch.ones(4, 8))
    for x in (torch.ones(2, 7), torch.ones(2, 8).double(), torch.ones(8, 2).mT, torch.ones(8)):
        with pytest.raises(ValueError, match=r"expected|contiguous|no native kernels"):
            product(x)
    good = make("4 bits of 32", 6, 64)
    assert isinstance(good, Quantized)
    numbers, scales, minimums = good.tables()
    for weight, match in (
        (torch.ones(4, 8).double(), "no panels"),
        (torch.ones(4, 8, dtype=torch.float16), "no panels"),
        (torch.ones(8, 4).mT, "contiguous"),
        (Quantized(*good.tables(), 5), "no panels of 5 bits"),
        (Quantized(numbers, scales[:, :1], minimums, 4), "no panels of 4 bits in blocks of 64"),
        (Quantized(numbers, scales, minimums[:5], 4), "expected"),
        (Quantized(numbers.int(), scales, minimums, 4), "expected"),
    ):
        with pytest.raises(ValueError, match=match):
            PackedLinear(weight)
    with pytest.raises(ValueError, match="expected"):
        PackedLinear(torch.ones(4, 8), torch.ones(5))
