"""Attention over pages of MLA's latents with FlashInfer's kernels, on NVIDIA GPUs.

One wrapper takes decodes, suffixes and fresh prompts alike, with the projections absorbed. A prefix
that decodes share is read once for each: the kernel that merges two states has no room for a head
of 512. Decodes run in CUDA graphs, which plan into buffers that stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.kernels.attention import AttentionBackend, LayerKind, PagedBatch
from radixcache.kernels.load_flashinfer import load_flashinfer
from radixcache.kernels.upload import Fence, Upload

flashinfer = load_flashinfer()

DTYPES = (torch.float16, torch.bfloat16)
LATENT, ROTATED = 512, 64
"""The one shape of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash, for which FlashInfer's kernels
are made."""
MOST_HEADS = 128

MAX_FIXED_ROWS = 256
"""Sequences in a batch for `plan_fixed`."""

_WORKSPACE = 128 << 20  # bytes; partial results of two tiles an SM are 17 MB on 132 SMs
_WRAPPER_BYTES = 8 << 20  # each wrapper's own workspace on the device, for its work split


class FlashInferMLABackend(AttentionBackend):
    """`AttentionBackend` for MLA in float16 and bfloat16 on an NVIDIA GPU.

    Args:
        kinds: every kind of layer that the model has.

    Raises:
        ValueError: FlashInfer has no kernel for this dtype or these layers.
    """

    name = f"FlashInfer {flashinfer.__version__}, over latents"
    max_fixed_rows = MAX_FIXED_ROWS

    def __init__(
        self, device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"it computes in float16 and bfloat16, not {dtype}")
        for kind in kinds:
            if (kind.head_dim, kind.value_dim) != (LATENT, ROTATED):
                raise ValueError(
                    f"it has no kernel for MLA of {kind.head_dim} and {kind.value_dim}, "
                    f"only of {LATENT} and {ROTATED}"
                )
            if kind.query_heads > MOST_HEADS or kind.window or kind.softcap:
                raise ValueError(f"its MLA has no window, no cap and at most {MOST_HEADS} heads")
        self.device, self.dtype = device, dtype
        self._kinds = list(dict.fromkeys(kinds))
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        self._fence = Fence(device)
        self._upload = Upload(device)
        self._fixed_upload: Upload | None = None
        self._fixed_indices = torch.zeros(0, dtype=torch.int32, device=device)
        self._made: dict[tuple[LayerKind, int], Any] = {}
        self._wrappers: dict[LayerKind, Any] = {}
        self._slots: torch.Tensor | None = None

    def plan(self, batch: PagedBatch, *arrays: NDArray[np.integer]) -> list[torch.Tensor]:
        return self._plan(batch, arrays, self._upload, 0)

    @torch.inference_mode()
    def allocate_fixed(self, max_rows: int, max_indices: int) -> None:
        assert max_rows <= self.max_fixed_rows
        if self._fixed_upload is not None:  # of another engine, whose graphs read these buffers
            if len(self._fixed_indices) < max_indices:
                raise ValueError(f"room was made for fewer page numbers than {max_indices}")
            return
        self._fixed_upload = Upload(self.device, _upload_capacity(max_rows, max_indices))
        self._fixed_indices = self._fixed_indices.new_zeros(max_indices)

    def fixed_bytes(self, sizes: Sequence[int], max_indices: int) -> int:
        int32s = _upload_capacity(max(sizes), max_indices) + max_indices
        return len(sizes) * len(self._kinds) * _WRAPPER_BYTES + 4 * int32s

    def plan_fixed(self, batch: PagedBatch, *arrays: NDArray[np.integer]) -> list[torch.Tensor]:
        assert self._fixed_upload is not None, "allocate_fixed() first"
        assert batch.num_decodes == len(batch.query_lens), "only decodes have a fixed shape"
        return self._plan(batch, arrays, self._fixed_upload, len(batch.query_lens))

    @torch.inference_mode()
    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._slots is None:
            raise RuntimeError("run() before plan()")
        slots, heads = self._slots.long(), query.shape[1]
        k_pages.flatten(0, 1).index_copy_(0, slots, key)
        v_pages.flatten(0, 1).index_copy_(0, slots, value)
        dims = (key.shape[2], value.shape[2])
        kind = LayerKind(heads, key.shape[1], *dims, scale, window, softcap, mla=True)
        missing = query.new_zeros(len(query), _planned_heads(heads) - heads, query.shape[2])
        out, lse = self._wrappers[kind].run(
            query=torch.cat([query, missing], dim=1).split(dims, dim=2),
            kv_cache=(k_pages[:, :, 0], v_pages[:, :, 0]),
            return_lse=True,
        )
        out = out[:, :heads].contiguous()
        if sinks is not None:
            out *= torch.sigmoid(lse[:, :heads] * math.log(2) - sinks.float())[..., None]
        return out

    @torch.inference_mode()  # what is written here may be written again inside of it
    def _plan(
        self,
        batch: PagedBatch,
        arrays: Sequence[NDArray[np.integer]],
        upload: Upload,
        size: int,
    ) -> list[torch.Tensor]:
        """Plan for launches of a fixed shape if `size`, the number of sequences, is not 0."""
        if (batch.query_lens > batch.kv_lens).any():
            raise ValueError("a sequence has more new tokens than its pages hold")
        self._slots = None
        # What has a fixed length goes first, so that it keeps its address.
        tables = (batch.slots(), batch.qo_indptr, batch.kv_indptr, batch.kv_lens, batch.kv_indices)
        self._fence.wait()  # until the step before no longer reads the pinned buffer
        try:
            *given, slots, qo_indptr, kv_indptr, kv_lens, indices = upload([*arrays, *tables])
            metadata = flashinfer.mla.MLAPlanMetadata.csr(
                qo_indptr.host, kv_indptr.host, indices.device, kv_lens.host
            )
            self._wrappers = {kind: self._wrapper(kind, size) for kind in self._kinds}
            for kind, wrapper in self._wrappers.items():
                wrapper.plan(
                    metadata=metadata,
                    num_heads=_planned_heads(kind.query_heads),
                    head_dim_ckv=kind.head_dim,
                    head_dim_kpe=kind.value_dim,
                    page_size=batch.page_size,
                    causal=True,
                    sm_scale=kind.scale,
                    q_data_type=self.dtype,
                    kv_data_type=self.dtype,
                    query_layout="split",
                    kv_cache_layout="split",
                    lse_mode="base2",
                )
        finally:
            self._fence.record()
        self._slots = slots.device
        return [array.device for array in given]

    def _wrapper(self, kind: LayerKind, size: int) -> Any:
        """The wrapper of these layers, with buffers of its own for each `size`."""
        if (kind, size) not in self._made:
            buffers: dict[str, Any] = {}
            if size:
                zeros = self._fixed_indices.new_zeros
                buffers = {
                    "use_cuda_graph": True,
                    "qo_indptr": zeros(size + 1),
                    "kv_indptr": zeros(size + 1),
                    "kv_indices": self._fixed_indices,
                    "kv_len_arr": zeros(size),
                }
            self._made[kind, size] = flashinfer.mla.BatchMLAPagedAttentionWrapper(
                self._workspace, backend="fa2", **buffers
            )
        return self._made[kind, size]


def _planned_heads(heads: int) -> int:
    """The next power of two, filled up with queries of zeros: GLM-4.7-Flash has 20.

    Where a query's heads are cut by a tile of 64 or 128 rows, the kernels may leave out its last
    key, and plan() refuses that.
    """
    return 1 << (heads - 1).bit_length()


def _upload_capacity(max_rows: int, max_indices: int) -> int:
    """int32s of the arrays that go up for a batch of decodes."""
    return max_indices + 16 * (max_rows + 4)
