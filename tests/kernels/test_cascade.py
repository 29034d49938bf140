"""The cascade's groups against every choice of branches, and its two levels against the tables."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import pytest

from radixcache.kernels.attention import PagedBatch, SharedPrefix
from radixcache.kernels.cascade import group_by_prefix, split_levels
from tests.kernels.reference import make_batch


def random_tables(rng: np.random.Generator, rows: int) -> list[list[int]]:
    """Page tables of sequences that branch off from each other here and there."""
    tables: list[list[int]] = []
    fresh = iter(rng.permutation(1000).tolist())
    for _ in range(rows):
        kept = 0
        if tables and rng.random() < 0.8:
            parent = tables[rng.integers(len(tables))]
            kept = int(rng.integers(0, len(parent) + 1))
            stem = parent[:kept]
        else:
            stem = []
        tables.append(stem + [next(fresh) for _ in range(int(rng.integers(1, 6)))])
    return tables


def partitions(tables: list[list[int]]) -> Iterator[list[list[int]]]:
    """All ways to pick branches of the prefix tree, each with all its rows, that do not overlap."""
    prefixes = {tuple(table[:n]) for table in tables for n in range(1, len(table))}
    branches = {
        tuple(row for row, table in enumerate(tables) if tuple(table[:-1][: len(p)]) == p)
        for p in prefixes
    }

    def pick(left: list[tuple[int, ...]]) -> Iterator[list[list[int]]]:
        if not left:
            yield []
            return
        first, *others = left
        yield from pick(others)
        for more in pick([branch for branch in others if not set(branch) & set(first)]):
            yield [list(first), *more]

    yield from pick([branch for branch in branches if len(branch) > 1])


def common_pages(tables: list[list[int]], rows: list[int]) -> int:
    """Leading pages that the rows have in common, none of them anybody's last."""
    columns = zip(*(tables[row][:-1] for row in rows), strict=False)
    return len(list(takewhile(lambda pages: len(set(pages)) == 1, columns)))


def saved(tables: list[list[int]], groups: list[list[int]], min_rows: int) -> int:
    total = 0
    for rows in groups:
        if len(rows) >= min_rows:
            total += (len(rows) - 1) * common_pages(tables, rows)
    return total


@pytest.mark.parametrize(("min_rows", "min_saved"), [(2, 1), (3, 1), (2, 5), (4, 9)])
@pytest.mark.parametrize("seed", range(30))
def test_no_other_branches_save_more_than_the_groups(seed, min_rows, min_saved) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, int(rng.integers(1, 8)))
    arrays = [np.array(table, np.int32) for table in tables]
    order, shared = group_by_prefix(arrays, min_saved, min_rows)
    assert sorted(order) == list(range(len(tables)))
    groups = [order[first : first + size] for first, size, _ in shared]
    for rows, group in zip(groups, shared, strict=True):
        assert len(rows) >= min_rows
        assert group.num_pages == common_pages(tables, rows)
    assert [group.first for group in shared] == list(
        np.cumsum([0, *(group.size for group in shared)])[: len(shared)]
    )
    best = max(saved(tables, groups, min_rows) for groups in partitions(tables))
    assert saved(tables, groups, min_rows) == (best if best >= min_saved else 0)


def test_what_saves_little_and_small_groups_are_left_alone() -> None:
    tables = [np.array([*range(64), 100 + i], np.int32) for i in range(8)]
    assert group_by_prefix(tables, 7 * 64)[1] == (SharedPrefix(0, 8, 64),)
    assert group_by_prefix(tables, 7 * 64 + 1) == (list(range(8)), ())
    assert group_by_prefix(tables[:3], 1)[1] == ()
    others = [table + 1000 for table in tables]
    _, both = group_by_prefix(tables + others, 14 * 64)
    assert both == (SharedPrefix(0, 8, 64), SharedPrefix(8, 8, 64)), "together they save as much"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("padded", [False, True])
def test_the_levels_together_hold_each_page_of_each_sequence_once(seed, padded) -> None:
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, int(rng.integers(2, 9)))
    arrays = [np.array(table, np.int32) for table in tables]
    order, shared = group_by_prefix(arrays, 1, 2)
    tables = [tables[row] for row in order]
    lens = [4 * len(table) - int(rng.integers(0, 4)) for table in tables]
    decodes = len(tables)
    prefill = list(range(2000, 2005))
    batch = make_batch([*tables, prefill], [1] * decodes + [7], [*lens, 18], 4)
    batch = PagedBatch(
        batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len, 4, shared
    )
    levels = split_levels(batch, 9 if padded else None)
    own, level = levels.own, levels.shared
    assert own.qo_indptr.tolist() == batch.qo_indptr.tolist()
    assert own.kv_last_page_len.tolist() == batch.kv_last_page_len.tolist()
    assert level.qo_indptr[-1] == decodes and len(level.query_lens) == (
        9 if padded else len(level.query_lens)
    )
    grouped = {r for first, size, _ in shared for r in range(first, first + size)}
    assert np.flatnonzero(levels.in_group).tolist() == sorted(grouped)
    for row, table in enumerate([*tables, prefill]):
        mine = own.kv_indices[own.kv_indptr[row] : own.kv_indptr[row + 1]].tolist()
        above: list[int] = []
        if row in grouped:
            group = int(np.searchsorted(level.qo_indptr, row, side="right")) - 1
            above = level.kv_indices[level.kv_indptr[group] : level.kv_indptr[group + 1]].tolist()
            assert level.kv_last_page_len[group] == 4
        assert above + mine == table
    assert (np.diff(level.kv_indptr) > 0).all() and (level.kv_lens > 0).all()


def test_more_groups_than_a_fixed_launch_has_are_refused() -> None:
    batch = make_batch([[0, 1], [0, 2], [3], [4, 5], [4, 6]], [1] * 5, [5, 6, 2, 8, 8], 4)
    batch = PagedBatch(
        batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len, 4,
        (SharedPrefix(0, 2, 1), SharedPrefix(3, 2, 1)),
    )  # fmt: skip
    assert len(split_levels(batch, 3).shared.query_lens) == 3
    with pytest.raises(ValueError, match="more than 2"):
        split_levels(batch, 2)
