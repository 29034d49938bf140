"""FlashInfer's wrappers, each planned for some rows of a step and one kind of layer.

A wrapper is made once for its use, its layers and the shape of its launch, and planned anew in each
step. fa2 computes but for long prompts, which go to fa3 on Hopper once its kernels are compiled,
and short ones in CUDA graphs, which may go to another library there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, cast

import torch

from radixcache.kernels.attention import FixedShape, LayerKind, PagedBatch
from radixcache.kernels.cascade import MIN_ROWS
from radixcache.kernels.flashinfer.load import explain_failure
from radixcache.kernels.flashinfer.plan import Part, Use, flashinfer

_log = logging.getLogger("radixcache")

TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decodes run on tensor cores."""

MAX_FIXED_ROWS = 288
"""The most decodes for `plan_fixed`: of 256 sequences, and one for each drafted token."""

MAX_FIXED_TOKENS, MAX_FIXED_SEQUENCES = 512, 64
"""The most new tokens and sequences of a batch with prefill for `plan_fixed`."""

FA3_TOKENS = 512
"""The mean number of new tokens per sequence from which fa3 takes 0.44 to 0.72 of fa2's time (H100,
up to 8,192 tokens after up to 30,000). Below, fa3 is slower: it neither splits the KV nor packs a
group of query heads."""

TRITON_ROWS, TRITON_HEADS = 256, 2048
"""New tokens times query heads of a group, and times all query heads, from which Triton prefills in
graphs on Hopper: in 0.56 to 1.11 of fa2's time (H200; 40 steps of 64 to 512 tokens after up to
32,768, decodes among them; 0.89 in the mean). With fewer it is slower."""

WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation says; too little for wide groups
WRAPPER_BYTES = 8 << 20  # each wrapper's own workspace on the device, for its work split
FindPrefill = Callable[[torch.device, torch.dtype, Sequence[LayerKind]], Any]

"""Gives another library's prefill for graphs on Hopper, if it runs for these layers."""


class Wrappers:
    """The wrappers of one backend, and the memory on the device that they share.

    Args:
        kv_dtype: of the pages: `dtype`, or fp8, which fa2 alone reads.

    Attributes:
        fixed_indices: page numbers of fixed launches, by whether the tables are those of layers
            with a window, and by "decode" or "shared".
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kinds: Sequence[LayerKind],
        kv_dtype: torch.dtype,
        find_short_prefill: FindPrefill,
    ) -> None:
        self._device, self._dtype, self._kinds, self._kv_dtype = device, dtype, kinds, kv_dtype
        self._find_short_prefill, self._short_prefill = find_short_prefill, cast(Any, None)
        self.workspace = torch.zeros(
            max(WORKSPACE, *(_split_kv_bytes(kind, device) for kind in kinds)),
            dtype=torch.uint8,
            device=device,
        )
        self.made: dict[tuple[Any, ...], Any] = {}
        self.fixed_indices: dict[tuple[bool, str], torch.Tensor] = {}
        self._fixed_ints: dict[tuple[Use, LayerKind], torch.Tensor] = {}
        plain = [kind for kind in kinds if kind.window is None and kind.softcap is None]
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        self._for_hopper = plain if hopper and kv_dtype == dtype else []
        """Kinds of layers for which there are kernels that use this GPU better than fa2's."""
        self._fa3: set[LayerKind] = set()
        """Those whose fa3 kernel is compiled and loaded."""

    def compile_in_background(self) -> None:
        if self._for_hopper:
            Thread(target=self._load_fa3, args=(self._for_hopper,), name="fa3", daemon=True).start()

    def allocate_fixed(self, max_indices: int, windowed: bool) -> None:
        """Make the buffers of fixed launches for so many page numbers."""
        if self._for_hopper:
            found = self._find_short_prefill(self._device, self._dtype, self._for_hopper)
            self._short_prefill = found
        for key in [(False, "decode"), (False, "shared"), (True, "decode")][: 2 + windowed]:
            self.fixed_indices[key] = torch.zeros(
                max_indices, dtype=torch.int32, device=self._device
            )

    def planned(
        self, part: Part, kind: LayerKind, batch: PagedBatch, fixed: FixedShape | None
    ) -> Any:
        """A wrapper that is planned for these rows and layers, or what runs like one."""
        use, tables = part.use, part.tables
        if use == "prefill" and fixed and self._goes_to_triton(kind, fixed):
            indices = (tables.qo_indptr, tables.kv_indptr, tables.indices, tables.kv_lens)
            return self._short_prefill(
                kind, batch.page_size, *(index.device for index in indices), 0, *fixed,
                workspace=self.workspace,
            )  # fmt: skip
        count, tokens = len(tables.kv_lens.host), len(tables.sequence.host)
        is_long = not fixed and use in ("prefill", "ragged") and tokens >= FA3_TOKENS * count
        # Named explicitly: "auto" would take fa3 on Hopper for everything.
        version = "fa3" if is_long and kind in self._fa3 else "fa2"
        key = (use, kind, fixed, version, batch.first is not None)
        if key not in self.made:
            self.made[key] = self._make_wrapper(*key)
        wrapper = self.made[key]
        options = {
            "num_qo_heads": kind.query_heads,
            "num_kv_heads": kind.kv_heads,
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._kv_dtype,
        }
        if use == "ragged":
            wrapper.plan(
                qo_indptr=tables.qo_indptr.host,
                kv_indptr=tables.qo_indptr.host,
                head_dim_qk=kind.head_dim,
                causal=True,
                **options,
            )
        elif use == "decode":
            wrapper.plan(
                indptr=tables.kv_indptr.host,
                indices=tables.indices.device,
                last_page_len=tables.last_page_len.host,
                seq_lens=tables.kv_lens.host,
                head_dim=kind.head_dim,
                page_size=batch.page_size,
                **options,
            )
        else:
            wrapper.plan(
                qo_indptr=tables.qo_indptr.host,
                paged_kv_indptr=tables.kv_indptr.host,
                paged_kv_indices=tables.indices.device,
                paged_kv_last_page_len=tables.last_page_len.host,
                seq_lens=tables.kv_lens.host,
                head_dim_qk=kind.head_dim,
                page_size=batch.page_size,
                causal=use == "prefill",  # every query of a group sees all the shared pages
                **options,
            )
        return wrapper

    def _goes_to_triton(self, kind: LayerKind, fixed: FixedShape) -> bool:
        """Whether Triton prefills this shape."""
        if self._short_prefill is None or kind not in self._for_hopper or kind.head_dim > 128:
            return False
        heads, group = kind.query_heads, kind.query_heads // kind.kv_heads
        return fixed.tokens * group >= TRITON_ROWS and fixed.tokens * heads >= TRITON_HEADS

    def _make_wrapper(
        self, use: Use, kind: LayerKind, fixed: FixedShape | None, version: str, windowed: bool
    ) -> Any:
        options: dict[str, Any] = {"kv_layout": "NHD", "backend": version}
        if use == "ragged":
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, **options)
        make, qo = flashinfer.BatchPrefillWithPagedKVCacheWrapper, {}
        if use == "decode":
            make = flashinfer.BatchDecodeWithPagedKVCacheWrapper
            options["use_tensor_cores"] = kind.query_heads // kind.kv_heads >= TENSOR_CORE_GROUP
        if fixed is None:
            return make(self.workspace, **options)
        size = max_groups(fixed.sequences) if use == "shared" else fixed.sequences

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        ending = "buffer" if use == "decode" else "buf"
        if use != "decode":
            qo["qo_indptr_buf"] = zeros(size + 1)
        options |= {
            "use_cuda_graph": True,
            **qo,
            f"paged_kv_indptr_{ending}": zeros(size + 1),
            f"paged_kv_indices_{ending}": self.fixed_indices[
                windowed, "shared" if use == "shared" else "decode"
            ],
            f"paged_kv_last_page_len_{ending}": zeros(size),
        }
        wrapper = make(self.workspace, **options)
        # Wrappers share it: the next plan is written after the kernels that read this one.
        if (use, kind) not in self._fixed_ints:
            self._fixed_ints[use, kind] = self.workspace.new_empty(WRAPPER_BYTES)
        wrapper.reset_workspace_buffer(self.workspace, self._fixed_ints[use, kind])
        return wrapper

    def _load_fa3(self, kinds: Sequence[LayerKind]) -> None:
        start, types = time.perf_counter(), (self._dtype,) * 3
        try:
            for dim in {kind.head_dim for kind in kinds}:
                # No position encoding, no window, no cap, no products in float16.
                rest = (torch.int32, dim, dim, 0, False, False, False)
                flashinfer.prefill.get_batch_prefill_module("fa3", *types, *rest)
                self._fa3 |= {kind for kind in kinds if kind.head_dim == dim}
        except Exception as error:  # whatever a missing compiler raises
            _log.info("long prompts are prefilled by fa2: %s", explain_failure(error))
        else:
            _log.info(
                "long prompts go to fa3 from now on, after %.1f s", time.perf_counter() - start
            )


def max_groups(size: int) -> int:
    """The most groups in a fixed launch for `size` rows; the rows outside of groups count as one.

    The bound is tight, since fa2 sizes its query tiles for the rows that the last group has if all
    others have one. With a higher bound a group of all rows would read its pages in small tiles.
    """
    return size // MIN_ROWS + 1


def _split_kv_bytes(kind: LayerKind, device: torch.device) -> int:
    """Bytes that fa2 may need for the partial results of a split KV.

    It needs two blocks of 128 rows per SM, or, if that is more, all query tiles of a fixed launch.
    A launch has the tiles that its tokens fill, a small one for each decode, and one of 128 rows
    for each group of the shared level, or for each sequence of a batch with prefill. MLA's kernels
    need two tiles of 64 rows per SM, which are 17 MB with 132 SMs and fit anyway.
    """
    if kind.mla:
        return 0
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    group = kind.query_heads // kind.kv_heads
    tile = max(16 if group <= 16 else 64, 128 // MIN_ROWS)
    prefill = MAX_FIXED_TOKENS * group + MAX_FIXED_SEQUENCES * 128
    rows = max((2 * sms // kind.kv_heads) * 128, MAX_FIXED_ROWS * (group + tile), prefill)
    return rows * kind.query_heads * 4 * (kind.value_dim + 1)
