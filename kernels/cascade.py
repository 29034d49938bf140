"""Finds the page prefixes that sequences of a step have in common.

Attention over KV that many queries share is bound by reading it, so it pays to read it once for all
of them (Hydragen; FlashInfer's cascade inference). A cascade of two levels partitions the sequences
into groups with one prefix of pages each: all sequences on one system prompt, or two groups on two
documents below it, whichever saves more reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache.kernels.attention import PagedBatch, SharedPrefix

MIN_ROWS = 4
"""The fewest sequences in a group, for buffers of a fixed size; fewer never paid."""

MIN_SAVED = 230_000_000
"""The fewest bytes of a layer that a second level must save. It costs 10 to 15 us a layer, and the
L2 cache holds a part of what many read (H100; 8 KV heads and 1, 4 to 64 rows, 256 to 8,192 tokens:
from here on two levels were as fast as one or faster, below slower)."""


def group_by_prefix(
    tables: Sequence[NDArray[np.int32]], min_saved: int, min_rows: int = MIN_ROWS
) -> tuple[list[int], tuple[SharedPrefix, ...]]:
    """Group whole branches of the sequences' prefix tree so that the fewest pages are read.

    Args:
        tables: page numbers of each sequence. The last page of each is its own: it is written to.
        min_saved: the fewest page reads that all groups together must save; else none is formed.
        min_rows: the fewest sequences in a group.

    Returns:
        The order in which the sequences must stand in a batch, groups first, and the groups.

    Runtime complexity: O(shared pages), a vectorised comparison per sequence and level.
    """
    candidates: dict[int, list[int]] = {}
    if sum(map(len, tables)) >= min_saved:
        for row, table in enumerate(tables):
            candidates.setdefault(int(table[0]), []).append(row)
    found = [_best(tables, rows, 0, min_rows) for rows in candidates.values()]
    groups = [group for _, groups in found for group in groups]
    if not groups or sum(saved for saved, _ in found) < min_saved:
        return list(range(len(tables))), ()
    order: list[int] = []
    shared = []
    for rows, num_pages in groups:
        shared.append(SharedPrefix(len(order), len(rows), num_pages))
        order += rows
    grouped = set(order)
    order += [row for row in range(len(tables)) if row not in grouped]
    return order, tuple(shared)


_Groups = list[tuple[list[int], int]]


def _best(
    tables: Sequence[NDArray[np.int32]], rows: list[int], depth: int, min_rows: int
) -> tuple[int, _Groups]:
    """Pages saved and groups, for rows that share their first `depth` pages."""
    if len(rows) < min_rows:
        return 0, []
    first, common = tables[rows[0]], min(len(tables[row]) for row in rows) - 1
    for row in rows[1:]:
        differs = first[depth:common] != tables[row][depth:common]
        if differs.any():
            common = depth + int(differs.argmax())
    children: dict[int, list[int]] = {}
    for row in rows:
        if common < len(tables[row]) - 1:
            children.setdefault(int(tables[row][common]), []).append(row)
    saved, groups = 0, []
    for child in children.values():
        if len(child) < len(rows):
            more, below = _best(tables, child, common, min_rows)
            saved += more
            groups += below
    together = (len(rows) - 1) * common
    return (together, [(rows, common)]) if together > saved else (saved, groups)


class Levels(NamedTuple):
    """A batch whose shared prefixes are attended once for each group.

    Attributes:
        own: the batch without the pages that its groups share.
        shared: one "sequence" for each group: its queries, the pages that all of them see whole.
        in_group: [num_decodes] 1 for decodes in a group. The results of the others over `shared`
            are arbitrary and must not be merged.
    """

    own: PagedBatch
    shared: PagedBatch
    in_group: NDArray[np.int32]


def split_levels(batch: PagedBatch, num_groups: int | None = None) -> Levels:
    """The two levels of a batch with `shared` groups among its decodes.

    Args:
        num_groups: pad with empty groups up to this many, for launches of a fixed shape. Rows
            between or after groups count as a group.
    """
    num_decodes, tables = batch.num_decodes, batch.kv_indices
    kept = np.ones(len(tables), dtype=bool)
    skipped = np.zeros(len(batch.query_lens), dtype=np.int32)
    in_group = np.zeros(num_decodes, dtype=np.int32)
    counts: list[int] = []
    pages: list[NDArray[np.int32]] = []
    full: list[bool] = []

    def add(first: int, end: int, num_pages: int) -> None:
        if first < end:
            counts.append(end - first)
            pages.append(tables[batch.kv_indptr[first] :][: max(num_pages, 1)])
            full.append(num_pages > 0)

    end = 0
    for first, size, num_pages in batch.shared:
        add(end, first, 0)
        end = first + size
        add(first, end, num_pages)
        in_group[first:end], skipped[first:end] = 1, num_pages
        for start in batch.kv_indptr[first:end]:
            kept[start : start + num_pages] = False
    add(end, num_decodes, 0)
    if num_groups is not None and len(counts) > num_groups:
        raise ValueError(f"{len(counts)} groups and gaps between them, more than {num_groups}")
    for _ in range(len(counts), num_groups or 0):
        counts.append(0)
        pages.append(tables[:1])
        full.append(False)
    own = PagedBatch(
        qo_indptr=batch.qo_indptr,
        kv_indptr=batch.kv_indptr - np.cumsum([0, *skipped], dtype=np.int32),
        kv_indices=tables[kept],
        kv_last_page_len=batch.kv_last_page_len,
        page_size=batch.page_size,
        write_indices=None if batch.write_indices is None else batch.write_indices[kept],
    )
    shared = PagedBatch(
        qo_indptr=np.cumsum([0, *counts], dtype=np.int32),
        kv_indptr=np.cumsum([0, *map(len, pages)], dtype=np.int32),
        kv_indices=np.concatenate(pages),
        kv_last_page_len=np.where(full, batch.page_size, 1).astype(np.int32),
        page_size=batch.page_size,
    )
    return Levels(own, shared, in_group)
