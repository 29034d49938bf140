"""Rules for which KV of sliding-window layers to keep: all of it, ours, vLLM's or SGLang's.

All rules get the same bytes. Ours is the runtime's own `WindowPlanner`. vLLM's and SGLang's are
simplified from sources (November 2026); they are not those systems, and none of their code.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixcache import HashBlockCache, PagePool, PrefixCache, RadixCache
from radixcache.bench.schemes.states import TemplatePlanner
from radixcache.bench.workloads.workload import Workload
from radixcache.hash_block.free_queue import FreeQueue
from radixcache.lease import NO_PAGES, Lease
from radixcache.pages import Pages
from radixcache.runtime.engine.scheduling.saved_state_planner import NO_SAVED_STATES, Planner
from radixcache.runtime.engine.scheduling.window_planner import WindowPlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.states.left_pages import LeftPages
from radixcache.states.saved import Kind, SavedState
from radixcache.states.windows import Window, WindowIndex, window_page_size
from radixcache.tokens import Tokens


class WindowedModel(NamedTuple):
    """Bytes of a token's KV in the full and in the windowed layers, the window, and how many layers
    have it."""

    full: int
    windowed: int
    window: int
    layers: int

    def pages(self, num_tokens: int, page_size: int) -> tuple[int, int]:
        """The number of pages with the bytes of `num_tokens` tokens in all layers, and the tokens
        per page of the windowed layers."""
        size = window_page_size(page_size, self.full, self.windowed)
        page_bytes = max(page_size * self.full, size * self.windowed)
        return num_tokens * (self.full + self.windowed) // page_bytes, size


MODELS = {
    "gemma-3-27b": WindowedModel(81_920, 425_984, 1024, 52),
    "gemma-4-31b": WindowedModel(81_920, 819_200, 1024, 50),
    "gpt-oss-20b": WindowedModel(24_576, 24_576, 128, 12),
    "olmo-3-32b": WindowedModel(65_536, 196_608, 4096, 48),
}
"""Sizes in bfloat16, by the published configs."""


class TemplateWindows(TemplatePlanner[Window], WindowPlanner):
    """Our rule for windows, told of templates."""


class LeastRecentWindows(WindowIndex):
    """Finds only what is kept on purpose, and evicts the saved state that was least recently made
    or resumed from."""

    def _find_left(self, tokens: Tokens, namespace: Hashable, limit: int) -> tuple[int, Window]:
        return 0, Window(0, NO_PAGES)

    def compute(self, lease: Lease, num_tokens: int) -> None:
        pass

    def _victim(self, pinned: bool = True) -> SavedState[Window] | None:
        return next(iter(self._kept.values()), None)

    def _rare_kinds(self) -> set[Kind]:
        return set()


class LastBlocksPlanner(WindowPlanner):
    """vLLM with a retention of 0 (its pull request 52216): keeps windows in whole blocks before a
    prompt's last token and where a second prompt diverges, none at the end of an answer."""

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        block, last = self.index.granularity, len(request.prompt_token_ids) - 1
        return {last // block * block: "prompt", match: "branch"}

    def leave(self, sequence: Sequence) -> None:
        pass


class QueuedPages(LeftPages):
    """Pages of windows stand in one queue with the blocks of full layers, by the time of their last
    use."""

    _blank: FreeQueue

    def take(self, count: int) -> Pages:
        pages = self._blank.take(count)
        self._note_taken(pages)
        return pages

    def put(self, pages: Pages) -> None:
        ranks = self._ranks[pages]
        self._blank.put(pages[ranks == 0])
        self._blank.append(pages[ranks > 0].tolist())

    def take_back(self, pages: Pages) -> None:
        self._blank.note_held(len(pages))
        self._blank.remove(pages.tolist())
        self._pool.refs[pages] = 1

    def check(self, held: NDArray[np.bool_]) -> None:
        queued = np.isin(np.arange(len(held)), self._blank.to_array())
        assert (held | queued)[self.entries()[2]].all(), "a page was found that is gone"


class DenseWindows(WindowIndex):
    def clear(self) -> None:
        super().clear()
        self.left = QueuedPages(self._pool, self.page_size)


class DensePlanner(WindowPlanner):
    """vLLM with `prefix_cache_retention_interval` unset: all blocks of windows stay until their
    memory is used anew, and nothing is kept on purpose."""

    def _marks(self, request: Request, match: int, depth: int) -> dict[int, Kind]:
        return {}

    def find(self, sequence: Sequence, lease: Lease) -> None:
        super().find(sequence, lease)
        self._plans[sequence].marks.clear()

    def leave(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.index.enter(sequence.lease, sequence.num_computed)


class TwoPoolsPlanner(Planner):
    """SGLang's two pools: that of windows has room for 0.8 times the tokens of the other.

    The windowed KV of all tokens of a prompt is kept, and of the last window of an answer. The
    least recently used goes first, and of what was used together the first tokens (its pull request
    26907); a hit needs a whole window. Not modelled: tokens go one by one here, there node by node.

    Args:
        cache: a radix tree with pages of one token.
        capacity: tokens that the windows' pool has room for.
    """

    RATIO = 0.8

    def __init__(self, cache: RadixCache, window: int, capacity: int) -> None:
        self._pool, self._window, self._capacity, self._clock = cache.pool, window, capacity, 0
        self._last_use = np.zeros(cache.pool.num_pages, np.int64)
        """When the windowed KV of each page's token was last used; 0: it is not kept."""

    def find(self, sequence: Sequence, lease: Lease) -> None:
        self._last_use[self._pool.refs == 0] = 0
        match, table = lease.cached_tokens, lease.page_table
        places = np.arange(match)
        gap = np.maximum.accumulate(np.where(self._last_use[table[:match]] > 0, -1, places))
        ends = np.flatnonzero((gap < 0) | (places - gap >= self._window))
        lease.cached_tokens = int(ends[-1]) + 1 if len(ends) else 0
        if sequence.is_fresh:
            sequence.num_recomputed = match - lease.cached_tokens
        self._use(table[max(0, lease.cached_tokens - self._window) : lease.cached_tokens])

    def _use(self, tokens: Pages) -> None:
        self._clock += 1
        self._last_use[tokens] = self._clock

    def plan(self, sequence: Sequence, start: int, end: int) -> None:
        assert sequence.lease is not None
        self._use(sequence.lease.page_table[start:end])

    def leave(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        said = sequence.lease.page_table[: sequence.num_computed - self._window]
        self._last_use[said[len(sequence.request.prompt_token_ids) :]] = 0

    def commit(self) -> None:
        kept = np.flatnonzero(self._last_use)
        if (excess := len(kept) - self._capacity) > 0:
            order = np.argsort(self._last_use[kept], kind="stable")
            self._last_use[kept[order[:excess]]] = 0


ALL_KEPT = "all-kept"
WINDOW_RULES = (ALL_KEPT, "ours", "ours-untold", "vllm", "vllm-dense", "sglang")


def make_windowed(
    rule: str, model: WindowedModel, num_tokens: int, page_size: int, workload: Workload
) -> tuple[PrefixCache, Planner]:
    """An empty cache with the bytes of `num_tokens` tokens in all layers, and its planner."""
    if rule == ALL_KEPT:
        return RadixCache(PagePool(num_tokens // page_size, page_size)), NO_SAVED_STATES
    if rule == "sglang":
        ratio = TwoPoolsPlanner.RATIO
        room = num_tokens * (model.full + model.windowed) / (model.full + ratio * model.windowed)
        tree = RadixCache(PagePool(int(room), 1))
        return tree, TwoPoolsPlanner(tree, model.window, int(ratio * room))
    count, size = model.pages(num_tokens, page_size)
    pool = PagePool(count, page_size)
    if rule == "vllm":
        blocks = HashBlockCache(pool)
        return blocks, LastBlocksPlanner(LeastRecentWindows(blocks, model.window, size))
    if rule == "vllm-dense":
        blocks = HashBlockCache(pool)
        return blocks, DensePlanner(DenseWindows(blocks, model.window, size))
    cache = RadixCache(pool)
    index = WindowIndex(cache, model.window, size, model.layers)
    planner = TemplateWindows(index, workload.templates())
    return cache, planner if rule == "ours" else WindowPlanner(index)
