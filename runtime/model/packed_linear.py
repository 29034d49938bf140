"""Linear layers whose weights stand in the order in which oneDNN reads them.

On a CPU, most of a forward pass is products of a few rows with big weights. torch's own call for
them hands row-major weights to MKL; oneDNN on weights that were reordered once, as Inductor does
when it freezes a model, takes a quarter to two thirds of the time for up to 64 rows, and four
fifths for a thousand (float32, AVX-512). The native kernels read these weights, too, for one row.
"""

from __future__ import annotations

import platform
from contextlib import suppress

import torch
from torch import nn

from radixcache.kernels import native
from radixcache.kernels.native import RowProduct
from radixcache.runtime.model.huge_pages import use_huge_pages

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of a product of one row, by its greatest element; weights in another order are beyond 0.1."""

_MIN_WEIGHTS = 1 << 18
"""Weights of a layer from which a call gets faster (measured): one costs 15 µs more to begin."""


class PackedProduct:
    """x [..., in] to x @ weight.T + bias [..., out], by packed weights.

    Args:
        row: multiply one row by the native kernel, if it runs here and oneDNN has packed the
            weights as the kernel expects.

    Attributes:
        same_alone: whether one row has the bits that it has among more.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, row: bool = False
    ) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        # A copy: the layer's own may get another dtype, as by `Module.to`.
        self._bias = None if bias is None else bias.detach().clone()
        self._row: RowProduct | None = None
        self.same_alone = False
        if row and native.problem() is None:
            self._take_row_product(weight)

    def _take_row_product(self, weight: torch.Tensor) -> None:
        """Use the native kernel, unless it gives something else than oneDNN for one of two rows."""
        x = torch.linspace(-3, 2, 2 * weight.shape[1]).view(2, -1).sin().to(weight.dtype)
        y = self._by_onednn(x, None)
        rest = -y[0]  # with it as the bias, what bfloat16 has rounded off the sums shows
        with suppress(ValueError):
            got, expected = RowProduct(self.block, weight, rest)(x[0]), self._by_onednn(x, rest)[0]
            error = (got - expected).float().abs().max()
            if error <= _TOLERANCE[weight.dtype] * y.float().abs().max():
                self._row = RowProduct(self.block, weight, self._bias)
                self.same_alone = torch.equal(got, expected)

    def _by_onednn(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, activation, [], "")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._row is not None and x.numel() == x.shape[-1]:
            return self._row(x.contiguous())
        return self._by_onednn(x, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product, applied as it is written.

        Another operand, to add or to multiply by, would make a product of few rows half as long
        again (measured).
        """
        if self._row is not None and x.numel() == x.shape[-1]:
            return self._row(x.contiguous(), silu=True)
        return self._by_onednn(x, self._bias, "swish")

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] row-major, made anew."""
        return self._packed.to_dense()

    @property
    def block(self) -> tuple[int, int]:
        """Address and bytes of the packed weights."""
        operators = torch.ops.mkldnn
        return operators.data_ptr(self._packed), operators._nbytes(self._packed)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, with packed weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.product = PackedProduct(linear.weight, linear.bias, row=True)

    @property
    def weight(self) -> torch.Tensor:
        """For modelling code that looks."""
        return self.product.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and build of torch pack weights of that dtype."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def packs(weight: torch.Tensor, *, small: bool = False) -> bool:
    """Whether packing this weight makes its product faster; `small`: whether it can be packed."""
    big = small or weight.numel() >= _MIN_WEIGHTS
    return weight.device.type == "cpu" and big and can_pack(weight.dtype)


@torch.inference_mode()
def pack_linears(model: nn.Module, *, small: bool = False) -> None:
    """Replace the model's big linear layers on a CPU, where that makes them faster; or all.

    Quantised weights, which are tensors of other classes, stay. The old weights go, unless
    something else has them, as an embedding may.
    """
    packed = []
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
                continue
            if packs(child.weight, small=small):
                packed.append(PackedLinear(child))
                setattr(module, name, packed[-1])
    use_huge_pages(linear.product.block for linear in packed)
    if packed:  # a checkpoint's file stays in memory while one tensor is a view of it
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:
                parameter.data = parameter.data.clone()
