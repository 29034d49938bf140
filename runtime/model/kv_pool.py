"""The KV pool: the page tensors of all layers, and the number of pages for a memory budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest
from radixcache.kernels.attention import LayerPages
from radixcache.kernels.huge_pages import HUGE, use_small_pages
from radixcache.kernels.upload import send
from radixcache.runtime.config.sizes import parse_memory
from radixcache.runtime.model.host import cgroups
from radixcache.runtime.model.host.system_memory import free_memory, machine_memory
from radixcache.states.windows import window_page_size

if TYPE_CHECKING:
    from radixcache.runtime.model.state_pool import StatePool

_CPU_LIMIT = 16 << 30
_MOST_WASTE = 1 / 64
"""Share of memory that huge pages may waste on a CPU; without them, a hit on 4,000 tokens took
8 % longer (measured, AMD EPYC)."""
_CUDA_MARGIN = 1 << 30  # for the activations of a step


class LayerShape(NamedTuple):
    """A token's KV in one layer; with MLA, a latent and the rotated part of the key."""

    heads: int
    key_dim: int
    value_dim: int


class WindowLayout(NamedTuple):
    """How pages of layers with a window differ from pages of full layers, which see all tokens.

    Attributes:
        window: number of keys that a query sees, its own included.
        page_size: tokens per page of the windowed layers.
        layers: for each attention layer, whether it has the window.
    """

    window: int
    page_size: int
    layers: tuple[bool, ...]


class KVPool:
    """K and V pages of every layer, zeros at first.

    The layers' pages are views of one tensor for each page shape, so that a page is copied in all
    layers at once. On a CPU the operating system commits their memory when it is first written.

    With a `WindowLayout`, a page belongs to all full layers (`page_size` tokens) or to all windowed
    layers (the layout's `page_size`), in the same bytes; only the holder of a page knows which.

    Attributes:
        layers: pages of each layer, [num_pages + 1, page_size, heads, dim] each; the strides
            between pages may be longer.
        page_size: tokens per page.
        num_pages: pages per layer; page p of every layer belongs to the same tokens.
        device: the device of the pages.
        spare_page: the last page, number `num_pages`, for rows that only pad a batch.
        windows: None if all layers keep all tokens.
        states: a recurrent model's states, in slots.
    """

    states: StatePool | None = None

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: WindowLayout | None = None,
    ) -> None:
        self.page_size, self.windows = page_size, windows
        self.num_pages = num_pages
        self.spare_page = num_pages
        self.device = device
        windowed = windows.layers if windows else (False,) * len(shapes)
        inner = [
            (in_window, (windows.page_size if windows and in_window else page_size, s.heads, dim))
            for s, in_window in zip(shapes, windowed, strict=True)
            for dim in (s.key_dim, s.value_dim)
        ]
        counts = Counter(inner)
        if windows is None:
            self._blocks = {
                kind: _zeros((n, num_pages + 1, *kind[1]), dtype, device, n).transpose(0, 1)
                for kind, n in counts.items()
            }
            self._whole = [*self._blocks.values()]
        else:
            memory, self._blocks = _shared_pages(counts, num_pages + 1, dtype, device)
            self._whole = [memory[:, None]]  # what a page holds, its holder alone knows
        unused = {kind: iter(block.unbind(1)) for kind, block in self._blocks.items()}
        pages = [next(unused[kind]) for kind in inner]
        self.layers = list(map(LayerPages, pages[::2], pages[1::2]))

    @torch.inference_mode()
    def copy(
        self,
        copies: Sequence[tuple[int, int, int]],
        window_copies: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Copy the first n slots of page `source` to page `target` in every layer.

        Args:
            copies: (source, target, n) triples; all sources are read before any target is written.
            window_copies: the same for pages of the windowed layers.
        """
        is_view = self.device.type == "cpu"  # what indices read is a copy already
        read = []
        for in_window, triples in ((False, copies), (True, window_copies)):
            for source, target in self._places(triples):
                read += [
                    (block, target, block[source].clone() if is_view else block[source])
                    for (windowed, _), block in self._blocks.items()
                    if windowed == in_window
                ]
        for block, target, values in read:
            block[target] = values

    def _places(self, copies: Sequence[tuple[int, int, int]]) -> Iterator[tuple[Any, Any]]:
        """Indices of the sources and of the targets: slices on a CPU, where they take a tenth of
        the time of indices (measured), and all of them at once on a GPU."""
        layers = slice(None)
        if self.device.type == "cpu":
            for source, target, count in copies:
                yield (source, layers, slice(count)), (target, layers, slice(count))
        elif copies:
            counts = [count for _, _, count in copies]
            slots = np.concatenate([np.arange(count) for count in counts])
            sources, targets = (np.repeat([c[i] for c in copies], counts) for i in (0, 1))
            at, to, slot = send(np.stack([sources, targets, slots]), self.device)
            yield (at, layers, slot), (to, layers, slot)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page: of all layers, or of the full or windowed ones, whichever need more."""
        return sum(block[0].nbytes for block in self._whole)

    def read_pages(self, pages: NDArray[np.integer]) -> torch.Tensor:
        """[n, page_bytes] uint8 on the host: a copy of n pages, the layers of each together."""
        rows = host_rows(len(pages), self.page_bytes)
        if self.device.type != "cpu":
            return rows.copy_(self.gather_pages(pages))
        for page, row in self._side_by_side(pages, rows):
            row[...] = page
        return rows

    @torch.inference_mode()
    def gather_pages(self, pages: NDArray[np.integer]) -> torch.Tensor:
        """`read_pages`, but on a GPU and into its memory."""
        at = send(pages, self.device).long()
        parts = [
            block.index_select(0, at).view(len(pages), -1).view(torch.uint8)
            for block in self._whole
        ]
        return torch.cat(parts, 1)

    @torch.inference_mode()
    def write_pages(self, pages: NDArray[np.integer], rows: torch.Tensor) -> None:
        """Write rows of `read_pages` to n pages."""
        if self.device.type == "cpu":
            for page, row in self._side_by_side(pages, rows):
                page[...] = row
            return
        at, start = send(pages, self.device).long(), 0
        for block in self._whole:
            size = block[0].nbytes
            part = rows[:, start : start + size].contiguous().to(self.device).view(block.dtype)
            block.index_copy_(0, at, part.view(len(pages), *block.shape[1:]))
            start += size

    def _side_by_side(
        self, pages: NDArray[np.integer], rows: torch.Tensor
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Views [layers, bytes] of `pages` on a CPU and of their places in `rows`. Copying each
        takes a tenth of the time of torch's gather (measured)."""
        data, start = rows.numpy(), 0
        for block in self._whole:
            memory = block.flatten(2).view(torch.uint8).numpy()
            _, layers, length = memory.shape
            size = layers * length
            parts = data[:, start : start + size].reshape(len(pages), layers, length)
            yield from zip((memory[page] for page in pages.tolist()), parts, strict=True)
            start += size


_Kind = tuple[bool, tuple[int, int, int]]
"""Whether layers have the window, and the shape of one's page: page size, heads, dimension."""


def _shared_pages(
    counts: Mapping[_Kind, int], num_pages: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, dict[_Kind, torch.Tensor]]:
    """One tensor in which a page belongs either to all windowed layers or to all full ones, and its
    views for each kind: [num_pages, count, page size, heads, dim]."""
    ends, blocks = {False: 0, True: 0}, {}
    for (windowed, shape), count in counts.items():
        ends[windowed] += count * int(np.prod(shape))
    memory, starts = _zeros((num_pages, max(ends.values())), dtype, device), {False: 0, True: 0}
    for kind, count in counts.items():
        start, size = starts[kind[0]], count * int(np.prod(kind[1]))
        starts[kind[0]] += size
        blocks[kind] = memory[:, start : start + size].unflatten(1, (count, *kind[1]))
    return memory, blocks


def host_rows(count: int, size: int) -> torch.Tensor:
    """[count, size] uint8 on the host, not initialised.

    numpy asks for huge pages, and torch does not: to fill 64 MiB from a file in memory takes 21 ms
    instead of 62 (measured in a virtual machine).

    Raises:
        MemoryError: there is no room.
    """
    return torch.from_numpy(np.empty((count, size), np.uint8))


def choose_windows(
    shapes: Sequence[LayerShape], windows: Sequence[int | None], page_size: int
) -> WindowLayout | None:
    """Lay out pages of windowed layers apart from those of full ones; None if no or all layers
    have a window, or if windows differ.

    Args:
        windows: each layer's window; None sees all tokens.
        page_size: tokens per page of the full layers.
    """
    sizes = {window for window in windows if window is not None}
    if len(sizes) != 1 or None not in windows:
        return None
    bytes_of = {False: 0, True: 0}
    for shape, window in zip(shapes, windows, strict=True):
        bytes_of[window is not None] += shape.heads * (shape.key_dim + shape.value_dim)
    size = window_page_size(page_size, bytes_of[False], bytes_of[True])
    return WindowLayout(sizes.pop(), size, tuple(window is not None for window in windows))


def bytes_per_page(
    shapes: Sequence[LayerShape],
    page_size: int,
    dtype: torch.dtype,
    windows: WindowLayout | None = None,
) -> int:
    """Bytes of a page: of all layers, or of the full or windowed ones, whichever need more."""
    if windows is None:
        return page_size * bytes_per_token(shapes, dtype)
    bytes_of = dict.fromkeys((False, True), 0)
    for shape, windowed in zip(shapes, windows.layers, strict=True):
        bytes_of[windowed] += bytes_per_token([shape], dtype)
    return max(page_size * bytes_of[False], windows.page_size * bytes_of[True])


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return sum(s.heads * (s.key_dim + s.value_dim) for s in shapes) * dtype.itemsize


def count_pages(
    memory: int | str | None, page_bytes: int, device: torch.device, taken: int = 0
) -> int:
    """Pages of `page_bytes` (in all layers) that fit into `memory`; None is the default, which
    leaves `taken` bytes of a GPU for other uses.

    Raises:
        InvalidRequest: `memory` is no amount of memory, is more than there is, or holds no page.
    """
    size = default_memory(device, taken) if memory is None else parse_memory(memory)
    there, where = machine_memory(), "this machine has"
    if device.type == "cuda":
        there, where = int(torch.cuda.mem_get_info(device)[1]), "the GPU has"
    elif (left := cgroups.memory_left()) is not None and left < there:
        there, where = left, "this container has left"
    if size > there:
        raise InvalidRequest(
            f"{size / 2**30:,.1f} GiB of KV memory are more than there is: "
            f"{where} {there / 2**30:,.1f} GiB"
        )
    if size < page_bytes:
        raise InvalidRequest(f"{size:,} bytes of KV memory hold no page; one takes {page_bytes:,}")
    return size // page_bytes


def default_memory(device: torch.device, taken: int = 0) -> int:
    """Default bytes for KV pages: most of a GPU's free memory without the `taken` bytes; on a CPU a
    quarter of the free memory, at most 16 GiB and half of what a container has left."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch keeps what loading has used
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, int(0.9 * free) - _CUDA_MARGIN - taken)
    left = cgroups.memory_left()
    least = [] if left is None else [left // 2]  # no other process takes from it
    return min(_CPU_LIMIT, free_memory() // 4, *least)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, parts: int = 1
) -> torch.Tensor:
    """Zeros in `parts` of equal size, which fill up at the same time."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are untouched pages of the operating system; torch writes its zeros. With huge
    # pages, each part touches its own: a few tokens would take megabytes in each part.
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(count + HUGE, dtype=np.uint8)
    first = -memory.ctypes.data % HUGE
    if parts * HUGE > count * _MOST_WASTE:
        use_small_pages(memory.ctypes.data, memory.nbytes)
    return torch.from_numpy(memory[first : first + count]).view(dtype).view(shape)
