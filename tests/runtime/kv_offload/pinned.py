"""An engine on a simulated GPU whose evicted pages go to pinned host memory, and on to a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.logits_cache import PromptLogitsCache
from radixcache.runtime.engine.scheduler import Scheduler
from radixcache.runtime.kv_offload.disk import DiskStore
from radixcache.runtime.kv_offload.host import HostStore
from radixcache.runtime.kv_offload.offload import Offload
from radixcache.runtime.model.kv_pool import KVPool, LayerShape
from tests.helpers import simulated_cuda
from tests.helpers.engines import generated
from tests.helpers.hash_model import HashModel
from tests.helpers.simulated_cuda import CUDA, Device, DeviceTensor
from tests.kernels.gpu import simulated_gpu

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

    ranks = None

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
            logits = super().forward(tokens, batch, rows, read)  # type: ignore[arg-type]
        return send(logits, CUDA)


class Pinned:
    """An engine over the model of hashes, in whose tier there are `slots` pages, and in another one
    in `folder` as many as `on_disk`; loads and saves of the first must not wait for the device."""

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
        self.engine = Engine(model, pool, cache, scheduler)
        disk = None if folder is None else DiskStore(folder, pool, on_disk)
        self.offload = Offload(cache, pool, HostStore(slots * pool.page_bytes, pool), disk)
        self.tier = self.offload.tiers[0]
        self.store = self.tier.store
        calls: list[tuple[Any, str]] = [(self.store, "save"), (self.store, "read")]
        calls += [(pool, "write_pages")] if folder is None else []  # of a disk it waits
        for owner, name in calls:
            setattr(owner, name, self._without_waiting(getattr(owner, name)))
        scheduler.loads = self.offload.loads

    def flush(self) -> None:
        """All that is on its way to the disk, if there is one, is there."""
        if self.offload.disk is not None:
            self.offload.disk.flush()

    def _without_waiting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            before = len(self.device.waits)
            result = call(*args)
            assert len(self.device.waits) == before, f"{call} waited for the device"
            return result

        return checked

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
