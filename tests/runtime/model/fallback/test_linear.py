"""transformers' linear layers by the native kernels: which are replaced; that they do the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from radixcache.kernels.native.linear import PackedLinear
from radixcache.runtime.model.fallback.patches.linear import NativeLinear, pack_linears
from tests.helpers.native import needs_kernels


class Quantised(torch.Tensor):
    """Weights of another class, which no operation here knows."""


class Sub(nn.Linear):
    """A layer that may do more than `nn.Linear` does."""


def toy() -> nn.ModuleDict:
    """A tied embedding, two layers, a subclass, and weights of other classes and dtypes."""
    layers = {
        "embedding": nn.Embedding(70, 51),
        "inner": nn.Sequential(nn.Linear(51, 52), nn.Linear(52, 8)),
        "sub": Sub(52, 52),
        "half precision": nn.Linear(8, 8).half(),
        "quantised": nn.Linear(52, 52),
        "head": nn.Linear(51, 70, bias=False),
    }
    model = nn.ModuleDict(layers)
    layers["head"].weight = layers["embedding"].weight
    weight = nn.Parameter(torch.randn(52, 52).as_subclass(Quantised), requires_grad=False)
    layers["quantised"].weight = weight
    return model


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_gives_what_torch_gives_for_any_shape(bias, dtype) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(129, 77, bias=bias).to(dtype)
    layer = NativeLinear(plain)
    assert (layer.in_features, layer.out_features) == (129, 77)
    assert torch.equal(layer.weight, plain.weight)
    with torch.inference_mode():
        for shape in ((0,), (), (1,), (1, 1), (2,), (1, 31), (1, 300), (2, 3, 5)):
            x = torch.randn(*shape, 129).to(dtype)
            out, expected = layer(x), plain(x)
            assert out.shape == expected.shape and out.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        apart = torch.randn(3, 258).to(dtype)[:, ::2]
        assert torch.equal(layer(apart), layer(apart.contiguous()))


@needs_kernels
def test_weights_that_were_bfloat16_take_half_the_memory_and_have_the_same_bits() -> None:
    plain, x = nn.Linear(96, 64), torch.randn(5, 96)
    wide = NativeLinear(plain)
    plain.weight.data = plain.weight.data.bfloat16().float()
    narrow = NativeLinear(plain)
    assert narrow.packed.block[1] * 2 == wide.packed.block[1]
    full = PackedLinear(plain.weight.data, plain.bias.data)
    assert torch.equal(narrow(x), full(x)) and narrow.weight.dtype == torch.float32


@needs_kernels
def test_plain_layers_are_replaced_and_nothing_else() -> None:
    model = toy()
    embedding, weight = (model.get_parameter(f"{n}.weight") for n in ("embedding", "quantised"))
    before, place = embedding.clone(), weight.data_ptr()
    pack_linears(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["inner.0"] is kinds["inner.1"] is kinds["head"] is NativeLinear
    assert kinds["half precision"] is kinds["quantised"] is nn.Linear and kinds["sub"] is Sub
    assert torch.equal(embedding, before)
    assert model.get_parameter("quantised.weight").data_ptr() == place
    head = model["head"]
    assert isinstance(head, NativeLinear) and torch.equal(head.weight, before)
