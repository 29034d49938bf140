"""Attention over pages of MLA's latents with FlashInfer's kernels, on NVIDIA GPUs.

One wrapper takes decodes, suffixes and fresh prompts. Each decode reads a shared prefix by itself:
the kernel that merges two states has no room for many heads of 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from radixcache.kernels.attention import (
    Arrays,
    AttentionPlan,
    FixedShape,
    LayerInputs,
    LayerKind,
    PagedBatch,
)
from radixcache.kernels.flashinfer.attention import FlashInferAttention
from radixcache.kernels.flashinfer.plan import flashinfer, weigh_sinks

LATENT, ROTATED = 512, 64
"""The one supported shape: that of DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash."""
MOST_HEADS = 128


@dataclass(frozen=True, slots=True)
class FlashInferMLAPlan(AttentionPlan):
    """The planned wrapper of each kind of layer, and the slots [T] of the new tokens."""

    arrays: list[torch.Tensor]
    slots: torch.Tensor
    wrappers: dict[LayerKind, Any]

    @torch.inference_mode()
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        query, key, value, pages, layer, sinks, _ = inputs
        for side, new in zip(pages, (key, value), strict=True):
            side.flatten(0, 1).index_copy_(0, self.slots.long(), new)
        heads, dims = layer.query_heads, (layer.head_dim, layer.value_dim)
        missing = query.new_zeros(len(query), _planned_heads(heads) - heads, query.shape[2])
        out, lse = self.wrappers[layer].run(
            query=torch.cat([query, missing], dim=1).split(dims, dim=2),
            kv_cache=(pages.k[:, :, 0], pages.v[:, :, 0]),
            return_lse=True,
        )
        out = out[:, :heads].contiguous()
        return out if sinks is None else weigh_sinks(out, lse[:, :heads], sinks)


class FlashInferMLA(FlashInferAttention):
    """`AttentionBackend` for MLA in float16 and bfloat16 on an NVIDIA GPU.

    Raises:
        ValueError: FlashInfer has no kernel for this dtype or these layers.
    """

    name = f"FlashInfer {flashinfer.__version__}, over latents"
    max_fixed_tokens = 0  # its kernel's shape depends on the mean number of new tokens

    def _check(self, kind: LayerKind) -> None:
        if (kind.head_dim, kind.value_dim) != (LATENT, ROTATED):
            dims = f"{kind.head_dim} and {kind.value_dim}, only of {LATENT} and {ROTATED}"
            raise ValueError(f"it has no kernel for MLA of {dims}")
        if kind.query_heads > MOST_HEADS or kind.window or kind.softcap:
            raise ValueError(f"its MLA has no window, no cap and at most {MOST_HEADS} heads")

    @torch.inference_mode()  # what is written here may be written again inside of it
    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        # What has a fixed length goes first, so that it keeps its address.
        tables = (batch.slots(), batch.qo_indptr, batch.kv_indptr, batch.kv_lens, batch.kv_indices)
        with self._uploads.stage([*arrays, *tables], fixed is not None) as staged:
            *given, slots, qo_indptr, kv_indptr, kv_lens, indices = staged
            metadata = flashinfer.mla.MLAPlanMetadata.csr(
                qo_indptr.host, kv_indptr.host, indices.device, kv_lens.host
            )
            wrappers = {kind: self._wrapper(kind, fixed) for kind in self._kinds}
            for kind, wrapper in wrappers.items():
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
        return FlashInferMLAPlan([array.device for array in given], slots.device, wrappers)

    def _wrapper(self, kind: LayerKind, fixed: FixedShape | None) -> Any:
        """The wrapper for these layers; each fixed shape has its own, with its own buffers."""
        if ("decode", kind, fixed) not in self._wrappers.made:
            buffers: dict[str, Any] = {}
            if fixed:
                size = fixed.sequences
                indices = self._wrappers.fixed_indices[False, "decode"]
                buffers = {
                    "use_cuda_graph": True,
                    "qo_indptr": indices.new_zeros(size + 1),
                    "kv_indptr": indices.new_zeros(size + 1),
                    "kv_indices": indices,
                    "kv_len_arr": indices.new_zeros(size),
                }
            wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper
            self._wrappers.made["decode", kind, fixed] = wrapper(
                self._wrappers.workspace, backend="fa2", **buffers
            )
        return self._wrappers.made["decode", kind, fixed]


def _planned_heads(heads: int) -> int:
    """The next power of two: queries of zeros fill up to it (GLM-4.7-Flash has 20 heads).

    Where a tile of 64 or 128 rows cuts a query's heads, the kernels may omit its last key, and
    plan() refuses that.
    """
    return 1 << (heads - 1).bit_length()
