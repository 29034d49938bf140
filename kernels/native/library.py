"""Loads the compiled kernels, and checks their arguments: what does not fit is a ValueError."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from threading import local

import torch

from radixcache.kernels.native.build import build

DTYPES = (torch.float32, torch.bfloat16)

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

_TYPES = {"*": c_void_p, "i": c_int32, "l": c_int64, "f": c_float}
_KERNELS = {  # in the order of native.cpp
    "attend": "***l*l*l***i",
    "linear": "*l**li",
    "rows": "**l*i",
    "forward": "********l**l*i",
    "decode": "*****i",
}
_FUNCTIONS = {
    "pack": "*lill*i",
    "pack_blocks": "***iill*i",
    "pack_stored": "*iiill*i",
    "find_merges": "***ll***i",
    "sample": "*lll***i",
}


@cache
def problem() -> str | None:
    """Why the kernels cannot run here; None if they can. The first call may compile them."""
    try:
        library()
    except OSError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build()))


@cache
def kernel(name: str, dtype: torch.dtype | None = None) -> Callable[..., None]:
    """A function of native.cpp, for one dtype if it is in `_KERNELS`.

    Raises:
        ValueError: there is none for that dtype.
    """
    if dtype is None:
        function = getattr(library(), f"radixcache_{name}")
        function.restype = c_int32
        function.argtypes = [_TYPES[letter] for letter in _FUNCTIONS[name]]
    elif dtype not in DTYPES:
        raise ValueError(f"no native kernels for {dtype}")
    else:
        table = str(dtype).replace("torch.", "radixcache_")
        address = (c_void_p * len(_KERNELS)).in_dll(library(), table)[[*_KERNELS].index(name)]
        assert address is not None
        types = [_TYPES[letter] for letter in _KERNELS[name]]
        function = ctypes.CFUNCTYPE(c_int32, *types)(address)

    def call(*arguments: object) -> None:
        done = function(*arguments, num_threads())
        if done == 0:
            raise MemoryError("no memory for what a step computes")
        if done < 0:
            raise IndexError("a token, or a row whose logits are wanted, that does not exist")

    return call


@cache
def plan_function() -> Callable[..., int]:
    """`plan_batch` of attention.h, which is over before a wrapper would be."""
    function = library().radixcache_plan
    function.restype, function.argtypes = c_int64, [c_void_p] * 4 + [c_int64] + [c_void_p] * 3
    return function


def kv_format(pages: torch.Tensor) -> int:
    """The `KVFormat` of attention.h; `ValueError` if the kernels read no such pages."""
    if pages.dtype not in _KV_DTYPES:
        raise ValueError(f"no native kernels for pages of {pages.dtype}")
    return _KV_DTYPES.index(pages.dtype)


class _Threads(local):
    count = 0


_threads = _Threads()


def num_threads() -> int:
    """Threads for a kernel that this thread calls: torch's number, also within `quiet_torch`."""
    return _threads.count or torch.get_num_threads()


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keeps torch's own operations on the calling thread; the kernels still use their pool.

    OpenMP's threads would spin for milliseconds after each operation, on the cores that the pool
    needs.
    """
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads  # for this thread alone
    except AttributeError:
        yield
        return
    before = torch.get_num_threads(), _threads.count
    _threads.count = num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before[0])
        _threads.count = before[1]


def check(
    tensor: torch.Tensor,
    like: torch.Tensor | torch.dtype,
    shape: tuple[int, ...],
    *,
    apart: bool = False,
) -> None:
    """Refuse a tensor of another shape or dtype, on another device, or not contiguous.

    Args:
        apart: only each entry of the first dimension must be contiguous.
    """
    dtype = like if isinstance(like, torch.dtype) else like.dtype
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu:
        raise ValueError(
            f"expected {list(shape)} {dtype} on a CPU, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous() and not (apart and tensor[0].is_contiguous()):
        raise ValueError(f"a tensor of {list(shape)} is not contiguous")
