"""Causal prefill over pages with Triton: of the Triton backend, and in graphs of FlashInfer's on
Hopper, whose tensor cores fa2 uses at half their rate.

A few new tokens behind a long prefix make too few tiles for a GPU, so the keys of a short prefill
are split into parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from radixcache.kernels.attention import LayerKind, LayerPages
from radixcache.kernels.triton.attention_kernels import merge_kernel, prefill_kernel

SPLIT_TOKENS = 512
"""The most new tokens of a step whose keys are split."""

MIN_SPLIT = 256  # keys

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Python, on CPU tensors, as in tests."""

AMD = torch.version.hip is not None


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    """The prefill of a step in layers of one kind; its arrays are int32, on the device.

    Attributes:
        first: sequences before it, with one new token each, which it leaves out.
        longest: the most new tokens of a sequence; in a graph, of all tokens.
        workspace: memory for the parts of a short prefill, which else allocates it.
    """

    layer: LayerKind
    page_size: int
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    first: int
    sequences: int
    longest: int
    workspace: torch.Tensor | None = None

    def run(
        self,
        query: torch.Tensor,
        pages: LayerPages,
        *,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        """Attend into `out`, like the wrappers of FlashInfer; K and V are in the pages.

        Args:
            query, out: [T, query heads, dim] of the whole step.
            lse: [T, query heads] float32, for the base-2 logarithm of the sums of weights; only for
                steps of at most `SPLIT_TOKENS`.
        """
        splits = splits_of(len(query))
        assert splits > 1 or lse is None
        known = constants(self.layer, self.page_size, query, pages)
        rows = rows_of(self.layer, query.dtype)
        tiles = triton.cdiv(self.longest * known["GROUP"], rows)
        parts = sums = query
        if splits > 1:
            parts, sums = allocate_parts(query, self.layer, splits, self.workspace)
        sink = (query, False) if sinks is None else (sinks.float(), True)
        tables = (self.kv_indptr, self.kv_indices, self.kv_lens)
        prefill_kernel[tiles, self.layer.kv_heads, (self.sequences - self.first) * splits](
            query, out, parts, sums, self.qo_indptr, *pages, *tables, *strides(query, pages),
            self.first, splits, *sink, **known, ROWS=rows, SPLIT=splits > 1, MIN_SPLIT=MIN_SPLIT,
            num_stages=2,
        )  # fmt: skip
        if splits > 1:
            rest = slice(self.first, None)
            merge(parts[rest], sums[rest], out[rest], sink, None if lse is None else lse[rest])


@torch.inference_mode()
def try_prefill(layer: LayerKind, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and run the kernels of short prefills.

    Raises:
        RuntimeError: they give wrong results. Triton may raise anything else.
    """
    ints = torch.arange(3, dtype=torch.int32, device=device)
    shape = (2, 1, layer.kv_heads)
    k, v = (
        torch.zeros(*shape, dim, dtype=dtype, device=device)
        for dim in (layer.head_dim, layer.value_dim)
    )
    prefill = TritonPrefill(layer, 1, 2 * ints[:2], 2 * ints[:2], ints[:2], 2 * ints[1:2], 0, 1, 2)
    for tokens in (2, SPLIT_TOKENS):
        query = torch.zeros(tokens, layer.query_heads, layer.head_dim, dtype=dtype, device=device)
        out = query.new_ones(*query.shape[:2], layer.value_dim)
        lse = torch.empty(*query.shape[:2], device=device)
        prefill.run(query, LayerPages(k, v), out=out, lse=lse, return_lse=True)
        if out[:2].any() or (lse[:2] != ints[:2, None]).any():  # rows that see one key, and two
            raise RuntimeError("its kernels give wrong results")


def merge(
    parts: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
    sink: tuple[torch.Tensor, bool],
    lse: torch.Tensor | None = None,
) -> None:
    """Weigh `parts` [T, heads, splits, dim] by their `sums` [T, heads, splits] into `out`."""
    _, heads, splits, dim = parts.shape
    merge_kernel[len(parts), heads](
        parts, sums, out, sums if lse is None else lse, *sink, LSE=lse is not None, SPLITS=splits,
        VALUE=dim, VALUE_2=_power(dim), num_warps=2,
    )  # fmt: skip


def allocate_parts(
    query: torch.Tensor, layer: LayerKind, splits: int, workspace: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*query.shape[:2], splits)
    count, dim = math.prod(shape), layer.value_dim
    size = 4 * count * (dim + 1)
    if workspace is None:
        workspace = query.new_empty(size, dtype=torch.uint8)
    parts, sums = workspace[:size].view(torch.float32).split([count * dim, count])
    return parts.view(*shape, dim), sums.view(shape)


def parts_bytes(layer: LayerKind) -> int:
    """Bytes of the parts of a short prefill at most."""
    each = 4 * layer.query_heads * (layer.value_dim + 1)
    return each * max(tokens * splits_of(tokens) for tokens in (SPLIT_TOKENS // 4, SPLIT_TOKENS))


def splits_of(tokens: int) -> int:
    """Parts of the keys in a step of so many new tokens: of 4, 8, 16 and 32 the fastest for 64 and
    for 256 of them (32 heads on 8, an H200)."""
    return 1 if tokens > SPLIT_TOKENS else 16 if 4 * tokens <= SPLIT_TOKENS else 8


def constants(
    layer: LayerKind, page_size: int, query: torch.Tensor, pages: LayerPages
) -> dict[str, Any]:
    """What the kernels of decodes and prefills are compiled for, and numbers that both take."""
    steps = (stride * side.itemsize for side in pages for stride in side.stride()[:3])
    heads, kv_heads, dim, value_dim, scale, window, softcap, *_ = layer
    dim_2, value_2 = _power(dim), _power(value_dim)
    return {
        "scale": scale, "window": window or 0, "softcap": softcap or 0.0,
        "WINDOW": window is not None, "SOFTCAP": softcap is not None, "PAGE": page_size,
        "GROUP": heads // kv_heads, "BLOCK": block_of(max(dim_2, value_2), query.dtype),
        "EXACT": query.dtype == torch.float32,
        # Of all heads in these pages, in bytes: how many a load may take at once.
        "ALIGN": math.gcd(16, *(side.data_ptr() for side in pages), *steps),
        # The interpreter multiplies the bits of bfloat16 as integers.
        "UPCAST": INTERPRETED and query.dtype == torch.bfloat16,
        "DIM": dim, "DIM_2": dim_2, "VALUE": value_dim, "VALUE_2": value_2,
    }  # fmt: skip


def strides(query: torch.Tensor, pages: LayerPages) -> tuple[int, ...]:
    return (*query.stride()[:2], *pages.k.stride()[:3], *pages.v.stride()[:3])


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # which products take


def block_of(dim: int, dtype: torch.dtype, amd: bool = AMD) -> int:
    """Keys per block: as many as fit into shared memory together with a tile's queries and the
    blocks in flight (NVIDIA 163 KiB or more, AMD 64)."""
    return max(16, 64 >> (dtype == torch.float32) + (dim > 256) + (amd and dim > 128))


def rows_of(layer: LayerKind, dtype: torch.dtype, amd: bool = AMD) -> int:
    """Query heads times tokens per tile of a prefill: 128, if registers suffice."""
    dim = max(_power(layer.head_dim), _power(layer.value_dim))
    plain = layer.window is None and layer.softcap is None
    small = plain and dim <= 128 and dtype.itemsize == 2 and not amd
    return 128 if small else block_of(dim, dtype, amd)
