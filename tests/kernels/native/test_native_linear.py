"""Products on packed weights: right against float64, in every format, and the same to the bit for a
row in any company, by any threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixcache.kernels.native.linear import PackedLinear
from radixcache.kernels.quantized import E4M3, Quantized, e2m1
from tests.helpers.native import needs_kernels
from tests.kernels.native.panels import COUNTS, FORMATS, bits, make

pytestmark = needs_kernels

F32, BF16 = torch.float32, torch.bfloat16


def dense(weight: torch.Tensor | Quantized) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.double()
    numbers, *tables = weight.tables()
    if weight.levels:
        numbers = torch.tensor(weight.levels)[numbers.long()]
    scales, *minimums = (table.double().repeat_interleave(weight.block, 1) for table in tables)
    return sum(minimums, numbers * scales)


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


def test_weights_of_nvfp4_have_the_values_of_its_definition() -> None:
    codes, rng = torch.arange(256).view(2, 128).byte() & 15, torch.Generator().manual_seed(0)
    scales = torch.rand(2, 8, generator=rng).to(torch.float8_e4m3fn).float() * 0.0123
    halves = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = torch.tensor([*halves, *(-x for x in halves)])[codes.int()]
    expected = (values.view(2, 8, 16) * scales[..., None]).view(2, 128)
    weight = e2m1(codes, scales)
    assert torch.equal(weight.dense(), expected)
    assert torch.equal(PackedLinear(weight).weight, expected)


@pytest.mark.parametrize("scale", [1e-40, 1.0, 255.9, 256.0, 1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("codes", [range(256), [*range(127), *range(128, 255)]], ids=["NaN", ""])
def test_each_code_of_fp8_has_its_value_at_any_scale(codes, scale) -> None:
    numbers = torch.tensor([*codes, *[0] * (256 - len(codes))], dtype=torch.uint8).view(2, 128)
    product = PackedLinear(Quantized(numbers, torch.full((2, 4), scale), None, 8, E4M3))
    floats = numbers.view(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(product.weight, floats, rtol=0, atol=0, equal_nan=True)
    few = len(codes) < 256 and scale < 256
    assert product.block[1] == PackedLinear(torch.ones(2, 128)).block[1] * (9 if few else 32) // 32


def test_small_codes_of_fp8_count_where_a_process_takes_subnormals_for_zeros() -> None:
    weight = Quantized(torch.full((2, 32), 1).byte(), torch.ones(2, 1), None, 8, E4M3)
    if not torch.set_flush_denormal(True):
        pytest.skip("not this processor")
    try:
        assert (PackedLinear(weight).weight == 2.0**-9).all()
    finally:
        torch.set_flush_denormal(False)


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
        (Quantized(numbers, scales, minimums, 5), "no panels of 5 bits"),
        (Quantized(numbers, scales[:, :1], minimums, 4), "no panels of 4 bits in blocks of 64"),
        (Quantized(numbers, scales, minimums[:5], 4), "expected"),
        (Quantized(numbers.int(), scales, minimums, 4), "expected"),
        (Quantized(numbers, scales, None, 8, (1.0, 2.0)), "no panels of 8 bits"),
    ):
        with pytest.raises(ValueError, match=match):
            PackedLinear(weight)
    with pytest.raises(ValueError, match="expected"):
        PackedLinear(torch.ones(4, 8), torch.ones(5))
