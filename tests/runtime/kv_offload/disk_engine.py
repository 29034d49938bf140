"""Engines over a disk tier, and processes that end before they have closed it."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from radixcache import RadixCache, SamplingParams
from radixcache.pages import Pages
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.kv_offload.disk import DiskStore
from radixcache.runtime.kv_offload.loads import Loads
from radixcache.runtime.kv_offload.offload import Offload
from radixcache.runtime.kv_offload.store import Store
from radixcache.runtime.model.kv_pool import WindowLayout
from radixcache.runtime.request import Request
from radixcache.stored_pages import StoredPage, StoredPages
from radixcache.stored_windows import StoredWindows
from radixcache.tier import LowerTier
from tests.helpers.engines import generated
from tests.helpers.hash_model import VOCAB, greedy, hash_engine
from tests.helpers.traffic import Asked


class MemoryStore(Store):
    """Slots that are written and read at once."""

    medium, most_bytes, most_loading, in_stream = "disk", 64 << 20, 4, False

    def __init__(self, pool: Any, num_slots: int = 0) -> None:
        super().__init__(pool, num_slots)
        self.slots = dict[int, torch.Tensor]()

    def save(self, pages: Pages, stored: StoredPages) -> None:
        rows = self._pool.read_pages(pages)
        for row, page in zip(rows, stored.pages(), strict=True):
            self.slots[page.slot] = row
            page.state = "stored"

    def read(self, pages: Items[StoredPage]) -> Future[torch.Tensor]:
        done = Future[torch.Tensor]()
        done.set_result(torch.stack([self.slots[page.slot] for page in pages]))
        return done

    def read_pages(self, pages: Pages) -> torch.Tensor:
        return torch.stack([self.slots[slot] for slot in pages.tolist()])

    def clear(self) -> None:
        self.slots.clear()

    def close(self, in_order: object) -> None:
        pass


class HostMemory(MemoryStore):
    """The same, above a disk."""

    medium = "host"  # type: ignore[assignment]


def attach(engine: Engine, store: Store, slots: int) -> LowerTier:
    """A tier below the pool of `engine`, which loads whatever it has."""
    cache, pool = engine.cache, engine.kv_pool
    assert isinstance(cache, RadixCache)
    tier = cache.lower = LowerTier(slots, cache.page_size, store)
    tier.restore(store.stored())
    if cache.windows is not None:
        cache.windows.stored = StoredWindows(tier, cache.windows.span)
    engine.scheduler.loads = Loads(cache, pool)
    engine.scheduler.loads.note_step = lambda *_: None  # type: ignore[method-assign]
    return tier


def draw_windows(rng: Random) -> WindowLayout | None:
    """Windows of a model of hashes, in half of all cases."""
    window, size = rng.randint(10, 40), rng.randint(1, 4)
    return rng.choice([None, WindowLayout(window, size, (True, False))])


def window_pages(windows: WindowLayout | None, step: int, rng: Random) -> int:
    """Pages for the windows of a sequence or more."""
    if windows is None:
        return 0
    return (windows.window + min(160, step)) // windows.page_size + rng.choice([4, 40, 400])


class Disk:
    """An engine over a model of hashes, whose evicted pages go to `folder`, first to `above` slots
    in memory if there are any."""

    def __init__(
        self,
        folder: Path,
        page_size: int = 4,
        num_pages: int = 40,
        slots: int = 300,
        above: int = 0,
        **how: Any,
    ) -> None:
        self.engine: Engine = hash_engine("radix", page_size, num_pages, **how)
        cache, pool = self.engine.cache, self.engine.kv_pool
        assert isinstance(cache, RadixCache)
        self.store, host = DiskStore(folder, pool, slots), HostMemory(pool, above)
        self.offload = Offload(cache, pool, host if above else None, self.store)  # type: ignore[arg-type]
        self.tier = self.offload.tiers[-1]
        self.engine.scheduler.loads = self.offload.loads
        self.offload.loads.note_step = lambda *_: None  # type: ignore[method-assign]
        self.windows_loaded = 0
        if (index := self.engine.cache.windows) is not None:
            index.keep = self._count_loaded(index.keep)  # type: ignore[method-assign]

    def _count_loaded(self, give: Callable[..., None]) -> Callable[..., None]:
        def count(lease: Any, tokens: Any, before: Any, kind: str = "end") -> None:
            self.windows_loaded += isinstance(before, tuple)
            give(lease, tokens, before, kind)

        return count

    def close(self) -> None:
        self.offload.close()

    def put_down(self, *prompts: list[int]) -> None:
        """Answer these, and evict all."""
        for prompt in prompts:
            self.answer(prompt)
        self.engine.cache.evict(self.engine.cache.pool.num_pages)

    def answer(self, prompt: list[int], count: int = 4) -> tuple[list[int], int]:
        """The greedy answer, and how many tokens of the prompt were loaded."""
        params = SamplingParams(temperature=0, max_tokens=count)
        request = self.engine.add_request(prompt, params)
        while not request.finished:
            self.engine.step()
        self.engine.check()
        (tokens,) = generated([request])[0]
        return tokens, request.sequences[0].num_loaded


class Asker:
    """Random prompts, many of which go on from earlier ones, also of other processes."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.texts = rng, list[list[int]]()

    def ask(self, texts: list[list[int]]) -> Asked:
        rng = self.rng
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 40))]
        if self.texts and rng.random() < 0.8:
            base = rng.choice(self.texts)
            cut = len(base) if rng.random() < 0.5 else rng.randint(1, len(base))
            prompt = (base[:cut] + prompt[: rng.randint(1, 12)])[:90]
        self.texts = [*self.texts, prompt][-30:]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 8), n=rng.choice([1, 2]))
        return prompt, params, "salt" if rng.random() < 0.1 else None

    def after(self, flush: Callable[[], None]) -> Callable[[list[list[int]]], Asked]:
        """The same; before one of two is drawn all is written, however slow that is."""

        def ask(texts: list[list[int]]) -> Asked:
            if self.rng.random() < 0.5:
                flush()
            return self.ask(texts)

        return ask

    @staticmethod
    def verify(request: Request) -> None:
        prompt, count = request.prompt_token_ids.tolist(), request.params.max_tokens or 0
        for tokens in generated([request])[0]:
            assert tokens == greedy(prompt, count), (prompt, tokens)
        output, loaded = request.output(), request.sequences[0].loaded
        assert output.metrics.loaded_tokens <= output.num_cached_tokens
        assert all(one.end <= other.start for one, other in pairwise(loaded))


def in_a_process(work: Any) -> int:
    """Run `work` in a process of its own, forked; its status, negative for a signal."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
