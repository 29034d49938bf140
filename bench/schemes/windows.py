"""Rules for which KV of sliding-window layers to keep: all of it, ours, or vLLM's.

All rules get the same bytes. Ours is the runtime's own `WindowPlanner`. vLLM's is simplified from
its sources (November 2026); it is not that system, and none of its code. SGLang's two pools of a
fixed share are not simulated.
"""

from __future__ import annotations

from typing import NamedTuple

from radixcache import HashBlockCache, PagePool, PrefixCache, RadixCache
from radixcache.bench.schemes.states import TemplatePlanner
from radixcache.bench.workloads.workload import Workload
from radixcache.checkpoints import Checkpoint, Kind
from radixcache.runtime.engine.checkpoint_planner import NO_CHECKPOINTS, Planner
from radixcache.runtime.engine.window_planner import WindowPlanner
from radixcache.runtime.request import Request, Sequence
from radixcache.windows import Window, WindowIndex, window_page_size


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
    """Evicts the checkpoint that was least recently made or resumed from."""

    def _victim(self, pinned: bool = True) -> Checkpoint[Window] | None:
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


ALL_KEPT = "all-kept"
WINDOW_RULES = (ALL_KEPT, "ours", "ours-untold", "vllm")


def make_windowed(
    rule: str, model: WindowedModel, num_tokens: int, page_size: int, workload: Workload
) -> tuple[PrefixCache, Planner]:
    """An empty cache with the bytes of `num_tokens` tokens in all layers, and its planner."""
    if rule == ALL_KEPT:
        return RadixCache(PagePool(num_tokens // page_size, page_size)), NO_CHECKPOINTS
    count, size = model.pages(num_tokens, page_size)
    pool = PagePool(count, page_size)
    if rule == "vllm":
        cache: PrefixCache = HashBlockCache(pool)
        return cache, LastBlocksPlanner(LeastRecentWindows(cache, model.window, size))
    cache = RadixCache(pool)
    index = WindowIndex(cache, model.window, size, model.layers)
    planner = TemplateWindows(index, workload.templates())
    return cache, planner if rule == "ours" else WindowPlanner(index)
