"""Attention over pages with FlashInfer's kernels, on NVIDIA GPUs.

A step's decodes (one new token each) come first in its batch and go to the decode kernel. The other
rows go to one causal prefill over pages, whose alignment at the bottom right is what a suffix after
a cached prefix needs, or over the new tokens alone if none of them has a cached prefix. In CUDA
graphs of steps with prefill, that kernel takes all rows.

Where decodes share a prefix (`PagedBatch.shared`), a cascade of two levels reads it once for each
group: all its queries over the shared pages, each query over the pages of its own, then a merge of
the two states.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Thread
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixcache.errors import first_line
from radixcache.kernels.attention import (
    Arrays,
    AttentionBackend,
    AttentionPlan,
    FixedShape,
    Fp8Pages,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
)
from radixcache.kernels.cascade import MIN_ROWS, split_levels
from radixcache.kernels.fallback import first_that_runs
from radixcache.kernels.kv_format import FP8, encode
from radixcache.kernels.load_flashinfer import explain_failure, load_flashinfer
from radixcache.kernels.upload import Staged, StepUploads

flashinfer = load_flashinfer()

_log = logging.getLogger("radixcache")

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
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

_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation says; too little for wide groups
_WRAPPER_BYTES = 8 << 20  # each wrapper's own workspace on the device, for its work split
_Use = Literal["decode", "prefill", "ragged", "shared"]


class _Tables(NamedTuple):
    """The index arrays of some sequences of a step."""

    indices: Staged
    write_indices: Staged
    qo_indptr: Staged
    kv_indptr: Staged
    last_page_len: Staged
    kv_lens: Staged
    sequence: Staged  # of each new token
    position: Staged  # of each new token, in these tables


class _Part(NamedTuple):
    """Some rows of a step, and the planned wrapper for each kind of layer."""

    use: _Use
    rows: slice
    tables: _Tables
    wrappers: dict[LayerKind, Any]


@dataclass(frozen=True, slots=True)
class FlashInferPlan(AttentionPlan):
    """The parts of a batch; `shared` is the cascade's first level, and `in_group` [decodes] uint8
    marks the decodes that are in it."""

    arrays: list[torch.Tensor]
    parts: list[_Part]
    shared: _Part | None
    in_group: torch.Tensor | None

    @torch.inference_mode()
    def run(self, inputs: LayerInputs) -> torch.Tensor:
        query, key, value, pages, layer, sinks = inputs
        options = _scales(pages)
        if isinstance(pages, Fp8Pages):  # appending copies bytes
            key = encode(key, FP8, pages.k_scale)
            value = encode(value, FP8, pages.v_scale)
        for part in self.parts:  # write all K/V first: a row may attend to those of other rows
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


class FlashInferBackend(AttentionBackend):
    """`AttentionBackend` for float16 and bfloat16 on an NVIDIA GPU.

    Args:
        kinds: every kind of layer that the model has.
        kv_dtype: of the pages: `dtype`, or fp8. fp8 is read by fa2 alone, and from pages alone: a
            fresh prompt would else attend over what is not rounded, and a hit over what is.

    Raises:
        ValueError: FlashInfer has no kernel for this dtype or these layers.
    """

    name = f"FlashInfer {flashinfer.__version__}"
    kv_dtypes: tuple[torch.dtype, ...] = ()
    max_fixed_rows = MAX_FIXED_ROWS
    max_fixed_tokens = MAX_FIXED_TOKENS

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kinds: Sequence[LayerKind],
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"it computes in float16 and bfloat16, not {dtype}")
        for kind in kinds:
            self._check(kind)
        self.device, self.dtype, self._kv_dtype = device, dtype, kv_dtype or dtype
        if kv_dtype == FP8:
            self.kv_dtypes, self.name = (FP8,), f"{self.name} over fp8"
        self._kinds = list(dict.fromkeys(kinds))
        # A window hides another part of the shared prefix from each row; and the kernel that
        # merges two states has at most 1,024 threads with eight elements each.
        self.reads_shared_once = all(
            kind.window is None and not kind.mla and kind.query_heads * kind.head_dim <= 8 * 1024
            for kind in kinds
        )
        self._workspace = torch.zeros(
            max(_WORKSPACE, *(_split_kv_bytes(kind, device) for kind in kinds)),
            dtype=torch.uint8,
            device=device,
        )
        self._uploads = StepUploads(device)
        self._window_uploads = StepUploads(device)  # of the tables of layers with a window
        self._fixed_indices: dict[tuple[bool, str], torch.Tensor] = {}
        self._fixed_ints: dict[tuple[_Use, LayerKind], torch.Tensor] = {}
        self._fixed_in_group: dict[int, torch.Tensor] = {}
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        plain = [kind for kind in self._kinds if kind.window is None and kind.softcap is None]
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        self._for_hopper = plain if hopper and self._kv_dtype == dtype else []
        """Kinds of layers for which there are kernels that use this GPU better than fa2's."""
        self._fa3: set[LayerKind] = set()
        """Those whose fa3 kernel is compiled and loaded."""
        self._short_prefills: Any = None
        """The module of Triton's prefills, if they run."""

    def compile_in_background(self) -> None:
        if self._for_hopper:
            Thread(target=self._load_fa3, args=(self._for_hopper,), name="fa3", daemon=True).start()

    def _load_short_prefills(self) -> Any:
        from radixcache.kernels import triton_prefill

        for kind in self._for_hopper:
            triton_prefill.try_prefill(kind, self.dtype, self.device)
        return triton_prefill

    def _load_fa3(self, kinds: Sequence[LayerKind]) -> None:
        start, types = time.perf_counter(), (self.dtype,) * 3
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

    def _check(self, kind: LayerKind) -> None:
        if kind.head_dim not in HEAD_DIMS or kind.value_dim != kind.head_dim:
            raise ValueError(f"it has no kernel for heads of {kind.head_dim}/{kind.value_dim}")

    @torch.inference_mode()
    def allocate_fixed(self, max_rows: int, max_indices: int) -> None:
        assert max_rows <= self.max_fixed_rows
        if self._fixed_indices:  # of another engine, whose graphs read these buffers
            if len(self._fixed_indices[False, "shared"]) < max_indices:
                raise ValueError(f"room was made for fewer page numbers than {max_indices}")
            return
        if self._for_hopper:
            self._short_prefills, errors = first_that_runs(self._load_short_prefills)
            if errors:
                _log.info("prompts in graphs go to fa2: Triton: %s", first_line(errors[0]))
        windowed = any(kind.window is not None for kind in self._kinds)
        for uploads in (self._uploads, self._window_uploads)[: 1 + windowed]:
            uploads.allocate_fixed(_upload_capacity(max_rows, max_indices))
        for key in [(False, "decode"), (False, "shared"), (True, "decode")][: 2 + windowed]:
            self._fixed_indices[key] = torch.zeros(
                max_indices, dtype=torch.int32, device=self.device
            )

    def fixed_bytes(self, sizes: Sequence[int], max_indices: int) -> int:
        uses = 2 + self.reads_shared_once
        int32s = _upload_capacity(max(sizes), max_indices) + 2 * max_indices
        return uses * len(self._kinds) * _WRAPPER_BYTES + 4 * int32s

    @torch.inference_mode()  # what is written here may be written again inside of it
    def _plan(self, batch: PagedBatch, arrays: Arrays, fixed: FixedShape | None) -> AttentionPlan:
        decodes, total = batch.num_decodes, len(batch.query_lens)
        if fixed and decodes < total:
            assert fixed.sequences <= MAX_FIXED_SEQUENCES and fixed.tokens <= self.max_fixed_tokens
            assert not batch.shared
            decodes = 0  # how many there are changes from batch to batch: all rows are prefill
        levels = None
        if batch.shared:
            levels = split_levels(batch, max_groups(decodes) if fixed else None)
        own = batch if levels is None else levels.own
        subs: list[tuple[_Use, PagedBatch]] = []
        if decodes:
            subs.append(("decode", own.rows(0, decodes)))
        if decodes < total:
            rest = own.rows(decodes, total)
            plain = self._kv_dtype == self.dtype and not fixed
            fresh = plain and bool((rest.query_lens == rest.kv_lens).all())
            subs.append(("ragged" if fresh else "prefill", rest))
        if levels is not None:
            subs.append(("shared", levels.shared))
        # What has a fixed length goes first, so that it keeps its address.
        staging: list[NDArray[np.integer]] = [*arrays]
        if levels is not None:
            staging.append(levels.in_group)
        staging += [array for _, sub in subs for array in _fixed_arrays(sub)]
        for _, sub in subs:
            staging += [sub.kv_indices, *([] if sub.write_indices is None else [sub.write_indices])]
        uploads = self._uploads if batch.first is None else self._window_uploads
        with uploads.stage(staging, fixed is not None) as staged:
            return self._plan_staged(batch, subs, len(arrays), iter(staged), fixed)

    def _plan_staged(
        self,
        batch: PagedBatch,
        subs: Sequence[tuple[_Use, PagedBatch]],
        num_arrays: int,
        staged: Iterator[Staged],
        fixed: FixedShape | None,
    ) -> FlashInferPlan:
        """Plan the parts `subs` of a step, whose arrays come in the order of `_plan`."""
        cascade = bool(batch.shared)
        given = [next(staged).device for _ in range(num_arrays)]
        in_group = self._bytes(next(staged).device, fixed) if cascade else None
        tables = [[*islice(staged, len(_Tables._fields) - 2)] for _ in subs]
        parts: list[_Part] = []
        end = 0
        for (use, sub), arrays_of_sub in zip(subs, tables, strict=True):
            first = 0 if use == "shared" else end
            end = first + int(sub.qo_indptr[-1])
            indices = next(staged)
            to = indices if sub.write_indices is None else next(staged)
            part = _Part(use, slice(first, end), _Tables(indices, to, *arrays_of_sub), {})
            for kind in filter(batch.serves, self._kinds):
                part.wrappers[kind] = self._plan_wrapper(part, kind, batch, fixed)
            parts.append(part)
        shared = parts.pop() if cascade else None
        return FlashInferPlan(given, parts, shared, in_group)

    def _bytes(self, flags: torch.Tensor, fixed: FixedShape | None) -> torch.Tensor:
        """`flags` as uint8, for a fixed shape at an address of their own."""
        if fixed is None:
            return flags.byte()
        size = len(flags)
        if size not in self._fixed_in_group:
            self._fixed_in_group[size] = flags.byte()
        return self._fixed_in_group[size].copy_(flags)

    def _plan_wrapper(
        self, part: _Part, kind: LayerKind, batch: PagedBatch, fixed: FixedShape | None
    ) -> Any:
        """A wrapper that is planned for these rows and layers, or what runs like one."""
        use, tables = part.use, part.tables
        if use == "prefill" and fixed and self._goes_to_triton(kind, fixed):
            indices = (tables.qo_indptr, tables.kv_indptr, tables.indices, tables.kv_lens)
            return self._short_prefills.TritonPrefill(
                kind, batch.page_size, *(index.device for index in indices), 0, *fixed,
                workspace=self._workspace,
            )  # fmt: skip
        count, tokens = len(tables.kv_lens.host), len(tables.sequence.host)
        is_long = not fixed and use in ("prefill", "ragged") and tokens >= FA3_TOKENS * count
        # Named explicitly: "auto" would take fa3 on Hopper for everything.
        version = "fa3" if is_long and kind in self._fa3 else "fa2"
        key = (use, kind, fixed, version, batch.first is not None)
        if key not in self._wrappers:
            self._wrappers[key] = self._make_wrapper(*key)
        wrapper = self._wrappers[key]
        options = {
            "num_qo_heads": kind.query_heads,
            "num_kv_heads": kind.kv_heads,
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "q_data_type": self.dtype,
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
        if self._short_prefills is None or kind not in self._for_hopper or kind.head_dim > 128:
            return False
        heads, group = kind.query_heads, kind.query_heads // kind.kv_heads
        return fixed.tokens * group >= TRITON_ROWS and fixed.tokens * heads >= TRITON_HEADS

    def _make_wrapper(
        self, use: _Use, kind: LayerKind, fixed: FixedShape | None, version: str, windowed: bool
    ) -> Any:
        options: dict[str, Any] = {"kv_layout": "NHD", "backend": version}
        if use == "ragged":
            return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, **options)
        make, qo = flashinfer.BatchPrefillWithPagedKVCacheWrapper, {}
        if use == "decode":
            make = flashinfer.BatchDecodeWithPagedKVCacheWrapper
            options["use_tensor_cores"] = kind.query_heads // kind.kv_heads >= TENSOR_CORE_GROUP
        if fixed is None:
            return make(self._workspace, **options)
        size = max_groups(fixed.sequences) if use == "shared" else fixed.sequences

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self.device)

        ending = "buffer" if use == "decode" else "buf"
        if use != "decode":
            qo["qo_indptr_buf"] = zeros(size + 1)
        options |= {
            "use_cuda_graph": True,
            **qo,
            f"paged_kv_indptr_{ending}": zeros(size + 1),
            f"paged_kv_indices_{ending}": self._fixed_indices[
                windowed, "shared" if use == "shared" else "decode"
            ],
            f"paged_kv_last_page_len_{ending}": zeros(size),
        }
        wrapper = make(self._workspace, **options)
        # Wrappers share it: the next plan is written after the kernels that read this one.
        if (use, kind) not in self._fixed_ints:
            self._fixed_ints[use, kind] = self._workspace.new_empty(_WRAPPER_BYTES)
        wrapper.reset_workspace_buffer(self._workspace, self._fixed_ints[use, kind])
        return wrapper


def max_groups(size: int) -> int:
    """The most groups in a fixed launch for `size` rows; the rows outside of groups count as one.

    A tight bound matters: fa2 sizes its query tiles for the rows that are left if all groups but
    one have a single row, so with more, a group of all rows would read its pages in small tiles.
    """
    return size // MIN_ROWS + 1


def _upload_capacity(max_rows: int, max_indices: int) -> int:
    """int32s of the uploaded arrays of a batch: decodes on both levels, or with prefill."""
    return 2 * max_indices + 24 * (max(max_rows, MAX_FIXED_TOKENS) + 4)


def _fixed_arrays(batch: PagedBatch) -> list[NDArray[np.integer]]:
    """The fields of `_Tables` whose lengths depend only on the numbers of sequences and tokens: all
    but the page numbers."""
    sequence = np.arange(len(batch.query_lens))
    if batch.num_decodes < len(sequence):
        sequence = np.repeat(sequence, batch.query_lens)
    lengths = (batch.kv_last_page_len, batch.kv_lens)
    return [batch.qo_indptr, batch.kv_indptr, *lengths, sequence, batch.positions]


def _split_kv_bytes(kind: LayerKind, device: torch.device) -> int:
    """Bytes that fa2 may need for the partial results of a split KV.

    It needs two blocks of 128 rows per SM, or all query tiles of a fixed launch: a small one for
    each decode, and one of 128 rows for each group of the shared level or each sequence of a batch
    with prefill, besides the tiles that its tokens fill. MLA's kernels need two tiles of 64 rows
    per SM, which are 17 MB with 132 SMs and fit anyway.
    """
    if kind.mla:
        return 0
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    group = kind.query_heads // kind.kv_heads
    tile = max(16 if group <= 16 else 64, 128 // MIN_ROWS)
    prefill = MAX_FIXED_TOKENS * group + MAX_FIXED_SEQUENCES * 128
    rows = max((2 * sms // kind.kv_heads) * 128, MAX_FIXED_ROWS * (group + tile), prefill)
    return rows * kind.query_heads * 4 * (kind.value_dim + 1)
