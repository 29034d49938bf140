"""Linear layers whose weights stand in the order in which oneDNN reads them.

On a CPU, most of a forward pass is products of a few rows with big weights. torch's own call for
them hands row-major weights to MKL; oneDNN on weights that were reordered once, as Inductor does
when it freezes a model, takes a quarter to two thirds of the time for up to 64 rows, and four
fifths for a thousand (float32, AVX-512). The native kernels read these weights, too, for one row.
"""

from __future__ import annotations

import platform
from ctypes import c_byte

import torch
from torch import nn
from torch.nn import functional as F

from radixcache.kernels import native
from radixcache.kernels.native import RowProduct
from radixcache.runtime.model.system_memory import use_huge_pages

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of a product of one row, by its greatest element; weights in another order are beyond 0.1."""

_COMPARED_SUMS = 512
"""Of single rows and of pairs, at least: in another order, one in 25 differs (measured, AVX2)."""

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
        outer, inner = weight.shape
        pairs = -(-_COMPARED_SUMS // outer)
        x = torch.arange(2 * pairs * inner).sin().to(weight.dtype).view(pairs, 2, inner)
        y = self._by_onednn(x, None)
        limit = _TOLERANCE[weight.dtype] * y.float().abs().max()
        same = True
        for two, sums in zip(x, y, strict=True):
            rest = -sums[0]  # with it as the bias, what bfloat16 has rounded off the sums shows
            try:
                got = RowProduct(self.block, weight, rest)(two[0])
            except ValueError:
                return
            expected = self._by_onednn(two, rest)[0]
            if not (got - expected).float().abs().max() <= limit:
                return
            same = same and torch.equal(got, expected)
        self._row = RowProduct(self.block, weight, self._bias)
        self.same_alone = same

    def _by_onednn(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: str = "none"
    ) -> torch.Tensor:
        shape, count = x.shape[:-1], x.shape[:-1].numel()
        if spare := _round_up(count) - count:
            x = F.pad(x.reshape(count, -1), (0, 0, 0, spare))
        y = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, activation, [], "")
        return y[:count].view(*shape, -1) if spare else y

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


def _round_up(rows: int) -> int:
    """The rows that a product is given: at most an eighth more, and few different numbers.

    For each number oneDNN compiles a kernel, in a millisecond, and holds half a MiB from then on
    (measured): a server, whose steps have any number of rows, would grow by hundreds.
    """
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class PackedRows:
    """Rows of a weight [out, in] by their numbers, out of what a product has packed.

    An output layer that is tied to the embedding so needs no second copy. oneDNN packs panels of
    some columns, [in][columns], or of bfloat16 [in / 2][columns][2], filled up with zeros: here 4
    bytes are read at a time.
    """

    def __init__(self, product: PackedProduct, weight: torch.Tensor) -> None:
        """
        Raises:
            ValueError: the weights are packed in another order.
        """
        address, size = product.block
        memory = torch.frombuffer((c_byte * size).from_address(address), dtype=torch.int32)
        self._product, self._dtype = product, weight.dtype
        rows, self._depth = weight.shape
        some = torch.arange(0, rows, -(-rows // 256)), torch.arange(max(0, rows - 64), rows)
        for self._width in (64, 48, 32, 24, 16, 8):  # by the registers that the processor has
            panels = -(-rows // self._width)
            if len(memory) % (panels * self._width):
                continue
            self._panels = memory.view(panels, -1, self._width)
            deep = self._panels.shape[1] * 4 >= self._depth * weight.itemsize
            if deep and all(torch.equal(self(ids), weight[ids]) for ids in some):
                return
        raise ValueError("the weights are packed in another order")

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Those of `ids` [T], as [T, in]."""
        found = self._panels[ids // self._width, :, ids % self._width].view(self._dtype)
        return found[:, : self._depth].contiguous()


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
    # torch's own product in bfloat16 is oneDNN's, too, compiled for any number of rows.
    big = small or weight.dtype == torch.bfloat16 or weight.numel() >= _MIN_WEIGHTS
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
