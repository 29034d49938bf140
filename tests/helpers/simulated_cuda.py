"""A CUDA device that is simulated on a CPU, so that what is written for a GPU runs everywhere.

Within `simulated_cuda()` plain torch computes on tensors that say that they are on "cuda". What a
CPU forgives is an error, as it is on a GPU:

- an operation on tensors of the device and of the host together, scalars excepted;
- in a capture, what waits for the device: `item`, `nonzero`, copies not from or to pinned memory;
- a change to pinned memory that a copy may still read: copies are *in flight* until somebody has
  waited for the device, or for an event that was recorded after them. What is copied to the host
  without waiting is garbage until then;
- an attention mask that the kernels would read at an odd address.

All streams are one, there are no gradients, and times mean nothing.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # which the first operation in a mode imports: not while torch is patched
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

_WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2",
    "unique_consecutive", "unique_dim", "bincount",
}  # fmt: skip
_COPYING = {"copy_", "_to_copy"}
_INDEXING = {"index", "index_put", "index_put_"}
_NESTED = {tuple, list, dict, torch.Size}
_SINGLE: set[Any] = set()  # operations that are known to be made of no others


class Copies:
    """Asynchronous copies, in flight until `land`.

    Args:
        sources: arrays on the host, which may not change so long.
        target: an array on the host that is garbage so long.
    """

    _all: dict[int, Copies] = {}  # noqa: RUF012  # by number, in the order of their start
    _numbers = itertools.count()

    def __init__(
        self, owner: str, sources: dict[str, torch.Tensor], target: torch.Tensor | None = None
    ) -> None:
        self.owner = owner
        self.sources = sources
        self.started_with = {name: source.clone() for name, source in sources.items()}
        self.target = target
        if target is not None:
            self.result = target.clone()
            target.fill_(-1)
        self._number = next(self._numbers)
        self._all[self._number] = self

    @property
    def in_flight(self) -> bool:
        return self._number in self._all

    def check(self, when: str) -> None:
        for name, source in self.sources.items():
            assert torch.equal(source, self.started_with[name]), (
                f"{name} of {self.owner} was overwritten {when}: its copy may not have run"
            )

    @classmethod
    def land(cls, before: int | None = None) -> None:
        """Those started before this number are done."""
        for number in [n for n in cls._all if before is None or n < before]:
            copies = cls._all.pop(number)
            copies.check("before anybody waited for it")
            if copies.target is not None:
                copies.target.copy_(copies.result)

    @classmethod
    def reset(cls) -> None:
        cls._all.clear()


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, *_: object, device: Device | None = None, **__: object) -> None:
        self._device = device
        self._before = self._launches = 0

    def record(self, stream: object = None) -> None:
        """On the current device, on which nothing is done if it is not the simulated one."""
        elsewhere = self._device is not None and self._device.current != self._device.place.index
        self._before = 0 if elsewhere else next(Copies._numbers)
        self._launches = self._device.launches if self._device is not None else 0
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        if self._device is not None:
            self._device.waits.append(self._device.launches - self._launches)
        with _disable_current_modes():
            Copies.land(self._before)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._time - self._time)


class DeviceTensor(torch.Tensor):
    """Says that it is on the device; `memory` is a tensor on the CPU."""

    memory: torch.Tensor
    place = CUDA

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(memory.is_inference()):  # in it, a view may be no such tensor
            tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                memory.shape,
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                device=cls.place,
            )
        tensor.memory = memory
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} on a device that is no longer simulated")

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.cpu().numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"cuda({self.memory!r})"


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], None]] = []
        self._allocated: list[torch.Tensor] = []

    def add(self, work: Callable[[], Any], results: list[torch.Tensor | None]) -> None:
        """Remember a launch, and what it allocated: None for each other result."""
        self._allocated += [result for result in results if result is not None]

        def launch() -> None:
            for result, value in zip(results, tree_leaves(work()), strict=True):
                if result is not None:
                    result.copy_(value)

        self._launches.append(launch)

    def forget_results(self) -> None:
        """A capture computes nothing."""
        for result in self._allocated:
            if result.is_floating_point():
                result.fill_(torch.nan)

    def replay(self) -> None:
        with _disable_current_modes(), torch.inference_mode():
            for launch in self._launches:
                launch()


class Device(TorchDispatchMode):
    """Runs every operation of torch, and those of `launch`, and sees that a GPU could have.

    Attributes:
        place: where the tensors are.
        current: the index of the current device.
        launches: operations so far.
        ops: their names, but for views, until somebody clears the list.
        waits: for each time that the host waited, how many of them it did not wait for.
        capturing: the graph that records, if any.
    """

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.place = place
        self.current = 0
        self.launches = 0
        self.ops: list[str] = []
        self.waits: list[int] = []
        self.capturing: Graph | None = None
        self._pinned: dict[int, torch.Tensor] = {}  # by address, which is so not used again

    def wait(self, what: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
        self.waits.append(0)
        with _disable_current_modes():
            Copies.land()

    def launch(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a kernel that is not one of torch's."""
        for leaf in tree_leaves((args, kwargs)):
            assert not isinstance(leaf, torch.Tensor) or isinstance(leaf, DeviceTensor), (
                f"{kernel} got a tensor on the host"
            )
        work = functools.partial(kernel, *unwrap(args), **unwrap(kwargs))
        self.ops.append(kernel.__name__)
        with _disable_current_modes():
            return self._launch(work, tree_leaves((args, kwargs)))

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        """Let a graph record what is launched, instead of the device running it."""
        self.wait("a capture")
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
            with _disable_current_modes(), torch.inference_mode():
                graph.forget_results()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()  # 0 of those without elements
        return self._pinned.setdefault(address, tensor) if address else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        address = None if isinstance(tensor, DeviceTensor) else tensor.untyped_storage().data_ptr()
        return address in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            _check_mask(*args[3:4], **kwargs)
        if func not in _SINGLE:  # in inference mode, what is made of others comes in one piece
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            _SINGLE.add(func)
        name = func._schema.name.partition("::")[2]
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        target = self.place if ours else CPU
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            if target.type == "cuda" and target.index not in (None, self.place.index):
                raise RuntimeError(f"CUDA error: nothing is on {target}")
            kwargs["device"] = CPU if target.type == "cuda" else target
        elif name == "copy_":
            target = args[0].device
        pinned = kwargs.pop("pin_memory", False)
        if name in _COPYING:
            self._check_copy(name, args, kwargs, target)
        if ours:
            self._check_operands(name, args, tensors)
        if not ours and target.type != "cuda":
            result = func(*args, **kwargs)
            return self.pin(result) if pinned else result
        work = functools.partial(func, *unwrap(args), **unwrap(kwargs))
        if target.type != "cuda":  # a copy to the host
            result = work()
            if kwargs.get("non_blocking"):
                with _disable_current_modes():
                    Copies("a copy to the host", {}, self.pin(result))
            return result
        if not func.is_view:
            self.ops.append(name)
        return self._launch(work, leaves)

    def _launch(self, work: Callable[[], Any], arguments: list[Any]) -> Any:
        self.launches += 1
        results = work()
        mine = {id(leaf.memory): leaf for leaf in arguments if isinstance(leaf, DeviceTensor)}
        if self.capturing is not None:
            storages = {leaf.memory.untyped_storage().data_ptr() for leaf in mine.values()}
            leaves = tree_leaves(results)
            is_new = [
                isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in storages
                for leaf in leaves
            ]
            new = [leaf if own else None for leaf, own in zip(leaves, is_new, strict=True)]
            self.capturing.add(work, new)

        def wrap(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return mine[id(value)] if id(value) in mine else DeviceTensor(value)
            return value

        return tree_map(wrap, results)

    def _check_operands(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        if name in _INDEXING:  # the indices may lie on the host
            tensors = [args[0], *args[2:3]]
        if name not in _COPYING and any(
            t.ndim and not isinstance(t, DeviceTensor) for t in tensors
        ):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu"
            )
        if name in _WAITING:
            self.wait(name)
        if name in _INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(not isinstance(index, DeviceTensor) for index in indices):
                self.wait("an index on the host")
            elif any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait("an index of booleans")

    def _check_copy(self, name: str, args: Any, kwargs: Any, target: torch.device) -> None:
        source = args[1] if name == "copy_" else args[0]
        if isinstance(source, DeviceTensor):
            if target.type != "cuda" and not (name == "_to_copy" and kwargs.get("non_blocking")):
                self.wait("a copy to the host")
        elif target.type == "cuda" and source.numel() and (source.ndim or name == "_to_copy"):
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                self.wait("a copy that is not asynchronous")
            elif self.is_pinned(source):
                Copies("a copy to the device", {"the source": source})
            elif self.capturing is not None:  # else CUDA keeps a copy of it and returns
                raise RuntimeError("a copy from pageable memory: not permitted in a capture")


def _check_mask(attn_mask: torch.Tensor | None = None, **_: object) -> None:
    """torch copies a mask whose rows start at odd addresses, but not if only the first one does."""
    if isinstance(attn_mask, DeviceTensor) and attn_mask.dtype != torch.bool:
        offset = attn_mask.storage_offset() * attn_mask.element_size()
        if offset % 16 and not any(stride % 16 for stride in attn_mask.stride()[:-1]):
            raise RuntimeError("CUDA error: misaligned address")


def unwrap(value: Any) -> Any:
    """The same with the memory of device tensors in their place."""
    return tree_map(lambda leaf: leaf.memory if isinstance(leaf, DeviceTensor) else leaf, value)


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """`change` of all that is not a tuple, a list or a dict; torch's own is slow."""
    if isinstance(value, (tuple, list)):
        if _NESTED.isdisjoint(map(type, value)):
            return type(value)(map(change, value))
        return type(value)([tree_map(change, item) for item in value])
    if isinstance(value, dict):
        return {key: tree_map(change, item) for key, item in value.items()}
    return change(value)


def tree_leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map(leaves.append, value)
    return leaves


class _Generator(torch.Generator):
    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls)


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...


def _let_cuda_be_guarded() -> None:
    """Give the device type CUDA a guard that switches nothing.

    torch has one for its builds with CUDA where there is no GPU. Builds without CUDA have no guard
    at all, at which C++ code that switches devices fails: there another one that counts no devices
    goes in first.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 20).in_dll(library, symbol)
    cuda, lazy = 1, 17  # c10::DeviceType
    guards[cuda] = guards[cuda] or guards[lazy]
    torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def simulated_cuda(index: int = 0) -> Iterator[Device]:
    """A device "cuda:<index>" for this thread, whose current device is 0 at first; whatever this
    replaces is as before afterwards."""
    _let_cuda_be_guarded()
    device = Device(torch.device("cuda", index))
    streams = [_Stream()]  # the last one is current
    properties = SimpleNamespace(
        name="a GPU simulated on a CPU: no time means anything", total_memory=1 << 30,
        multi_processor_count=132, major=9, minor=0, shared_memory_per_multiprocessor=228 << 10,
        shared_memory_per_block_optin=227 << 10,
    )  # fmt: skip

    @contextmanager
    def on_device(place: torch.device) -> Iterator[None]:
        before, device.current = device.current, place.index or 0
        try:
            yield
        finally:
            device.current = before

    @contextmanager
    def on_stream(stream: _Stream) -> Iterator[None]:
        before = streams[-1]
        streams.append(stream)
        try:
            yield
        finally:
            streams.append(before)

    @contextmanager
    def capture(graph: Graph, *, stream: _Stream | None = None, **_: object) -> Iterator[None]:
        before = streams[-1]
        streams.append(stream or _Stream())
        with device.capture(graph):
            yield
        streams.append(before)  # not after an error

    state = {
        torch.__future__.set_swap_module_params_on_conversion: (
            torch.__future__.get_swap_module_params_on_conversion()
        ),
        torch._C._set_only_lift_cpu_tensors: torch._C._only_lift_cpu_tensors(),
    }
    with ExitStack() as stack:
        stack.callback(Copies.reset)
        Copies.reset()
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "device_count", lambda: index + 1),
            (torch.cuda, "current_device", lambda: device.current),
            (torch.cuda, "device", on_device),
            (DeviceTensor, "place", device.place),
            (torch.cuda, "get_device_name", lambda *_: properties.name),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30)),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "synchronize", lambda *_: device.wait("synchronize")),
            (torch.cuda, "current_stream", lambda *_: streams[-1]),
            (torch.cuda, "set_stream", streams.append),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "stream", on_stream),
            (torch.cuda, "Event", functools.partial(Event, device=device)),
            (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", capture),
            (torch, "Generator", _Generator),
            (torch.Tensor, "is_pinned", lambda tensor, *_: device.is_pinned(tensor)),
            (torch.Tensor, "pin_memory", lambda tensor, *_: device.pin(tensor.clone())),
        ):
            stack.enter_context(patch.object(owner, name, value))
        # New parameters keep their class; torch.tensor() and lists as indices go through the mode.
        for setter, before in state.items():
            stack.callback(setter, before)
            setter(True)
        stack.enter_context(device)
        yield device
