"""The CPU kernels of `native.cpp`: attention over pages, functions on rows, products.

They take float32 or bfloat16, compute in float32, and run in torch's own pool of threads. What they
give for a row depends, to the bit, on that row alone: not on the rows beside it, nor on threads.

Whatever does not fit together is a ValueError.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import AttentionBackend, PagedBatch
from radixcache.kernels.native_build import build

DTYPES = (torch.float32, torch.bfloat16)

_NO_WINDOW = 2**31 - 1
_TYPES = {"*": c_void_p, "i": c_int32, "l": c_int64, "f": c_float}
_KERNELS = {
    "attend": "***l*l*l*****i",
    "rms_norm": "****liffi",
    "gated": "***lillii",
    "multiply_row": "****iiiiii",
}
_FLOAT_KERNELS = {"multiply": "****liii"}
_RETURNS = {"attend": c_int32}


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("sequences", "page_size")),
        *(
            (name, c_void_p)
            for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_lens", "slots")
        ),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "value_dim", "half", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


@cache
def problem() -> str | None:
    """Why the kernels cannot run here; None if they can. The first call may compile them."""
    try:
        _load()
    except OSError as error:
        return str(error)
    return None


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build()))  # torch is imported: its threads are found by name


@cache
def _load() -> dict[torch.dtype, dict[str, Any]]:
    library = _library()
    kernels: dict[torch.dtype, dict[str, Any]] = {}
    for dtype in DTYPES:
        name = str(dtype).replace("torch.", "radixcache_")
        named = _KERNELS | (_FLOAT_KERNELS if dtype == torch.float32 else {})
        addresses = (c_void_p * len(named)).in_dll(library, name)
        kernels[dtype] = {
            kernel: ctypes.CFUNCTYPE(_RETURNS.get(kernel), *(_TYPES[letter] for letter in types))(
                address
            )
            for (kernel, types), address in zip(named.items(), addresses, strict=True)
        }
    return kernels


@cache
def _panel() -> int:
    """Columns of a panel of `SmallProduct`, by the width of this processor's vectors."""
    return c_int32.in_dll(_library(), "radixcache_panel").value


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """`x` over its root mean square, times `weight + offset`.

    Args:
        x: [..., width], contiguous.
        weight: [width].
        residual: x is added to it in place, and the sum is what is normed.
        offset: 1 for Gemma.
    """
    kernel, width, to = _kernel("rms_norm", x), weight.numel(), None
    _check(x, x, (*x.shape[:-1], width))
    _check(weight, x, (width,))
    if residual is not None:
        _check(residual, x, x.shape)
        to = residual.data_ptr()
    out = torch.empty_like(x)
    rows, threads = x.numel() // width, torch.get_num_threads()
    kernel(x.data_ptr(), to, weight.data_ptr(), out.data_ptr(), rows, width, eps, offset, threads)
    return out


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: Literal["silu", "gelu_tanh"]
) -> torch.Tensor:
    """`activation(gate) * up`, both [rows, width]; they may be columns of one product."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"no activation {activation!r}")
    kernel, (rows, width), out = _kernel("gated", gate), gate.shape, gate.new_empty(gate.shape)
    _check(gate, gate, gate.shape, apart=True)
    _check(up, gate, gate.shape, apart=True)
    kernel(
        *(gate.data_ptr(), up.data_ptr(), out.data_ptr(), rows, width),
        *(gate.stride(0), up.stride(0), activation != "silu", torch.get_num_threads()),
    )
    return out


class SmallProduct:
    """x [rows, in] to x @ weight.T + bias [rows, out], in float32.

    Faster than a packed product where that takes longest to begin, and as fast as torch's own call,
    of which rows have other bits among others (measured).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._columns, depth = weight.shape
        _check(weight, torch.float32, (self._columns, depth), apart=True)
        if bias is not None:
            _check(bias, torch.float32, (self._columns,))
        panel = _panel()
        padded = weight.new_zeros(-(-self._columns // panel) * panel, depth)
        padded[: self._columns] = weight.detach()
        self._panels = padded.unflatten(0, (-1, panel)).mT.contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, depth = x.shape[0], self._panels.shape[1]
        _check(x, torch.float32, (rows, depth))
        out = x.new_empty(rows, self._columns)
        _kernel("multiply", x)(
            *(x.data_ptr(), self._panels.data_ptr()),
            *(None if self._bias is None else self._bias.data_ptr(), out.data_ptr()),
            *(rows, depth, self._columns, torch.get_num_threads()),
        )
        return out

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product, by torch: its bits depend on where a row is."""
        return torch.nn.functional.silu(self(x), inplace=True)


class RowProduct:
    """x [..., in] of one row to x @ weight.T + bias [..., out], by weights that oneDNN has packed.

    It takes 0.6 to 0.7 of the time of oneDNN's own product of one row, which reads memory slower
    (130 MB of float32 on two threads). From four rows on that is level. It sums as oneDNN does for
    more rows; whether to the bit, whoever needs it has to compare.
    """

    _PANEL = 64

    def __init__(
        self, packed: tuple[int, int], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """
        Args:
            packed: address and bytes of the packed weights, which the caller keeps.
            weight: [out, in] as it was; of it, only shape and dtype are kept.

        Raises:
            ValueError: so many bytes are no panels of 64 columns.
        """
        self._columns, self._depth = weight.shape
        self._dtype, self._bias = weight.dtype, bias
        self._address, size = packed
        columns = -(-self._columns // self._PANEL) * self._PANEL
        self._padded, left = divmod(size, columns * weight.itemsize)
        if left or self._padded < self._depth or self._padded % 2:
            raise ValueError(f"{size} bytes are no panels of a weight {list(weight.shape)}")
        if bias is not None:
            _check(bias, weight, (self._columns,))
        self._block = 512 if self._depth <= 1024 else 1024

    def __call__(self, x: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
        _check(x, self._dtype, (*[1] * (x.ndim - 1), self._depth))
        out = x.new_empty(*x.shape[:-1], self._columns)
        _kernel("multiply_row", x)(
            *(x.data_ptr(), self._address),
            *(None if self._bias is None else self._bias.data_ptr(), out.data_ptr()),
            *(self._depth, self._padded, self._block, self._columns, silu),
            torch.get_num_threads(),
        )
        return out


class NativeBackend(AttentionBackend):
    """Attention over pages on a CPU where `problem()` is None; any heads and page size.

    Keys are cut into blocks at fixed positions. A row attends over each block by itself, and what
    it sees of them is merged in order. So threads share the work evenly, and a block that several
    sequences have in their tables is read once for all of them.
    """

    name = "native kernels"
    _batch: _Batch | None = None

    def plan(self, batch: PagedBatch, *arrays: NDArray[np.integer]) -> list[torch.Tensor]:
        """
        Raises:
            ValueError: the tables of `batch` contradict each other.
        """
        last, size, counts = batch.kv_last_page_len, batch.page_size, np.diff(batch.kv_indptr)
        tables = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_lens
        starts_at_0 = not (batch.qo_indptr[0] or batch.kv_indptr[0])
        if not starts_at_0 or len(counts) != len(batch.query_lens) or len(counts) != len(last):
            raise ValueError("the page tables are of different batches")
        if (counts < 1).any() or batch.kv_indptr[-1] != len(batch.kv_indices):
            raise ValueError("a sequence without pages, or pages without a sequence")
        if (last < 1).any() or (last > size).any() or (batch.query_lens < 0).any():
            raise ValueError("a sequence's last page or new tokens cannot be of that length")
        if (batch.query_lens > batch.kv_lens).any():
            raise ValueError("a sequence has more new tokens than its pages hold")
        if batch.kv_indices.min(initial=0) < 0:
            raise ValueError("a negative page number")
        self._tokens, self._page_size = int(batch.qo_indptr[-1]), size
        self._num_pages = int(batch.kv_indices.max(initial=-1)) + 1
        self._arrays: list[NDArray[Any]] = [
            np.ascontiguousarray(table, dtype=np.int32) for table in tables
        ]
        self._arrays.append(batch.slots())
        self._batch = _Batch(len(counts), size, *(array.ctypes.data for array in self._arrays))
        return [torch.as_tensor(array, dtype=torch.int64) for array in arrays]

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As `AttentionBackend` says, after RoPE where it is still to be applied.

        Args:
            query, key, value: tokens may stand apart, as columns of one product do.
            rope: cosines and sines of each token's angles, [T, half] float32 each. The first
                2 * half elements of each head are turned by halves; those of `query` in place.

        Raises:
            ValueError: the tensors do not fit together, or to the plan.
            MemoryError: the sums of the step's rows do not fit into memory.
        """
        if self._batch is None:
            raise RuntimeError("run() before plan()")
        (tokens, heads, dim), (pages, size, kv_heads, _) = query.shape, k_pages.shape
        value_dim, half, cos, sin = v_pages.shape[3], 0, None, None
        if (tokens, size) != (self._tokens, self._page_size) or pages < self._num_pages:
            raise ValueError("the step was planned for other pages or tokens")
        if not kv_heads or heads % kv_heads or (window is not None and window < 1):
            raise ValueError(f"{heads} heads on {kv_heads}, or a window of {window}")
        _check(query, query, (tokens, heads, dim), apart=True)
        _check(key, query, (tokens, kv_heads, dim), apart=True)
        _check(value, query, (tokens, kv_heads, value_dim), apart=True)
        _check(k_pages, query, (pages, size, kv_heads, dim))
        _check(v_pages, query, (pages, size, kv_heads, value_dim))
        if rope is not None:
            half = rope[0].shape[1]
            for table in rope:
                _check(table, torch.float32, (tokens, half))
            if 2 * half > dim:
                raise ValueError(f"RoPE of {2 * half} elements in heads of {dim}")
            cos, sin = rope[0].data_ptr(), rope[1].data_ptr()
        out = query.new_empty(tokens, heads, value_dim)
        window = min(window or _NO_WINDOW, _NO_WINDOW)
        layer = _layer(heads, kv_heads, dim, value_dim, half, window, scale, softcap)
        done = _kernel("attend", query)(
            *(ctypes.addressof(self._batch), ctypes.addressof(layer)),
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0)),
            *(value.data_ptr(), value.stride(0), cos, sin),
            *(k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(), torch.get_num_threads()),
        )
        if not done:
            raise MemoryError("no memory to attend in")
        return out


@lru_cache
def _layer(*fields: float | None) -> _Layer:
    """The structure with these fields, in order; None is 0."""
    return _Layer(*(field or 0 for field in fields))


def _kernel(name: str, tensor: torch.Tensor) -> Any:
    kernels = _load().get(tensor.dtype)
    if kernels is None:
        raise ValueError(f"no native kernels for {tensor.dtype}")
    return kernels[name]


def _check(
    tensor: torch.Tensor,
    like: torch.Tensor | torch.dtype,
    shape: tuple[int, ...],
    *,
    apart: bool = False,
) -> None:
    """Refuse what is not of that shape and dtype, on a CPU, and contiguous.

    Args:
        apart: whether only what belongs to each entry of the first dimension must be.
    """
    dtype = like if isinstance(like, torch.dtype) else like.dtype
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu:
        raise ValueError(
            f"expected {list(shape)} {dtype} on a CPU, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous() and not (apart and tensor[0].is_contiguous()):
        raise ValueError(f"a tensor of {list(shape)} is not contiguous")
