"""Attention over pages in plain torch: the CPU backend, and the reference for every other one.

A step is cut into tiles, each one gather and one scaled-dot-product call:

- a *wide* tile is up to 256 (on a GPU 2048) consecutive query rows of one sequence; it reads the
  keys up to its own last row only, so a long prefill never builds a quadratic mask;
- a *narrow* tile is the single query rows (decodes) of several sequences of similar length, their
  keys padded to the longest. The query heads that share a KV head become its query rows.

On a CPU, a long prefix that stands in consecutive pages is not gathered but read where it is, and
once for all decodes that share it, in a call of its own; the two results are merged by their
log-sum-exps (as in Hydragen and FlashInfer's cascade inference).

torch's `is_causal` is aligned at the top left, which is wrong for suffixes: masks are explicit.
What a row may see depends only on the distance from the last key, so one matrix, sliced from its
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

from radixcache.kernels.attention import AttentionBackend, PagedBatch
from radixcache.kernels.cascade import group_by_prefix
from radixcache.kernels.upload import send

# Query rows of a wide tile and bytes of keys in a narrow one: what stays in a CPU's cache
# (measured), or keeps a GPU busy (a guess).
_CPU_LIMITS = (256, 2 << 20)
_GPU_LIMITS = (2048, 256 << 20)

# Tokens that would else be copied, from which a prefix is read apart (measured): by all decodes
# that share it, and by a suffix or a lone decode.
_MIN_SHARED = 3072
_MIN_IN_PLACE = 1024


class _Prefix(NamedTuple):
    """Leading pages of a sequence that are read apart: whole, and seen by every query."""

    page: int  # first entry of kv_indices, of the first sequence that has it
    num_pages: int


_NO_PREFIX = _Prefix(0, 0)


class _Span(NamedTuple):
    """Consecutive query rows of one sequence and the keys that they can see."""

    row: int  # first row in the flat batch
    queries: int
    page: int  # first entry of kv_indices, after the prefix
    keys: int  # tokens from that page's first slot to the last query's own
    prefix: _Prefix


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
    prefix: slice | torch.Tensor | None  # its pages; a slice if they are consecutive


class TorchBackend(AttentionBackend):
    """`AttentionBackend` for any device, dtype and page size that torch supports.

    Scratch memory (the gathered keys and values of one tile) grows to what a step needs and stays.
    """

    name = f"torch {torch.__version__}"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        limits = _CPU_LIMITS if self.device.type == "cpu" else _GPU_LIMITS
        self._block, self._narrow_bytes = limits
        self._batch: PagedBatch | None = None
        self._longest = 0
        self._slots = torch.empty(0, dtype=torch.int64)
        self._tiles: dict[tuple[int, torch.dtype, int, bool], list[_Tile]] = {}
        self._causal: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def plan(self, batch: PagedBatch, *arrays: NDArray[np.integer]) -> list[torch.Tensor]:
        if (batch.query_lens > batch.kv_lens).any():
            raise ValueError("a sequence has more new tokens than its pages hold")
        self._batch = batch
        self._longest = int(batch.kv_lens.max(initial=1))
        self._slots = send(batch.slots(), self.device)
        self._tiles.clear()  # built by the first layer that needs them
        return [send(array, self.device, torch.int64) for array in arrays]

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
    ) -> torch.Tensor:
        if self._batch is None:
            raise RuntimeError("run() before plan()")
        k_pages.flatten(0, 1).index_copy_(0, self._slots, key)
        v_pages.flatten(0, 1).index_copy_(0, self._slots, value)
        kv_heads, dim = key.shape[1:]
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        # Only this kernel tells the log-sum-exps by which two results can be merged.
        merges = self.device.type == "cpu" and softcap is None and dim == value.shape[2]
        key_bytes = kv_heads * dim * key.element_size()
        for tile in self._plan_tiles(self._batch, window, query.dtype, key_bytes, merges):
            rows = query[tile.rows].unflatten(1, (kv_heads, -1))  # [rows, Hkv, group, D]
            result, weight = self._attend(tile, rows, k_pages, v_pages, scale, softcap)
            if weight is not None:
                pages = k_pages[tile.prefix], v_pages[tile.prefix]
                over_prefix, more = _attention_over_pages(rows, *pages, scale)
                share = torch.sigmoid(more - weight).unsqueeze(-1)
                result = torch.lerp(result, over_prefix, share.to(result.dtype))
            out[tile.rows] = result.flatten(1, 2)
        return out

    def _attend(
        self,
        tile: _Tile,
        rows: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the rows [rows, kv_heads, group, dim] but for the prefix, in that shape, and
        if there is a prefix, the log-sum-exps of the scores."""
        keys, values = self._gather("key", tile, k_pages), self._gather("value", tile, v_pages)
        mask, group, weight = tile.mask, rows.shape[2], None
        if tile.queries > 1:  # [group, Hkv, queries, D]: the keys are shared, not copied
            rows = rows.permute(2, 1, 0, 3)
            keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        elif mask is not None:
            mask = mask.expand(-1, -1, group, -1)
        if tile.prefix is not None:
            result, weight = _weighted_attention(rows, keys, values, mask, scale)
        elif softcap is None:
            with _no_cudnn(self.device):
                result = scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
        else:
            result = _softcapped_attention(rows, keys, values, mask, scale, softcap)
        if tile.queries > 1:
            result = result.permute(2, 1, 0, 3)
            weight = None if weight is None else weight.permute(2, 1, 0)
        return result, weight

    def _gather(self, name: str, tile: _Tile, pages: torch.Tensor) -> torch.Tensor:
        """[spans, kv_heads, keys, head_dim] of the tile, a view of scratch memory."""
        _, page_size, heads, dim = pages.shape
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
        return flat.view(tile.spans, -1, heads, dim)[:, : tile.keys].transpose(1, 2)

    def _plan_tiles(
        self,
        batch: PagedBatch,
        window: int | None,
        dtype: torch.dtype,
        key_bytes: int,
        merges: bool,
    ) -> list[_Tile]:
        """The step's tiles for layers of this window, dtype and size of a token's keys.

        Args:
            merges: whether prefixes may be read apart.
        """
        longest = self._longest
        reach = longest if window is None else min(window, longest)  # longest: sees everything
        key = (reach, dtype, key_bytes, merges)
        tiles = self._tiles.get(key)
        if tiles is None:
            most = self._narrow_bytes // key_bytes
            prefixes = _prefixes(batch, most // 2) if merges and reach == longest else {}
            spans = list(_spans(batch, self._block, reach, prefixes))
            groups = [[span] for span in spans if span.queries > 1]
            narrow = [span for span in spans if span.queries == 1]
            for prefix in dict.fromkeys(span.prefix for span in narrow):
                groups += _similar([span for span in narrow if span.prefix == prefix], most)
            tiles = [self._tile(batch, group, reach, dtype) for group in groups]
            self._tiles[key] = tiles
        return tiles

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
        else:
            numbers = np.array([span.row for span in spans])
            if (np.diff(numbers) == 1).all():
                rows = slice(spans[0].row, spans[0].row + len(spans))
            else:
                rows = send(numbers, self.device)
            hidden = (np.arange(keys) >= lens) | (np.arange(keys) < lens - reach)
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
            prefix=self._prefix_pages(batch, spans[0].prefix),
        )

    def _prefix_pages(self, batch: PagedBatch, prefix: _Prefix) -> slice | torch.Tensor | None:
        if not prefix.num_pages:
            return None
        pages = batch.kv_indices[prefix.page : prefix.page + prefix.num_pages]
        first, last = int(pages[0]), int(pages[-1])
        if last - first + 1 == len(pages) and (np.diff(pages) == 1).all():
            return slice(first, last + 1)
        return send(pages, self.device, torch.int64)

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


def _no_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Without cuDNN's kernel, which makes a plan of its own for every shape that it meets."""
    if device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _prefixes(batch: PagedBatch, min_alone: int) -> dict[int, _Prefix]:
    """What each sequence reads apart, by its number: pages that decodes share, or else consecutive
    ones, which need no copy.

    Args:
        min_alone: tokens from which one of several decodes has a tile for itself anyway.
    """
    size, starts, counts = batch.page_size, batch.kv_indptr, np.diff(batch.kv_indptr)
    prefixes: dict[int, _Prefix] = {}
    tables = [batch.kv_indices[starts[i] : starts[i + 1]] for i in range(batch.num_decodes)]
    order, groups = group_by_prefix(tables, size, 2, _MIN_SHARED // max(len(tables), 2))
    for first, members, num_pages in groups:
        if members * num_pages * size >= _MIN_SHARED:
            rows = order[first : first + members]
            prefixes.update(dict.fromkeys(rows, _Prefix(int(starts[rows[0]]), num_pages)))
    jumps = np.append(np.flatnonzero(np.diff(batch.kv_indices) != 1) + 1, starts[-1])
    runs = np.minimum(jumps[np.searchsorted(jumps, starts[:-1], "right")] - starts[:-1], counts)
    in_company = (batch.query_lens == 1) & (batch.num_decodes > 1)
    least = np.where(in_company, min_alone, _MIN_IN_PLACE)
    for i in np.flatnonzero(runs * size >= least).tolist():
        prefixes.setdefault(i, _Prefix(int(starts[i]), int(runs[i])))
    return prefixes


def _spans(
    batch: PagedBatch, block: int, reach: int, prefixes: dict[int, _Prefix]
) -> Iterator[_Span]:
    """Cut every sequence's new tokens into spans of at most `block` rows that see `reach` keys.

    The cuts are at multiples of `block` from the sequence's start, wherever the new tokens begin.
    """
    size = batch.page_size
    sequences = zip(batch.qo_indptr, batch.query_lens, batch.kv_indptr, batch.kv_lens, strict=False)
    for i, sequence in enumerate(sequences):
        row, queries, page, length = map(int, sequence)
        start = length - queries
        row -= start
        whole = prefixes.get(i, _NO_PREFIX)
        while start < length:
            end = min(length, (start // block + 1) * block)
            prefix = whole._replace(num_pages=min(whole.num_pages, start // size))
            if not prefix.num_pages:
                prefix = _NO_PREFIX
            # Pages read apart, or that no query of the span sees.
            skipped = prefix.num_pages or max(0, start + 1 - reach) // size
            yield _Span(row + start, end - start, page + skipped, end - skipped * size, prefix)
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


def _softcapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Scaled-dot-product attention with tanh-capped scores, computed in float32."""
    scores = torch.matmul(query.float() * (scale / softcap), key.float().transpose(-1, -2))
    scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), value.float()).to(query.dtype)


def _weighted_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled-dot-product attention on a CPU, and the log-sum-exps [..., queries] of the scores."""
    out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scale
    )
    return out, weight


def _attention_over_pages(
    rows: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row [rows, kv_heads, group, dim] over all slots of the pages, in that shape, and the
    log-sum-exps of the scores."""
    shape = (len(rows), rows.shape[2])
    query = rows.transpose(0, 1).flatten(1, 2)[None]
    keys, values = (pages.flatten(0, 1).transpose(0, 1)[None] for pages in (k_pages, v_pages))
    out, weight = (
        t[0].unflatten(1, shape).transpose(0, 1)
        for t in _weighted_attention(query, keys, values, None, scale)
    )
    return out, weight
