"""Packed linear layers against a product in float64."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from radixcache.kernels import native
from radixcache.runtime.model import packed_linear
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.packed_linear import (
    PackedLinear,
    PackedProduct,
    PackedRows,
    can_pack,
    pack_linears,
)
from tests.models import tiny_model

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="oneDNN on x86-64 only")
needs_rows = pytest.mark.skipif(
    not can_pack(torch.float32) or native.problem() is not None, reason="native kernels on x86-64"
)


class Quantised(torch.Tensor):
    """Weights of another class, which no operation here knows."""


class Sub(nn.Linear):
    """A layer that may do more than `nn.Linear` does."""


def toy() -> nn.ModuleDict:
    """A tied embedding, a big and a small layer, and a subclass."""
    layers = {
        "embedding": nn.Embedding(700, 512),
        "inner": nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)),
        "sub": Sub(512, 512),
        "head": nn.Linear(512, 700, bias=False),
    }
    model = nn.ModuleDict(layers)
    layers["head"].weight = layers["embedding"].weight
    return model


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (129, 77), (512, 2048)])
def test_any_number_of_rows_gives_the_product(inner, outer, bias, dtype) -> None:
    if not can_pack(dtype):
        pytest.skip("no bfloat16 here")
    torch.manual_seed(inner + outer)
    linear = nn.Linear(inner, outer, bias=bias).to(dtype)
    packed = PackedLinear(linear)
    if dtype == torch.float32:  # bfloat16 is packed in another order without AVX512-BF16
        assert (packed.product._row is not None) == (native.problem() is None)
    assert (packed.in_features, packed.out_features) == (inner, outer)
    assert torch.equal(packed.weight, linear.weight)
    with torch.inference_mode():
        for shape in ((0,), (), (1,), (1, 1), (2,), (1, 31), (1, 300), (2, 3, 5)):
            x = torch.randn(*shape, inner).to(dtype)
            expected = x.double() @ linear.weight.double().t()
            expected += linear.bias.double() if bias else 0
            out = packed(x)
            assert out.shape == (*shape, outer) and out.dtype == dtype
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            gated = torch.nn.functional.silu(expected)
            by_onednn = PackedProduct(linear.weight, linear.bias)(x)
            products = (out, expected), (by_onednn, expected), (packed.product.silu(x), gated)
            for got, wanted in products:
                torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@needs_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_whatever_the_threads(dtype) -> None:
    if not can_pack(dtype):
        pytest.skip("no bfloat16 here")
    torch.manual_seed(1)
    product = PackedProduct(torch.randn(700, 513).to(dtype), row=True)
    x, before = torch.randn(1, 513).to(dtype), torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


@needs_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_another_order_are_seen_when_packed(dtype, monkeypatch) -> None:
    if not can_pack(dtype):
        pytest.skip("no bfloat16 here")
    torch.manual_seed(3)
    weights = [torch.randn(512, depth).to(dtype) for depth in (512, 700, 1536)]
    if not all(PackedProduct(weight, row=True).same_alone for weight in weights):
        pytest.skip("oneDNN sums in another order here")

    class Other(native.RowProduct):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            self._block = 256

    monkeypatch.setattr(packed_linear, "RowProduct", Other)
    for weight in weights:
        product = PackedProduct(weight, row=True)
        assert product._row is not None and not product.same_alone, weight.shape


@needs_rows
@pytest.mark.parametrize("outer", [1, 2, 16])
def test_a_rare_difference_is_seen_when_packed_however_few_the_columns(outer, monkeypatch) -> None:
    class Rare(native.RowProduct):
        """Whose last sum is another number for one row in 25."""

        calls = 0

        def __call__(self, x: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
            y = super().__call__(x, silu=silu)
            Rare.calls += 1
            y[-1] += 1e-6 * (Rare.calls % 25 == 0)
            return y

    torch.manual_seed(8)
    weight = torch.randn(outer, 513)
    before = PackedProduct(weight, row=True)
    if before._row is None:
        pytest.skip("oneDNN packs one column in another order")
    monkeypatch.setattr(packed_linear, "RowProduct", Rare)
    product = PackedProduct(weight, row=True)
    assert product._row is not None and not product.same_alone


@needs_rows
def test_a_row_whose_elements_stand_apart_is_multiplied() -> None:
    torch.manual_seed(4)
    product, x = PackedProduct(torch.randn(64, 130), row=True), torch.randn(1, 260)[:, ::2]
    assert product._row is not None and not x.is_contiguous()
    assert torch.equal(product(x), product(x.contiguous()))
    assert torch.equal(product.silu(x), product.silu(x.contiguous()))


@needs_rows
def test_sums_that_vanish_keep_the_sign_that_they_have_among_more_rows() -> None:
    product = PackedProduct(torch.full((70, 600), -1e-30), row=True)
    two, one = product(torch.full((2, 600), 1e-30)), product(torch.full((1, 600), 1e-30))
    assert not two.any() and torch.equal(one.signbit(), two[:1].signbit())


@needs_rows
def test_the_dtype_of_a_layer_s_bias_may_change_after_it_is_packed() -> None:
    torch.manual_seed(5)
    linear, x = nn.Linear(130, 64), torch.randn(1, 130)
    packed = PackedLinear(linear)
    expected = packed(x)
    packed.to(torch.bfloat16)
    assert packed.bias.dtype == torch.bfloat16
    assert torch.equal(packed(x), expected)
    torch.testing.assert_close(packed(torch.cat([x, x]))[:1], expected)


@needs_rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_stand_in_another_order_are_left_to_onednn(dtype, monkeypatch) -> None:
    if not can_pack(dtype):
        pytest.skip("no bfloat16 here")
    torch.manual_seed(2)
    weight, x = torch.randn(128, 512).to(dtype), torch.randn(1, 512).to(dtype)
    expected = PackedProduct(weight)(x)
    monkeypatch.setattr(
        PackedProduct, "block", property(lambda _: (weight.data_ptr(), weight.nbytes))
    )
    product = PackedProduct(weight, row=True)  # finds it row by row
    assert product._row is None and torch.equal(product(x), expected)
    short = property(lambda _: (weight.data_ptr(), weight.nbytes - 2))
    monkeypatch.setattr(PackedProduct, "block", short)
    assert PackedProduct(weight, row=True)._row is None
    with pytest.raises(ValueError, match="no panels"):
        native.RowProduct((weight.data_ptr(), weight.nbytes - 2), weight, None)


@needs_packing
def test_quantised_weights_stay_as_they_are() -> None:
    model = toy()
    weight = nn.Parameter(torch.randn(512, 512).as_subclass(Quantised), requires_grad=False)
    model["quantised"] = nn.Linear(512, 512)
    model["quantised"].weight = weight
    place = weight.data_ptr()
    pack_linears(model)
    assert type(model["inner"][0]) is PackedLinear  # type: ignore[index]
    assert model["quantised"].weight is weight and weight.data_ptr() == place


@needs_packing
def test_big_plain_layers_are_packed_and_nothing_else() -> None:
    model = toy()
    embedding = model.get_parameter("embedding.weight")
    before = embedding.clone()
    pack_linears(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["inner.0"] is kinds["head"] is PackedLinear
    assert kinds["inner.1"] is nn.Linear and kinds["sub"] is Sub
    assert torch.equal(embedding, before)
    head = model["head"]
    assert isinstance(head, PackedLinear) and torch.equal(head.weight, before)


@needs_packing
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux only")
def test_the_checkpoint_does_not_stay_in_memory_beside_the_packed_weights(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(packed_linear, "_MIN_WEIGHTS", 1)
    model = load_model(tiny_model("llama", tmp_path, tokenizer=False), device="cpu")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert model.vocab_size


def test_nothing_is_packed_where_it_cannot_be(monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    model = toy()
    pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


class RowsOfProducts(TorchDispatchMode):
    """The numbers of rows that oneDNN is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "linear_pointwise" in str(func):
            self.seen.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@needs_packing
def test_onednn_is_given_few_numbers_of_rows_and_none_changes_another() -> None:
    torch.manual_seed(5)
    product, x = PackedProduct(torch.randn(48, 64)), torch.randn(1030, 64)
    whole = product(x)
    with RowsOfProducts() as rows:
        for count in range(2, 1031):
            assert torch.equal(product(x[:count]), whole[:count])
            assert count <= rows.seen[-1] <= max(count, 9 * count // 8)
    assert rows.seen[:15] == list(range(2, 17)) and len(set(rows.seen)) < 66


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(700, 384), (64, 2), (1, 16), (1003, 77), (130, 514), (16, 3)])
def test_rows_are_read_from_packed_weights(shape, dtype) -> None:
    if not can_pack(dtype):
        pytest.skip("no bfloat16 here")
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape).to(dtype)
    product = PackedProduct(weight)
    try:
        rows = PackedRows(product, weight)
    except ValueError:
        if shape[1] > 16 and torch.cpu._is_avx512_supported():
            raise
        pytest.skip("packed in an order of its own")
    ids = torch.randint(len(weight), (50,))
    assert torch.equal(rows(ids), weight[ids]) and rows(ids).is_contiguous()
    assert torch.equal(rows(torch.arange(len(weight))), weight)
    assert rows(ids[:0]).shape == (0, shape[1])
    del product
    assert torch.equal(rows(ids), weight[ids])
    other = weight.clone()
    other[-1] += 1
    with pytest.raises(ValueError, match="another order"):
        PackedRows(PackedProduct(other), weight)
