"""Choices of the GPU path that only a measurement can settle. Nothing here has an aim.

Each compares two ways to compute the same attention, on the device alone, with FlashInfer's
wrappers as the backend uses them; the second over the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Figure, NotRun, Report
from radixcache.bench.gpu.steps import TOLERANCE, error, layers_of_pages, make_batch
from radixcache.kernels import torch_backend
from radixcache.kernels.attention import LayerKind, PagedBatch
from radixcache.kernels.torch_backend import TorchBackend

Pages = list[torch.Tensor]
Way = Callable[[Pages], torch.Tensor]


def run(place: Place, report: Report) -> None:
    sizes = place.sizes
    for new, cached in product(sizes.suffixes, sizes.prefixes):
        report.measure(f"suffix {new} on {cached}", _suffix, place, new, cached)
    for group, rows in product((1, 2, 4, 8), {sizes.rows[0], sizes.rows[-1]}):
        report.measure(f"decode, GQA {group}", _tensor_cores, place, group, rows)
    report.measure("mixed step", _mixed, place)
    report.measure("fa3 for a fresh prompt", _fa3, place)
    for (rows, num_bytes), prefill in product(sizes.tile_limits, (True, False)):
        report.measure("tiles of the torch backend", _tiles, place, rows, num_bytes, prefill)


@torch.inference_mode()
def _compare(place: Place, name: str, layers: Sequence[Pages], ways: Sequence[Way]) -> Figure:
    right, found = (way(layers[0]).float().clone() for way in ways)
    assert error(found, right) < TOLERANCE, "the two ways disagree"
    first, second = (
        place.gpu_seconds([partial(way, pages) for pages in layers], place.sizes.repeat)
        for way in ways
    )
    note = f"{second * 1e6:.1f} against {first * 1e6:.1f} µs a layer"
    return Figure(name, second / first, "x", note=note)


@cache
def _workspace(device: torch.device) -> torch.Tensor:
    """One for all wrappers: their kernels run one after the other."""
    return torch.zeros(384 << 20, dtype=torch.uint8, device=device)


def _plan(
    place: Place, use: str, batch: PagedBatch, heads: tuple[int, int], *, causal: bool = True,
    kernel: str = "fa2", **options: Any,
) -> Any:  # fmt: skip
    """A planned wrapper: "Decode" or "Prefill" over pages, or "Ragged" over the new tokens."""
    paged = use != "Ragged"
    names = {"Ragged": "BatchPrefillWithRaggedKVCacheWrapper"}
    wrap = getattr(place.flashinfer, names.get(use, f"Batch{use}WithPagedKVCacheWrapper"))
    wrapper = wrap(_workspace(place.device), kv_layout="NHD", backend=kernel, **options)
    prefix = "paged_kv_" if use == "Prefill" else ""
    arrays: dict[str, Any] = {}
    if use != "Decode":
        arrays |= {"qo_indptr": place.host(batch.qo_indptr), "causal": causal}
    if not paged:
        arrays["kv_indptr"] = arrays["qo_indptr"]
    else:
        arrays |= {
            f"{prefix}indptr": place.host(batch.kv_indptr),
            f"{prefix}indices": place.host(batch.kv_indices).to(place.device),
            f"{prefix}last_page_len": place.host(batch.kv_last_page_len),
            "seq_lens": place.host(batch.kv_lens),
            "page_size": batch.page_size,
        }
    arrays["head_dim" if use == "Decode" else "head_dim_qk"] = place.sizes.head_dim
    arrays |= dict.fromkeys(("q_data_type", "kv_data_type"), place.dtype)
    wrapper.plan(num_qo_heads=heads[0], num_kv_heads=heads[1], **arrays)
    torch.cuda.synchronize()  # once planned, the pinned arrays may go
    return wrapper


def _inputs(place: Place, tokens: int, heads: tuple[int, int]) -> list[torch.Tensor]:
    """Query, key, value, and room for the output."""
    shape = (heads[0], heads[1], heads[1], heads[0])
    return [place.randn(tokens, count, place.sizes.head_dim) for count in shape]


@torch.inference_mode()
def _suffix(place: Place, new: int, cached: int) -> Figure:
    """One causal call over all pages, or the new tokens and the prefix apart, and a merge."""
    heads, page_size = place.sizes.heads[0], 16
    batch = make_batch(np.random.default_rng(1), [(new, cached)], page_size)
    q, k, v, out = _inputs(place, new, heads)
    layers = layers_of_pages(place, batch, heads[1])
    dim = place.sizes.head_dim
    backend = place.make_backend(LayerKind(*heads, dim, dim, 1.0))
    backend.plan(batch)
    for pages in layers:  # append the new tokens
        backend.run(q, k, v, *pages, scale=1.0)
    prefix = replace(
        batch,
        kv_indptr=np.array([0, cached // page_size], np.int32),
        kv_indices=batch.kv_indices[: cached // page_size],
        kv_last_page_len=np.array([page_size], np.int32),
    )
    one = _plan(place, "Prefill", batch, heads)
    before = _plan(place, "Prefill", prefix, heads, causal=False)
    among = _plan(place, "Ragged", batch, heads)
    other = torch.empty_like(q)
    lse, other_lse = q.new_empty(2, new, heads[0], dtype=torch.float32)

    def whole(pages: Pages) -> torch.Tensor:
        one.run(q, tuple(pages), out=out)
        return out

    def apart(pages: Pages) -> torch.Tensor:
        among.run(q, k, v, out=out, lse=lse, return_lse=True)
        before.run(q, tuple(pages), out=other, lse=other_lse, return_lse=True)
        place.flashinfer.merge_state_in_place(out, lse, other, other_lse)
        return out

    name = f"suffix of {new} on {cached}: apart over one paged call"
    return _compare(place, name, layers, (whole, apart))


@torch.inference_mode()
def _tensor_cores(place: Place, group: int, rows: int) -> Figure:
    kv_heads, context = place.sizes.heads[0][1], place.sizes.shared[-1] // 4
    heads = group * kv_heads, kv_heads
    batch = make_batch(np.random.default_rng(2), [(1, context)] * rows, 16)
    q, _, _, out = _inputs(place, rows, heads)

    def way(tensor_cores: bool) -> Way:
        wrapper = _plan(place, "Decode", batch, heads, use_tensor_cores=tensor_cores)

        def decode(pages: Pages) -> torch.Tensor:
            wrapper.run(q, tuple(pages), out=out)
            return out

        return decode

    name = f"decode, GQA {group}, {rows} rows x {context}: tensor cores over none"
    layers = layers_of_pages(place, batch, kv_heads)
    return _compare(place, name, layers, (way(False), way(True)))


@torch.inference_mode()
def _mixed(place: Place) -> Figure:
    """Decodes and a prefill chunk: a kernel for each, as the backend does, or one for all."""
    sizes, heads = place.sizes, place.sizes.heads[0]
    rows, context, new = sizes.rows[-1] // 2, sizes.shared[-1] // 4, sizes.suffixes[-1]
    batch = make_batch(np.random.default_rng(3), [*[(1, context)] * rows, (new, context)], 16)
    q, k, v, out = _inputs(place, rows + new, heads)
    layers = layers_of_pages(place, batch, heads[1])
    dim = sizes.head_dim
    kind = LayerKind(*heads, dim, dim, dim**-0.5)
    backend: Any = place.make_backend(kind)
    backend.plan(batch)
    torch.cuda.synchronize()
    backend.run(q, k, v, *layers[0], scale=kind.scale)  # appends the new tokens
    one = _plan(place, "Prefill", batch, heads)

    def split(pages: Pages) -> torch.Tensor:  # the wrappers alone: both ways append alike
        for part in backend._step.parts:
            part.wrappers[kind].run(q[part.rows], tuple(pages), out=out[part.rows])
        return out

    def joined(pages: Pages) -> torch.Tensor:
        one.run(q, tuple(pages), out=out)
        return out

    name = f"{rows} decodes and a chunk of {new}: one prefill call over two calls"
    return _compare(place, name, layers, (split, joined))


@torch.inference_mode()
def _fa3(place: Place) -> Figure:
    heads, count = place.sizes.heads[0], place.sizes.fresh
    batch = make_batch(np.random.default_rng(4), [(count, 0)], 16)
    q, k, v, out = _inputs(place, count, heads)

    def way(kernel: str) -> Way:
        try:
            wrapper = _plan(place, "Ragged", batch, heads, kernel=kernel)
        except Exception as error_:  # not packed, or no Hopper
            raise NotRun(f"{kernel} does not load: {str(error_).partition(chr(10))[0]}") from error_

        def prefill(_: Pages) -> torch.Tensor:
            wrapper.run(q, k, v, out=out)
            return out

        return prefill

    return _compare(place, f"fresh prompt of {count}: fa3 over fa2", [[]] * 4,
                    (way("fa2"), way("fa3")))  # fmt: skip


@torch.inference_mode()
def _tiles(place: Place, rows: int, num_bytes: int, prefill: bool) -> Figure:
    """The limits of the plain torch backend, which are a guess on a GPU."""
    sizes, heads = place.sizes, place.sizes.heads[0]
    decodes = [(1, sizes.shared[-1] // 4)] * sizes.rows[-1]
    lens = [(sizes.fresh // 4, sizes.fresh)] if prefill else decodes
    batch = make_batch(np.random.default_rng(5), lens, 16)
    q, k, v, _ = _inputs(place, int(batch.qo_indptr[-1]), heads)
    pages = layers_of_pages(place, batch, heads[1])[0]
    backend = TorchBackend(place.device)
    backend._block, backend._narrow_bytes = rows, num_bytes
    backend.plan(batch)
    work = partial(backend.run, q, k, v, *pages, scale=sizes.head_dim**-0.5)
    seconds = place.wall_seconds(work, min(sizes.repeat, 3))
    used = " (in use)" if (rows, num_bytes) == torch_backend._GPU_LIMITS else ""
    what = f"torch, {'prefill' if prefill else 'decode'} of {len(q)}"
    name = f"{what}: tiles of {rows} rows, {num_bytes >> 20} MiB{used}"
    return Figure(name, seconds * 1e3, "ms a layer")
