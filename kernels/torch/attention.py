"""Attention over pages in plain torch: the CPU backend, and the reference for every other one.

A step is cut into tiles, each one gather and one scaled-dot-product call:

- a *wide* tile is up to 256 (on a GPU 2048) consecutive query rows of one sequence; it reads the
  keys up to its own last row only, so a long prefill never builds a quadratic mask;
- a *narrow* tile is the single query rows (decodes) of several sequences of similar length, their
  keys padded to the longest. The query heads that share a KV head become its query rows.

torch's `is_causal` is aligned at the top left, which is wrong for suffixes, so masks are explicit.
A row's view depends only on the distance from the last key, so one matrix, sliced from its
bottom-right corner, masks every wide tile of every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from radixcache.kernels.attention import (
    Arrays,
    AttentionBackend,
    AttentionPlan,
    FixedShape,
    LayerInputs,
    PagedBatch,
)
from radixcache.kernels.kv_format import decode, encode, isolate
from radixcache.kernels.upload import send

# Query rows of a wide tile, and bytes of keys in a narrow one: they stay in a CPU's cache
# (measured), or keep a GPU busy (a guess).
_CPU_LIMITS = (256, 2 << 20)
_GPU_LIMITS = (2048, 256 << 20)


class _Span(NamedTuple):
    """Consecutive query rows of one sequence and the keys that they can see."""

    row: int  # first row in the flat batch
    queries: int
    page: int  # first entry of kv_indices
    keys: int  # tokens from that page's first slot to the last that a query sees
    own: int  # the first query's own key among them
    ahead: NDArray[np.int32] | None = None  # [queries] keys behind its own that each sees


@dataclass(frozen=True, slots=True)
class _Tile:
    """Spans of equal `queries`, attended in one call; more than one span only if `queries` is 1."""

    rows: torch.Tensor | slice  # of the flat batch
    spans: int
    queries: int
    keys: int
    pages: torch.Tensor  # [spans * pages_per_span] int64; padding repeats the span's first page
    unwritten: torch.Tensor | None  # gathered slots below `keys` that hold no token of the span
    mask: torch.Tensor | None  # additive; [queries, keys], or [spans, 1, 1, keys]


class TorchAttention(AttentionBackend):
    """`AttentionBackend` for any device, dtype and page size that torch supports.

    Scratch memory (the gathered keys and values of one tile) grows to what a step needs and stays.
    """

    name = f"torch {torch.__version__}"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        limits = _CPU_LIMITS if self.device.type == "cpu" else _GPU_LIMITS
        self._block, self._narrow_bytes = limits
        self._causal: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        assert fixed is None, "launches of plain torch depend on the batch"
        given = [send(array, self.device, torch.int64) for array in arrays]
        return TorchPlan(self, given, batch)

    def tiles(
        self, batch: PagedBatch, reach: int, dtype: torch.dtype, key_width: int, both_ways: bool
    ) -> list[_Tile]:
        """The tiles of a step for layers that see `reach` keys of `key_width` numbers each."""
        ahead = batch.ahead if both_ways else None
        spans = list(_spans(batch, self._block, reach, ahead))
        groups = [[span] for span in spans if span.queries > 1]
        narrow = [span for span in spans if span.queries == 1]
        groups += _similar(narrow, self._narrow_bytes // (key_width * dtype.itemsize))
        return [self._tile(batch, group, reach, dtype) for group in groups]

    def gather(
        self, name: str, tile: _Tile, pages: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[spans, kv_heads, keys, head_dim] of the tile, a view of scratch memory or decoded."""
        _, page_size, heads, dim = pages.shape  # the last as it is stored
        num_pages = tile.pages.numel()
        size = num_pages * page_size * heads * dim
        scratch = self._scratch.get((name, pages.dtype))
        if scratch is None or scratch.numel() < size:
            scratch = pages.new_empty(size)
            self._scratch[name, pages.dtype] = scratch
        flat = scratch[:size].view(num_pages, -1)
        torch.index_select(pages.flatten(1), 0, tile.pages, out=flat)
        if tile.unwritten is not None:  # masked scores do not help against NaN: 0 * NaN is NaN
            flat.view(-1, heads * dim).index_fill_(0, tile.unwritten, 0)
        found = flat.view(tile.spans, -1, heads, dim)[:, : tile.keys]
        return decode(found, dtype).transpose(1, 2)

    def _tile(self, batch: PagedBatch, spans: list[_Span], reach: int, dtype: torch.dtype) -> _Tile:
        page_size = batch.page_size
        queries, keys = spans[0].queries, max(span.keys for span in spans)
        lens = np.array([[span.keys] for span in spans])
        column = np.arange(-(-keys // page_size))
        column = np.where(column * page_size < lens, column, 0)  # [spans, pages_per_span]
        pages = batch.kv_indices[np.array([[span.page] for span in spans]) + column]
        position = (column[:, :, None] * page_size + np.arange(page_size)).reshape(len(spans), -1)
        unwritten = (position >= lens) & (np.arange(position.shape[1]) < keys)
        rows: torch.Tensor | slice
        mask: torch.Tensor | None
        if queries > 1:
            rows = slice(spans[0].row, spans[0].row + queries)
            mask = self._causal_mask(queries, keys, reach, dtype)
            if (ahead := spans[0].ahead) is not None:
                own = spans[0].own + np.arange(queries)[:, None]
                hidden = (np.arange(keys) > own + ahead[:, None]) | (np.arange(keys) <= own - reach)
                mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
                mask.masked_fill_(send(hidden, self.device), -torch.inf)
        else:
            numbers = np.array([span.row for span in spans])
            if (np.diff(numbers) == 1).all():
                rows = slice(spans[0].row, spans[0].row + len(spans))
            else:
                rows = send(numbers, self.device)
            own = np.array([[span.own] for span in spans])
            hidden = (np.arange(keys) >= lens) | (np.arange(keys) <= own - reach)
            mask = None
            if hidden.any():
                mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
                mask = mask.masked_fill_(send(hidden, self.device), -torch.inf)[:, None, None]
        return _Tile(
            rows=rows,
            spans=len(spans),
            queries=queries,
            keys=keys,
            pages=send(pages.ravel(), self.device, torch.int64),
            unwritten=send(np.flatnonzero(unwritten), self.device) if unwritten.any() else None,
            mask=mask,
        )

    def _causal_mask(self, queries: int, keys: int, reach: int, dtype: torch.dtype) -> torch.Tensor:
        """[queries, keys]: each row sees `reach` keys up to its own; the last row owns the last."""
        window = reach if reach < keys else None  # what hides nothing shares one matrix
        causal = self._causal.get((window, dtype))
        if causal is None or causal.shape[1] < keys:
            shape = (self._block, 1 << (keys - 1).bit_length())  # doubling: rebuilt seldom
            hidden = torch.full(shape, -torch.inf, dtype=dtype, device=self.device)
            own = shape[1] - shape[0]  # the diagonal on which a row meets its own key
            causal = hidden.triu(own + 1)
            if window is not None:
                causal += hidden.tril_(own - window)
            self._causal[window, dtype] = causal
        mask = causal[-queries:, -keys:]
        # It starts anywhere in a row, but the kernels of a GPU read 16 bytes at a time.
        return mask if self.device.type == "cpu" else mask.contiguous()


class TorchPlan(AttentionPlan):
    """A planned batch; the first layer of each shape cuts its tiles."""

    def __init__(
        self, backend: TorchAttention, arrays: list[torch.Tensor], batch: PagedBatch
    ) -> None:
        self.arrays, self._backend, self._batch = arrays, backend, batch
        self._longest = int(batch.kv_lens.max(initial=1))
        slots = send(batch.slots(), backend.device)
        self._places = slots // batch.page_size, slots % batch.page_size
        self._tiles: dict[tuple[int, torch.dtype, int, bool], list[_Tile]] = {}

    def run(self, inputs: LayerInputs) -> torch.Tensor:
        query, key, value, pages, layer, *_ = inputs
        if not inputs.written:
            key, value = isolate(key, value, pages.k.dtype, mla=layer.mla)
            for side, new in zip(pages, (key, value), strict=True):
                side[self._places] = encode(new, side.dtype)
        out = query.new_empty((*query.shape[:2], layer.out_dim))
        reach = min(layer.window or self._longest, self._longest)  # longest: sees everything
        kind = reach, query.dtype, layer.kv_heads * layer.head_dim, layer.both_ways
        if kind not in self._tiles:
            self._tiles[kind] = self._backend.tiles(self._batch, *kind)
        for tile in self._tiles[kind]:
            rows = query[tile.rows].unflatten(1, (layer.kv_heads, -1))  # [rows, Hkv, group, D]
            result = self._attend(tile, rows, inputs)
            out[tile.rows] = result[..., : layer.out_dim].flatten(1, 2)
        return out

    def _attend(self, tile: _Tile, rows: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """Attention of the rows [rows, kv_heads, group, dim], in that shape.

        For MLA, the first numbers of each result are the values: values as wide as the keys need
        no copy, and torch has a kernel for them.
        """
        gather, pages, layer = self._backend.gather, inputs.pages, inputs.layer
        keys = gather("key", tile, pages.k, rows.dtype)
        values = gather("value", tile, pages.v, rows.dtype)
        if layer.mla:
            keys = values = torch.cat([keys, values], dim=-1)
        mask, group, sinks = tile.mask, rows.shape[2], inputs.sinks
        # torch adds masks to scores, and takes a row of NaN for one that sees no key.
        explicit = layer.softcap is not None or sinks is not None or keys[..., -1].isnan().any()
        if sinks is not None:
            sinks = sinks.float().unflatten(0, (-1, group))
            sinks = sinks.T[:, :, None] if tile.queries > 1 else sinks
        if tile.queries > 1:  # [group, Hkv, queries, D]: the keys are shared, not copied
            rows = rows.permute(2, 1, 0, 3)
            keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        elif mask is not None:
            mask = mask.expand(-1, -1, group, -1)
        if not explicit:
            with _no_cudnn(rows.device):
                result = scaled_dot_product_attention(rows, keys, values, mask, scale=layer.scale)
        else:
            result = _explicit_attention(
                rows, keys, values, mask, layer.scale, layer.softcap, sinks
            )
        return result.permute(2, 1, 0, 3) if tile.queries > 1 else result


def _no_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Excludes cuDNN's kernel, which makes a new plan for every shape."""
    if device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _spans(
    batch: PagedBatch, block: int, reach: int, ahead: NDArray[np.int32] | None = None
) -> Iterator[_Span]:
    """Cut every sequence's new tokens into spans of at most `block` rows that see `reach` keys, and
    so many `ahead`.

    The cuts are at multiples of `block` from the sequence's start, wherever the new tokens begin.
    """
    size = batch.page_size
    sequences = zip(batch.qo_indptr, batch.query_lens, batch.kv_indptr, batch.kv_lens, strict=False)
    for sequence in sequences:
        row, queries, page, length = map(int, sequence)
        start = length - queries
        row -= start
        while start < length:
            end = min(length, (start // block + 1) * block)
            skipped = max(0, start + 1 - reach) // size  # pages that no query of the span sees
            first, seen = skipped * size, end
            rows = None if ahead is None else ahead[row + start : row + end]
            if rows is not None:
                seen = int((np.arange(start, end) + rows).max()) + 1
            yield _Span(
                *(row + start, end - start, page + skipped, seen - first, start - first), rows
            )
            start = end


def _similar(spans: list[_Span], limit: int) -> list[list[_Span]]:
    """Group spans so that padding at most doubles them and no group exceeds `limit` keys."""
    groups: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: span.keys):
        last = groups[-1] if groups else []
        if last and span.keys <= 2 * last[0].keys + 64 and (len(last) + 1) * span.keys <= limit:
            last.append(span)
        else:
            groups.append([span])
    return groups


def _explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Scaled-dot-product attention with tanh-capped scores, sinks, and masked keys of NaN, which
    torch's lacks; sinks broadcast to the rows. Computed in float32."""
    scores = torch.matmul(query.float() * (scale / (softcap or 1)), key.float().transpose(-1, -2))
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.masked_fill_(mask < 0, -torch.inf)  # a sum would keep a NaN
    result = torch.matmul(scores.softmax(-1), value.float())
    if sinks is not None:
        result *= (scores.logsumexp(-1) - sinks).sigmoid()[..., None]
    return result.to(query.dtype)
