"""Engines whose evicted pages go to tiers below: in memory, on a disk, in host memory of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from radixcache import PagePool, RadixCache, SamplingParams
from radixcache.kernels.upload import send
from radixcache.pages import Pages
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.logits_cache import PromptLogitsCache
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.kv_offload.disk import DiskStore
from radixcache.runtime.kv_offload.host import HostStore
from radixcache.runtime.kv_offload.loads import Loads
from radixcache.runtime.kv_offload.offload import Offload
from radixcache.runtime.kv_offload.store import Store
from radixcache.runtime.model.kv_pool import KVPool, LayerShape, WindowLayout
from radixcache.runtime.request import Request
from radixcache.states.stored_windows import StoredWindows
from radixcache.tiers.index import LowerTier
from radixcache.tiers.stored_pages import StoredPage, StoredPages
from tests.helpers import simulated_cuda
from tests.helpers.engines import generated
from tests.helpers.hash_model import VOCAB, HashModel, greedy, hash_engine
from tests.helpers.simulated_cuda import CUDA, Device, DeviceTensor
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
    engine.scheduler.admission.loads = Loads(cache, pool)
    engine.scheduler.admission.loads.note_step = lambda *_: None  # type: ignore[method-assign]
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


class Tiers:
    """An engine over a model of hashes, whose evicted pages go to `host`, `disk`, or both."""

    def __init__(self, engine: Engine, host: Store | None, disk: Store | None) -> None:
        cache = engine.cache
        assert isinstance(cache, RadixCache)
        self.engine = engine
        self.offload = Offload(cache, engine.kv_pool, host, disk)  # type: ignore[arg-type]
        engine.scheduler.admission.loads = self.offload.loads

    def answer(self, prompt: list[int], count: int = 4) -> tuple[list[int], int]:
        """The greedy answer, and how many tokens of the prompt were loaded."""
        request = self.engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=count))
        while not request.finished:
            self.engine.step()
            self.engine.check()
        (tokens,) = generated([request])[0]
        output = request.output()
        assert output.metrics.loaded_tokens <= output.num_cached_tokens
        return tokens, output.metrics.loaded_tokens

    def put_down(self, *prompts: list[int]) -> None:
        """Answer these, and evict all."""
        for prompt in prompts:
            self.answer(prompt)
        self.engine.cache.evict(self.engine.cache.pool.num_pages)

    def evict_all(self) -> None:
        """Evict all, and wait for the disk."""
        self.put_down()
        self.flush()
        self.engine.check()

    def flush(self) -> None:
        """All that is on its way to the disk, if there is one, is there."""
        if self.offload.disk is not None:
            self.offload.disk.flush()

    def close(self) -> None:
        self.offload.close()


class Disk(Tiers):
    """With a disk in `folder`, first with `above` slots in memory if there are any; whatever is
    found is loaded."""

    def __init__(
        self,
        folder: Path,
        page_size: int = 4,
        num_pages: int = 40,
        slots: int = 300,
        above: int = 0,
        **how: Any,
    ) -> None:
        engine = hash_engine("radix", page_size, num_pages, **how)
        self.store = DiskStore(folder, engine.kv_pool, slots)
        super().__init__(engine, HostMemory(engine.kv_pool, above) if above else None, self.store)
        self.tier = self.offload.tiers[-1]
        self.offload.loads.note_step = lambda *_: None  # type: ignore[method-assign]
        self.windows_loaded = 0
        if (index := self.engine.cache.windows) is not None:
            index.keep = self._count_loaded(index.keep)  # type: ignore[method-assign]

    def _count_loaded(self, give: Callable[..., None]) -> Callable[..., None]:
        def count(lease: Any, tokens: Any, before: Any, kind: str = "end") -> None:
            self.windows_loaded += isinstance(before, tuple)
            give(lease, tokens, before, kind)

        return count


_COPY = torch.ops.aten.copy_.default


class PinnedDevice(Device):
    """A simulated GPU that copies to and from registered host memory, in the order of its stream.

    Only the device touches that memory, so that it may be thought of as the device sees it: each
    copy has run by the time of the next.

    Attributes:
        registered: addresses, and how many bytes begin there.
        failures: the share of such copies that fail, for want of memory, drawn by `rng`.
        code: what registering returns; 0 is success.
    """

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.registered: dict[int, int] = {}
        self.failures, self.rng = 0.0, Random(0)
        self.code = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _COPY:
            target, source, non_blocking = (*args, *(kwargs or {}).values(), False)[:3]
            sides = [isinstance(side, DeviceTensor) for side in (target, source)]
            host = source if sides[0] else target
            if sum(sides) == 1 and host.untyped_storage().data_ptr() in self.registered:
                assert non_blocking, "the engine's thread would wait"
                if self.rng.random() < self.failures:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self.launches += 1
                to, what = (simulated_cuda.unwrap(side) for side in (target, source))
                to.copy_(what)
                return target
        return super().__torch_dispatch__(func, types, args, kwargs)

    def register(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = size
        return self.code

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@contextmanager
def pinning_cuda(flashinfer: bool = False) -> Iterator[PinnedDevice]:
    """`simulated_cuda`, or `simulated_gpu`, where host memory can be registered."""
    with patch.object(simulated_cuda, "Device", PinnedDevice), ExitStack() as stack:
        from tests.kernels.gpu import simulated_gpu

        make = simulated_gpu if flashinfer else simulated_cuda.simulated_cuda
        made: Any = stack.enter_context(make())
        device = getattr(made, "device", made)
        assert isinstance(device, PinnedDevice)
        runtime = SimpleNamespace(
            cudaHostRegister=device.register, cudaHostUnregister=device.unregister
        )
        with patch.object(torch.cuda, "cudart", lambda: runtime):
            yield device


class DeviceHashModel(HashModel):
    """The model of hashes on the device: every layer of its pool holds the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.device = CUDA

    def forward(
        self, tokens: Any, batch: Any, rows: Any, pool: Any, states: Any = (), unread: Any = None
    ) -> Any:
        memory = [page.memory.numpy() for pages in pool.layers for page in pages]
        if unread is not None:
            tokens[unread.rows] = unread.tokens.memory.numpy()
        with _disable_current_modes():
            for layer in memory:
                flat = layer.reshape(-1, *layer.shape[2:])
                flat[batch.slots()] = np.reshape(tokens, (-1, 1, 1))
            first = memory[0][:, :, 0, 0]
            same = [(layer == first[:, :, None, None]).all((2, 3)) for layer in memory]
            read = SimpleNamespace(slots=np.where(np.logical_and.reduce(same), first, -1))
            read.spoil = lambda: None
            logits = super().forward(tokens, batch, rows, read)  # type: ignore[arg-type]
        return send(logits, CUDA)


class Pinned(Tiers):
    """On a simulated GPU: with `slots` pages of pinned host memory, and `on_disk` in `folder`, if
    there is one; loads and saves of the first must not wait for the device."""

    def __init__(
        self,
        device: PinnedDevice,
        page_size: int = 4,
        num_pages: int = 40,
        slots: int = 300,
        folder: Path | None = None,
        on_disk: int = 300,
        max_num_batched_tokens: int = 200,
        max_num_seqs: int = 16,
    ) -> None:
        self.device, cache = device, RadixCache(PagePool(num_pages, page_size))
        shapes = [LayerShape(1, 1, 2), LayerShape(1, 1, 1)]
        pool = KVPool(shapes, num_pages, page_size, torch.int64, CUDA)
        for keys, values in pool.layers:
            keys.fill_(-1), values.fill_(-1)
        model: Any = DeviceHashModel()
        scheduler = Scheduler(
            cache, max_num_batched_tokens, max_num_seqs,
            logits_cache=PromptLogitsCache(model.vocab_size),
        )  # fmt: skip
        disk = None if folder is None else DiskStore(folder, pool, on_disk)
        host = HostStore(slots * pool.page_bytes, pool)
        super().__init__(Engine(model, pool, cache, scheduler), host, disk)
        self.tier = self.offload.tiers[0]
        self.store = self.tier.store
        calls: list[tuple[Any, str]] = [(self.store, "save"), (self.store, "read")]
        calls += [(pool, "write_pages")] if folder is None else []  # of a disk it waits
        for owner, name in calls:
            setattr(owner, name, self._without_waiting(getattr(owner, name)))

    def _without_waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            before = len(self.device.waits)
            result = call(*args)
            assert len(self.device.waits) == before, f"{call} waited for the device"
            return result

        return checked


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
