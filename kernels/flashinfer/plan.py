"""A planned step for FlashInfer: its parts, each with a wrapper for every kind of layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from radixcache.kernels.attention import (
    AttentionPlan,
    Fp8Pages,
    LayerInputs,
    LayerKind,
    LayerPages,
)
from radixcache.kernels.flashinfer.load import load_flashinfer
from radixcache.kernels.kv_format import FP8, encode
from radixcache.kernels.upload import Staged

flashinfer = load_flashinfer()

Use = Literal["decode", "prefill", "ragged", "shared"]


class Tables(NamedTuple):
    """The index arrays of some sequences of a step."""

    indices: Staged
    write_indices: Staged
    qo_indptr: Staged
    kv_indptr: Staged
    last_page_len: Staged
    kv_lens: Staged
    sequence: Staged  # of each new token
    position: Staged  # of each new token, in these tables


class Part(NamedTuple):
    """Some rows of a step, and the planned wrapper for each kind of layer."""

    use: Use
    rows: slice
    tables: Tables
    wrappers: dict[LayerKind, Any]


@dataclass(frozen=True, slots=True)
class FlashInferPlan(AttentionPlan):
    """The parts of a batch; `shared` is the cascade's first level, and `in_group` [decodes] uint8
    marks the decodes that are in it."""

    arrays: list[torch.Tensor]
    parts: list[Part]
    shared: Part | None
    in_group: torch.Tensor | None

    @torch.inference_mode()
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        query, key, value, pages, layer, sinks, written = inputs
        options = _scales(pages)
        if isinstance(pages, Fp8Pages):  # appending copies bytes
            key = encode(key, FP8, pages.k_scale)
            value = encode(value, FP8, pages.v_scale)
        for part in () if written else self.parts:  # all K/V first: rows see those of others
            tables = part.tables
            flashinfer.append_paged_kv_cache(
                append_key=key[part.rows],
                append_value=value[part.rows],
                batch_indices=tables.sequence.device,
                positions=tables.position.device,
                paged_kv_cache=pages,
                kv_indices=tables.write_indices.device,
                kv_indptr=tables.kv_indptr.device,
                kv_last_page_len=tables.last_page_len.device,
                kv_layout="NHD",
            )
        out = torch.empty_like(query)
        if sinks is not None:
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        for part in self.parts:
            rows, wrapper = part.rows, part.wrappers[layer]
            if sinks is not None:
                options |= {"lse": lse[rows], "return_lse": True}
            if part.use == "ragged":
                wrapper.run(query[rows], key[rows], value[rows], out=out[rows], **options)
            elif part.use == "decode" and self.shared is not None:
                own = self._run_levels(query[rows], pages, wrapper, layer, out[rows])
                if sinks is not None:
                    lse[rows] = own
            else:
                wrapper.run(query[rows], pages, out=out[rows], **options)
        return out if sinks is None else weigh_sinks(out, lse, sinks)

    def _run_levels(
        self,
        query: torch.Tensor,
        pages: LayerPages,
        wrapper: Any,
        layer: LayerKind,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of the decodes over shared pages and their own, into `out`; returns the base-2
        logarithm of the sums of weights."""
        assert self.shared is not None
        shared_out, scales = torch.empty_like(query), _scales(pages)
        lse, shared_lse = query.new_empty(2, *query.shape[:2], dtype=torch.float32)
        wrapper.run(query, pages, out=out, lse=lse, return_lse=True, **scales)
        self.shared.wrappers[layer].run(
            query, pages, out=shared_out, lse=shared_lse, return_lse=True, **scales
        )
        flashinfer.merge_state_in_place(out, lse, shared_out, shared_lse, mask=self.in_group)
        return lse


def _scales(pages: LayerPages) -> dict[str, Any]:
    if not isinstance(pages, Fp8Pages):
        return {}
    return {"k_scale": pages.k_scale, "v_scale": pages.v_scale}


def weigh_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """`out` [T, heads, dim], changed in place, beside sinks [heads]; `lse` [T, heads] of base 2."""
    return out.mul_(torch.sigmoid(lse * math.log(2) - sinks.float())[..., None])
