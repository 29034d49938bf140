"""Chooses the attention backend: FlashInfer or native kernels where they work, else plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from radixcache.kernels.attention import (
    AttentionBackend,
    LayerKind,
    PagedBatch,
    SharedPrefix,
)
from radixcache.kernels.native.attention import NativeBackend
from radixcache.kernels.native.library import DTYPES, problem
from radixcache.kernels.torch_backend import TorchBackend

_log = logging.getLogger("radixcache")


def choose_backend(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
) -> AttentionBackend:
    """FlashInfer on a GPU whose kernels run for all these layers, native kernels on a CPU where
    they could be compiled, else torch.

    Torch on a GPU is much slower, so taking it there is a warning that says why.
    """
    if device.type == "cpu" and dtype in DTYPES and problem() is None:
        return NativeBackend()
    if device.type != "cuda":
        return TorchBackend(device)
    try:
        from radixcache.kernels.flashinfer_backend import FlashInferBackend

        backend = FlashInferBackend(device, dtype, kinds)
        try_out(backend, device, dtype, kinds)
    except ImportError as error:
        reason = f"FlashInfer is not installed ({error}): pip install '.[cuda]' in a checkout"
    except Exception as error:  # whatever a missing kernel, compiler or driver raises
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        reason = f"FlashInfer, from the extra 'cuda', does not run here: {first}"
    else:
        return backend
    _log.warning("attention runs in plain torch, which is slow on a GPU: %s", reason)
    return TorchBackend(device)


@torch.inference_mode()
def try_out(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    kinds: Sequence[LayerKind],
) -> None:
    """Run decodes, decodes that share a page, a suffix and a fresh prompt through every layer kind.

    Kernels are loaded, or compiled, at the first use: better now than at the first request.
    """
    own = np.arange(10, dtype=np.int32)
    sharers = np.array([0, 1, 0, 2], dtype=np.int32)
    shared = (SharedPrefix(0, 2, 1),) if backend.reads_shared_once else ()
    for queries, lens, pages, groups in (
        ((1, 2), (3, 5), own[:8], ()),
        ((4, 6), (4, 6), own, ()),
        ((1, 1), (2, 2), sharers, shared),
    ):
        tokens = sum(queries)
        batch = PagedBatch(
            qo_indptr=np.cumsum([0, *queries], dtype=np.int32),
            kv_indptr=np.cumsum([0, *lens], dtype=np.int32),
            kv_indices=pages,
            kv_last_page_len=np.ones(2, dtype=np.int32),
            page_size=1,
            shared=groups,
        )
        backend.plan(batch)
        for kind in dict.fromkeys(kinds):

            def zeros(rows: int, heads: int, dim: int) -> torch.Tensor:
                return torch.zeros(rows, heads, dim, dtype=dtype, device=device)

            out = backend.run(
                zeros(tokens, kind.query_heads, kind.head_dim),
                zeros(tokens, kind.kv_heads, kind.head_dim),
                zeros(tokens, kind.kv_heads, kind.value_dim),
                zeros(len(own), kind.kv_heads, kind.head_dim)[:, None],
                zeros(len(own), kind.kv_heads, kind.value_dim)[:, None],
                scale=kind.scale,
                window=kind.window,
                softcap=kind.softcap,
            )
            if out.any():  # copies to the host: a failed launch shows here
                raise RuntimeError("its kernels give wrong results")
