"""Chooses the attention backend: FlashInfer where it works, else plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from radixcache.kernels.attention import AttentionBackend, LayerKind, PagedBatch
from radixcache.kernels.torch_backend import TorchBackend

_log = logging.getLogger("radixcache")


def choose_backend(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
) -> AttentionBackend:
    """FlashInfer on a GPU whose kernels run for all these layers, else torch.

    Torch on a GPU is much slower, so taking it there is a warning that says why.
    """
    if device.type != "cuda":
        return TorchBackend(device)
    try:
        from radixcache.kernels.flashinfer_backend import FlashInferBackend

        backend = FlashInferBackend(device, dtype, kinds)
        try_out(backend, device, dtype, kinds)
    except ImportError as error:
        reason = f"FlashInfer is not installed ({error}): pip install 'radixcache[cuda]'"
    except Exception as error:  # whatever a missing kernel, compiler or driver raises
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        reason = f"FlashInfer, from 'radixcache[cuda]', does not run here: {first}"
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
    """Run a decode, a suffix and a fresh prompt through every kind of layer.

    Kernels are loaded, or compiled, at the first use: better now than at the first request.
    """
    for queries, lens in (((1, 2), (3, 5)), ((4, 6), (4, 6))):
        tokens = sum(queries)
        batch = PagedBatch(
            qo_indptr=np.cumsum([0, *queries], dtype=np.int32),
            kv_indptr=np.cumsum([0, *lens], dtype=np.int32),
            kv_indices=np.arange(sum(lens), dtype=np.int32),
            kv_last_page_len=np.ones(2, dtype=np.int32),
            page_size=1,
        )
        backend.plan(batch)
        for kind in dict.fromkeys(kinds):

            def zeros(rows: int, heads: int, dim: int) -> torch.Tensor:
                return torch.zeros(rows, heads, dim, dtype=dtype, device=device)

            out = backend.run(
                zeros(tokens, kind.query_heads, kind.head_dim),
                zeros(tokens, kind.kv_heads, kind.head_dim),
                zeros(tokens, kind.kv_heads, kind.value_dim),
                zeros(sum(lens), kind.kv_heads, kind.head_dim)[:, None],
                zeros(sum(lens), kind.kv_heads, kind.value_dim)[:, None],
                scale=kind.scale,
                window=kind.window,
                softcap=kind.softcap,
            )
            if out.any():  # copies to the host: a failed launch shows here
                raise RuntimeError("its kernels give wrong results")
