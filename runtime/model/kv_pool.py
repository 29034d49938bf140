"""The KV pool: the page tensors of all layers, and the number of pages for a memory budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import InvalidRequest
from radixcache.kernels.attention import LayerPages
from radixcache.kernels.upload import send
from radixcache.runtime.config.sizes import parse_memory
from radixcache.runtime.model import cgroups
from radixcache.runtime.model.system_memory import (
    HUGE,
    free_memory,
    machine_memory,
    use_small_pages,
)

if TYPE_CHECKING:
    from radixcache.runtime.model.state_pool import StatePool

_CPU_LIMIT = 16 << 30
_MOST_WASTE = 1 / 64
"""The share that huge pages may add to KV memory on a CPU; without them, a hit on 4,000 tokens took
8 % longer (measured, AMD EPYC)."""
_CUDA_MARGIN = 1 << 30  # for the activations of a step


class LayerShape(NamedTuple):
    """A token's KV in one layer; with MLA, a latent and the rotated part of the key."""

    heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """K and V pages of every layer, zeros at first.

    The layers' pages are views of one tensor for each page shape, so that a page is copied in all
    layers at once. On a CPU the operating system commits their memory when it is first written.

    Attributes:
        layers: pages of each layer, [num_pages + 1, page_size, heads, dim] each.
        page_size: tokens per page.
        num_pages: pages per layer; page p of every layer belongs to the same tokens.
        device: the device of the pages.
        spare_page: the page after those, `num_pages`, for rows that only pad a batch.
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
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.spare_page = num_pages
        self.device = device
        inner = [(s.heads, dim) for s in shapes for dim in (s.key_dim, s.value_dim)]
        self._stacks = {
            shape: _zeros((count, num_pages + 1, page_size, *shape), dtype, device)
            for shape, count in Counter(inner).items()
        }
        unused = {shape: iter(stack) for shape, stack in self._stacks.items()}
        pages = [next(unused[shape]) for shape in inner]
        self.layers = list(map(LayerPages, pages[::2], pages[1::2]))

    @torch.inference_mode()
    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first n slots of page `source` to page `target` in every layer.

        Args:
            copies: (source, target, n) triples; all sources are read before any target is written.
        """
        slots = [self.page_size * np.array(c[:2])[:, None] + np.arange(c[2]) for c in copies]
        sources, targets = send(np.concatenate(slots, axis=1), self.device)
        for stack in self._stacks.values():
            flat = stack.flatten(1, 2)
            flat.index_copy_(1, targets, flat.index_select(1, sources))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return sum(stack[:, 0].nbytes for stack in self._stacks.values())

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
        """`read_pages` on a GPU, into its memory."""
        at = send(pages, self.device).long()
        parts = [
            stack.index_select(1, at)
            .transpose(0, 1)
            .contiguous()
            .view(len(pages), -1)
            .view(torch.uint8)
            for stack in self._stacks.values()
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
        for stack in self._stacks.values():
            size = stack[:, 0].nbytes
            part = rows[:, start : start + size].contiguous().to(self.device).view(stack.dtype)
            of_layers = part.view(len(pages), len(stack), *stack.shape[2:]).transpose(0, 1)
            stack.index_copy_(1, at, of_layers)
            start += size

    def _side_by_side(
        self, pages: NDArray[np.integer], rows: torch.Tensor
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Views [layers, bytes] of `pages` on a CPU and of their places in `rows`. Copying each
        takes a tenth of the time of torch's gather (measured)."""
        data, start = rows.numpy(), 0
        for stack in self._stacks.values():
            memory = stack.flatten(2).view(torch.uint8).numpy()
            layers, _, length = memory.shape
            size = layers * length
            parts = data[:, start : start + size].reshape(len(pages), layers, length)
            yield from zip((memory[:, page] for page in pages.tolist()), parts, strict=True)
            start += size


def host_rows(count: int, size: int) -> torch.Tensor:
    """[count, size] uint8 on the host, not initialised.

    numpy asks for huge pages, and torch does not: to fill 64 MiB from a file in memory takes 21 ms
    instead of 62 (measured in a virtual machine).

    Raises:
        MemoryError: there is no room.
    """
    return torch.from_numpy(np.empty((count, size), np.uint8))


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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are untouched pages of the operating system; torch's are written. They are huge
    # pages, and each layer writes its own: a few tokens would take megabytes in each layer.
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(count + HUGE, dtype=np.uint8)
    first = -memory.ctypes.data % HUGE
    if shape[0] * HUGE > count * _MOST_WASTE:
        use_small_pages(memory.ctypes.data, memory.nbytes)
    return torch.from_numpy(memory[first : first + count]).view(dtype).view(shape)
