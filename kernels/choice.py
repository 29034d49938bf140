"""Chooses the attention backend: FlashInfer, Triton or native kernels, else plain torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from radixcache.errors import InvalidRequest, first_line
from radixcache.kernels.attention import (
    AttentionBackend,
    Fp8Pages,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
    SharedPrefix,
)
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.kv_format import FP8, encode
from radixcache.kernels.load_flashinfer import explain_failure
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.native.library import DTYPES, problem
from radixcache.kernels.torch_backend import TorchBackend

_log = logging.getLogger("radixcache")


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    kinds: Sequence[LayerKind],
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The fastest backend whose kernels run for all these layers: on a GPU FlashInfer, then Triton;
    on a CPU native kernels; else torch. MLA has FlashInfer and torch only.

    On a GPU without FlashInfer, a warning says why, and what to do. If `kv_dtype` is not `dtype`,
    FlashInfer reads fp8 only, and no other backend does: `InvalidRequest` without it.
    """
    if device.type == "cpu":
        native = dtype in DTYPES and problem() is None and not any(kind.mla for kind in kinds)
        return NativeBackend() if native else TorchBackend(device)
    if device.type not in ("cuda", "xpu"):
        return TorchBackend(device)
    start = time.perf_counter()

    def tried(make: Callable[..., AttentionBackend]) -> AttentionBackend:
        backend = make(device, dtype, kinds)
        try_out(backend, device, dtype, kinds, kv_dtype)
        return backend

    makers: list[Callable[..., AttentionBackend]] = [make_flashinfer, make_triton]
    if kv_dtype is not None:
        makers = [partial(make_flashinfer, kv_dtype=FP8)] if kv_dtype == FP8 else [make_triton]
    backend, errors = first_that_runs(*(partial(tried, make) for make in makers))
    reason = explain_failure(errors[0]) if errors else None
    if backend is None and kv_dtype == FP8:
        raise InvalidRequest(f"kv_cache_dtype='fp8' needs FlashInfer: {reason}")
    if backend is None:
        _log.warning(
            "attention runs in plain torch, which is slow on a GPU: %s. Nor does Triton run: %s",
            reason, first_line(errors[-1]),
        )  # fmt: skip
        return TorchBackend(device)
    if reason is not None:
        _log.warning("attention runs in Triton: %s", reason)
    backend.compile_in_background()
    _log.info("%s is ready after %.1f s", backend.name, time.perf_counter() - start)
    return backend


def make_flashinfer(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind], **kv_dtype: torch.dtype
) -> AttentionBackend:
    from radixcache.kernels.flashinfer_backend import FlashInferBackend
    from radixcache.kernels.flashinfer_mla import FlashInferMLABackend

    _log.info("FlashInfer compiles kernels that it has not compiled before: that takes minutes")
    is_mla = all(kind.mla for kind in kinds)
    return (FlashInferMLABackend if is_mla else FlashInferBackend)(device, dtype, kinds, **kv_dtype)


def make_triton(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
) -> AttentionBackend:
    from radixcache.kernels.triton_backend import TritonBackend

    return TritonBackend(device, dtype, kinds)


@torch.inference_mode()
def try_out(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    kinds: Sequence[LayerKind],
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Run decodes, decodes that share a page, a suffix and a fresh prompt through every layer kind.

    This loads or compiles the kernels, which the first request would wait for otherwise.
    """
    own = np.arange(10, dtype=np.int32)
    sharers = np.array([0, 1, 0, 2], dtype=np.int32)
    shared = (SharedPrefix(0, 2, 1),) if backend.reads_shared_once else ()
    for queries, lens, indices, groups in (
        ((1, 2), (3, 5), own[:8], ()),
        ((4, 6), (4, 6), own, ()),
        ((1, 1), (2, 2), sharers, shared),
    ):
        tokens = sum(queries)
        batch = PagedBatch(
            qo_indptr=np.cumsum([0, *queries], dtype=np.int32),
            kv_indptr=np.cumsum([0, *lens], dtype=np.int32),
            kv_indices=indices,
            kv_last_page_len=np.ones(2, dtype=np.int32),
            page_size=1,
            shared=groups,
        )
        plan = backend.plan(batch)
        for kind in dict.fromkeys(kinds):

            def zeros(rows: int, heads: int, dim: int) -> torch.Tensor:
                return torch.zeros(rows, heads, dim, dtype=dtype, device=device)

            k_pages, v_pages = (
                encode(zeros(len(own), kind.kv_heads, dim)[:, None], kv_dtype or dtype)
                for dim in (kind.head_dim, kind.value_dim)
            )
            pages = (Fp8Pages if kv_dtype == FP8 else LayerPages)(k_pages, v_pages)
            query = zeros(tokens, kind.query_heads, kind.query_dim)
            key = zeros(tokens, kind.kv_heads, kind.head_dim)
            value = zeros(tokens, kind.kv_heads, kind.value_dim)
            out = plan.run(LayerInputs(query, key, value, pages, kind))
            if out.any():  # copies to the host: a failed launch shows here
                raise RuntimeError("its kernels give wrong results")
