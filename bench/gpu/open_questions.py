"""Choices of the GPU path that only a measurement can settle. Nothing here has an aim.

Each compares ways to compute the same attention, on the device alone, with FlashInfer's wrappers as
the backend uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.report import Figure, NotRun, Report
from radixcache.bench.gpu.steps import error, layers_of_pages, make_batch
from radixcache.kernels import torch_backend
from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.kernels.torch_backend import TorchBackend


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    for new in sizes.suffixes:
        for cached in sizes.prefixes:
            report.measure(f"suffix {new} on {cached}", partial(_suffix, place, new, cached))
    for group in (1, 2, 4, 8):
        for rows in sizes.rows[:: max(1, len(sizes.rows) - 1)]:
            report.measure(f"decode, GQA {group}", partial(_tensor_cores, place, group, rows))
    report.measure("mixed step", partial(_mixed, place))
    report.measure("fa3 for a fresh prompt", partial(_fa3, place))
    for rows, num_bytes in sizes.tile_limits:
        report.measure("tiles of the torch backend", partial(_tiles, place, rows, num_bytes))


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """One for all wrappers: their kernels run one after the other."""
    return torch.zeros(384 << 20, dtype=torch.uint8, device=device)


def _plan_prefill(
    place: Place, batch: PagedBatch, heads: tuple[int, int], causal: bool = True
) -> Any:
    wrapper = place.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(place.device), kv_layout="NHD", backend="fa2"
    )
    wrapper.plan(
        qo_indptr=place.host(batch.qo_indptr),
        paged_kv_indptr=place.host(batch.kv_indptr),
        paged_kv_indices=place.host(batch.kv_indices).to(place.device),
        paged_kv_last_page_len=place.host(batch.kv_last_page_len),
        seq_lens=place.host(batch.kv_lens),
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=place.sizes.head_dim,
        page_size=batch.page_size,
        causal=causal,
        q_data_type=place.dtype,
        kv_data_type=place.dtype,
    )
    return _settled(place, wrapper)


def _plan_ragged(place: Place, lens: Sequence[int], heads: tuple[int, int], kernel: str) -> Any:
    wrapper = place.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(place.device), kv_layout="NHD", backend=kernel
    )
    offsets = np.cumsum([0, *lens])
    wrapper.plan(
        qo_indptr=place.host(offsets),
        kv_indptr=place.host(offsets),
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=place.sizes.head_dim,
        causal=True,
        q_data_type=place.dtype,
        kv_data_type=place.dtype,
    )
    return _settled(place, wrapper)


def _settled(place: Place, wrapper: Any) -> Any:
    """Once planned; the pinned arrays may go."""
    torch.cuda.synchronize()
    return wrapper


@torch.inference_mode()
def _suffix(place: Place, new: int, cached: int) -> Figure:
    """One causal call over all pages, or the new tokens and the prefix apart, and a merge."""
    sizes, heads, page_size = place.sizes, place.sizes.heads[0], 16
    batch = make_batch(np.random.default_rng(1), [(new, cached)], page_size)
    q, k, v = (place.randn(new, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1]))
    layers = layers_of_pages(place, batch, heads[1])
    backend = place.make_backend(LayerKind(*heads, sizes.head_dim, sizes.head_dim, 1.0))
    backend.plan(batch)
    for pages in layers:  # append the new tokens
        backend.run(q, k, v, *pages, scale=1.0)
    one = _plan_prefill(place, batch, heads)
    prefix_pages = cached // page_size
    prefix = replace(
        batch,
        kv_indptr=np.array([0, prefix_pages], np.int32),
        kv_indices=batch.kv_indices[:prefix_pages],
        kv_last_page_len=np.array([page_size], np.int32),
    )
    before = _plan_prefill(place, prefix, heads, causal=False)
    among = _plan_ragged(place, [new], heads, "fa2")
    out, other = torch.empty_like(q), torch.empty_like(q)
    lse, other_lse = (
        torch.empty(new, heads[0], dtype=torch.float32, device=place.device) for _ in range(2)
    )

    def whole(pages: list[torch.Tensor]) -> torch.Tensor:
        one.run(q, tuple(pages), out=out)
        return out

    def apart(pages: list[torch.Tensor]) -> torch.Tensor:
        among.run(q, k, v, out=out, lse=lse, return_lse=True)
        before.run(q, tuple(pages), out=other, lse=other_lse, return_lse=True)
        place.flashinfer.merge_state_in_place(out, lse, other, other_lse)
        return out

    right = whole(layers[0]).float().clone()
    assert error(apart(layers[0]), right) < 2e-2, "the two ways disagree"
    seconds = [
        place.gpu_seconds([partial(work, pages) for pages in layers], sizes.repeat)
        for work in (whole, apart)
    ]
    return _ratio(f"suffix of {new} on {cached}: apart over one paged call", seconds)


def _ratio(name: str, seconds: Sequence[float]) -> Figure:
    first, second = seconds
    note = f"{second * 1e6:.1f} against {first * 1e6:.1f} µs a layer"
    return Figure(name, second / first, "x", note=note)


@torch.inference_mode()
def _tensor_cores(place: Place, group: int, rows: int) -> Figure:
    sizes, kv_heads = place.sizes, place.sizes.heads[0][1]
    heads = group * kv_heads, kv_heads
    context = sizes.shared[-1] // 4
    batch = make_batch(np.random.default_rng(2), [(1, context)] * rows, 16)
    layers = layers_of_pages(place, batch, kv_heads)
    q = place.randn(rows, heads[0], sizes.head_dim)
    out = torch.empty_like(q)
    seconds = []
    for tensor_cores in (False, True):
        wrapper = place.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(place.device), kv_layout="NHD", use_tensor_cores=tensor_cores, backend="fa2"
        )
        wrapper.plan(
            indptr=place.host(batch.kv_indptr),
            indices=place.host(batch.kv_indices).to(place.device),
            last_page_len=place.host(batch.kv_last_page_len),
            seq_lens=place.host(batch.kv_lens),
            num_qo_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=sizes.head_dim,
            page_size=16,
            q_data_type=place.dtype,
            kv_data_type=place.dtype,
        )
        _settled(place, wrapper)
        works: list[Work] = [partial(wrapper.run, q, tuple(p), out=out) for p in layers]
        seconds.append(place.gpu_seconds(works, sizes.repeat))
    return _ratio(f"decode, GQA {group}, {rows} rows x {context}: tensor cores over none", seconds)


@torch.inference_mode()
def _mixed(place: Place) -> Figure:
    """Decodes and a prefill chunk: a kernel for each, as the backend does, or one for all."""
    sizes, heads = place.sizes, place.sizes.heads[0]
    rows, context, new = sizes.rows[-1] // 2, sizes.shared[-1] // 4, sizes.suffixes[-1]
    batch = make_batch(np.random.default_rng(3), [*[(1, context)] * rows, (new, context)], 16)
    tokens = rows + new
    q, k, v = (
        place.randn(tokens, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1])
    )
    layers = layers_of_pages(place, batch, heads[1])
    scale = sizes.head_dim**-0.5
    backend = place.make_backend(LayerKind(*heads, sizes.head_dim, sizes.head_dim, scale))
    backend.plan(batch)
    torch.cuda.synchronize()
    right = backend.run(q, k, v, *layers[0], scale=scale).float().clone()
    one, out = _plan_prefill(place, batch, heads), torch.empty_like(q)
    one.run(q, tuple(layers[0]), out=out)
    assert error(out, right) < 2e-2, "the two ways disagree"
    # The wrappers alone: both ways append alike.
    step = getattr(backend, "_step")  # noqa: B009
    kind = next(iter(step.parts[0].wrappers))

    def split(pages: list[torch.Tensor]) -> None:
        for part in step.parts:
            part.wrappers[kind].run(q[part.rows], tuple(pages), out=out[part.rows])

    def joined(pages: list[torch.Tensor]) -> None:
        one.run(q, tuple(pages), out=out)

    ways: list[Callable[[list[torch.Tensor]], None]] = [split, joined]
    seconds = [place.gpu_seconds([partial(w, p) for p in layers], sizes.repeat) for w in ways]
    return _ratio(f"{rows} decodes and a chunk of {new}: one prefill call over two calls", seconds)


@torch.inference_mode()
def _fa3(place: Place) -> Figure:
    sizes, heads = place.sizes, place.sizes.heads[0]
    q, k, v = (
        place.randn(sizes.fresh, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1])
    )
    out, seconds, found = torch.empty_like(q), [], []
    for kernel in ("fa2", "fa3"):
        try:
            wrapper = _plan_ragged(place, [sizes.fresh], heads, kernel)
        except Exception as error_:  # not packed, or no Hopper
            raise NotRun(f"{kernel} does not load: {str(error_).partition(chr(10))[0]}") from error_
        run = partial(wrapper.run, q, k, v, out=out)
        seconds.append(place.gpu_seconds([run] * 4, sizes.repeat))
        found.append(out.float().clone())
    assert error(found[1], found[0]) < 2e-2, "the two kernels disagree"
    return _ratio(f"fresh prompt of {sizes.fresh}: fa3 over fa2", seconds)


@torch.inference_mode()
def _tiles(place: Place, rows: int, num_bytes: int) -> list[Figure]:
    """The limits of the plain torch backend, which are a guess on a GPU."""
    sizes, heads = place.sizes, place.sizes.heads[0]
    figures = []
    for name, lens in (
        ("prefill", [(sizes.fresh // 4, sizes.fresh)]),
        ("decode", [(1, sizes.shared[-1] // 4)] * sizes.rows[-1]),
    ):
        batch = make_batch(np.random.default_rng(5), lens, 16)
        tokens = int(batch.qo_indptr[-1])
        q, k, v = (
            place.randn(tokens, count, sizes.head_dim) for count in (heads[0], heads[1], heads[1])
        )
        pages = layers_of_pages(place, batch, heads[1])[0]
        backend = TorchBackend(place.device)
        backend._block, backend._narrow_bytes = rows, num_bytes
        backend.plan(batch)
        work = partial(backend.run, q, k, v, *pages, scale=sizes.head_dim**-0.5)
        seconds = place.wall_seconds(work, min(sizes.repeat, 3))
        used = " (in use)" if (rows, num_bytes) == torch_backend._GPU_LIMITS else ""
        figures.append(
            Figure(
                f"torch, {name} of {tokens}: tiles of {rows} rows, {num_bytes >> 20} MiB{used}",
                seconds * 1e3,
                "ms a layer",
            )
        )
    return figures
