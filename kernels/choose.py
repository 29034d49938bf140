"""Chooses what computes on this machine: one `Trial` after another until one runs right.

`kernels/trial.py` keeps why the earlier ones do not run, for `radixcache info MODEL`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from radixcache.errors import InvalidRequest
from radixcache.kernels import trial
from radixcache.kernels.attention import (
    AttentionBackend,
    Fp8Pages,
    LayerInputs,
    LayerKind,
    LayerPages,
    PagedBatch,
    SharedPrefix,
)
from radixcache.kernels.backend import Backend, TritonKernels
from radixcache.kernels.draw import DrawTokens
from radixcache.kernels.flashinfer.load import explain_failure
from radixcache.kernels.kv_format import FP8, encode
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.library import DTYPES, problem
from radixcache.kernels.native.operators import NativeBackend
from radixcache.kernels.native.sampling import draw_tokens
from radixcache.kernels.recurrence import Recurrence, Slots, Tokens
from radixcache.kernels.spec import Architecture, Unknown
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.experts import GroupedProduct
from radixcache.kernels.torch.operators import TorchBackend
from radixcache.kernels.torch.top_p import Filter, filter_by_sort
from radixcache.kernels.trial import Trial, first_right

_log = logging.getLogger("radixcache")


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    kinds: Sequence[LayerKind],
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The fastest attention whose kernels run for all these layers: on a GPU FlashInfer, then
    Triton; on a CPU native kernels; else torch. Triton has no MLA.

    On a GPU without FlashInfer, a warning says why, and what to do. If `kv_dtype` is not `dtype`,
    FlashInfer reads fp8 only, and no other backend does: `InvalidRequest` without it.
    """
    task = "attention runs"
    if device.type not in ("cuda", "xpu"):
        trials = []
        if device.type == "cpu":
            trials = [Trial("native kernels", partial(make_native, dtype))]
        found = first_right(task, *trials, otherwise=TorchAttention.name, level=logging.DEBUG)
        return found or TorchAttention(device)
    start = time.perf_counter()
    probe = partial(probe_attention, device=device, dtype=dtype, kinds=kinds, kv_dtype=kv_dtype)
    by_flashinfer = Trial[AttentionBackend](
        "FlashInfer",
        partial(make_flashinfer, device, dtype, kinds, kv_dtype),
        probe,
        explain_failure,
    )
    by_triton = Trial("Triton", lambda: make_triton(device, dtype, kinds), probe)
    trials = [by_flashinfer, by_triton]
    if kv_dtype is not None:
        trials = trials[:1] if kv_dtype == FP8 else trials[1:]
    found = first_right(task, *trials, otherwise="plain torch, which is slow on a GPU")
    if found is None and kv_dtype == FP8:
        (reason,) = trial.outcomes[task].reasons
        raise InvalidRequest(f"kv_cache_dtype='fp8' needs FlashInfer: {reason}")
    if found is None:
        return TorchAttention(device)
    if kv_dtype != FP8:  # which torch's does not read
        found.looks_ahead = TorchAttention(device)
    found.compile_in_background()
    _log.info("%s is ready after %.1f s", found.name, time.perf_counter() - start)
    return found


def choose_backend(
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionBackend,
) -> Backend:
    """The kernels of the library that attends, if they run; else torch's.

    Raises:
        Unknown: no kernels run the architecture.
    """
    if attention.room == "native":
        return NativeBackend(architecture, dtype, device, attention)
    has_experts = any(layer.experts for layer in architecture.layers)
    triton = TritonKernels(
        find_recurrence(architecture, device),
        find_grouped_product(device, dtype) if has_experts else None,
        partial(find_linear, device, dtype),
    )
    everything = architecture, dtype, device, attention, triton
    found: Backend | None = None
    if attention.room == "flashinfer":
        from radixcache.kernels.flashinfer import operators as flashinfer

        make = partial(flashinfer.FlashInferBackend, *everything)
        by_flashinfer = Trial[Any]("FlashInfer", make, flashinfer.probe)
        found = first_right("norms, RoPE and activations run", by_flashinfer, otherwise="torch")
    return found or TorchBackend(*everything)


def choose_filter(device: torch.device) -> Filter:
    """top_k and top_p by FlashInfer's kernels on a GPU where they are right, else by a sort."""
    if device.type != "cuda":
        return filter_by_sort
    from radixcache.kernels.flashinfer import top_p

    by_flashinfer = Trial("FlashInfer", top_p.make_filter, partial(top_p.probe, device))
    slow = "torch, whose sort is slow on a GPU"
    found = first_right(
        "top_k and top_p run", by_flashinfer, otherwise=slow, if_missing=logging.INFO
    )
    return found or filter_by_sort


def choose_draw(device: torch.device) -> DrawTokens | None:
    """The native kernel that draws tokens on a CPU; None if torch draws them."""
    return draw_tokens if device.type == "cpu" and problem() is None else None


def make_native(dtype: torch.dtype) -> AttentionBackend:
    if (reason := problem()) is not None:
        raise RuntimeError(reason)
    if dtype not in DTYPES:
        raise ValueError(f"they have no kernel for {dtype}")
    return NativeAttention()


def make_flashinfer(
    device: torch.device,
    dtype: torch.dtype,
    kinds: Sequence[LayerKind],
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    from radixcache.kernels.flashinfer.attention import FlashInferAttention
    from radixcache.kernels.flashinfer.mla import FlashInferMLA

    _log.info("FlashInfer compiles kernels that it has not compiled before: that takes minutes")
    is_mla = all(kind.mla for kind in kinds)
    make = FlashInferMLA if is_mla else FlashInferAttention
    return make(device, dtype, kinds, kv_dtype, find_short_prefill)


def make_triton(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
) -> AttentionBackend:
    from radixcache.kernels.triton.attention import TritonAttention

    return TritonAttention(device, dtype, kinds)


def find_short_prefill(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[LayerKind]
) -> Any | None:
    """Triton's prefill for these layers in CUDA graphs, if it runs."""

    def probe(module: Any) -> None:
        for kind in kinds:
            module.try_prefill(kind, dtype, device)

    task, otherwise = "prompts in graphs run", "FlashInfer's fa2"
    found = first_right(task, _triton("prefill", probe), otherwise=otherwise, level=logging.INFO)
    return None if found is None else found.TritonPrefill


def find_grouped_product(device: torch.device, dtype: torch.dtype) -> GroupedProduct | None:
    """Triton's product of rows with the weights of their experts, if it runs."""
    if device.type == "cpu":
        return None

    @torch.inference_mode()
    def probe(module: Any) -> None:
        weight = torch.eye(32, dtype=dtype, device=device).expand(2, 32, 32).contiguous()
        order, x = torch.arange(2, device=device), weight[0, :2]
        ends = torch.full((2,), 2, dtype=torch.int32, device=device)  # the first has both rows
        for active in (0, 1):
            if (module.grouped_product(x, weight, None, ends, order, active) != x).any():
                raise RuntimeError("its kernel gives wrong results")

    task = "few rows of experts run"
    found = first_right(task, _triton("experts", probe), otherwise="torch", level=logging.INFO)
    return None if found is None else found.grouped_product


def find_linear(device: torch.device, dtype: torch.dtype) -> Any | None:
    """Triton's linear of quantized weights, if it runs: `triton/linear.py`."""
    if device.type == "cpu":
        return None
    by_triton = _triton("linear", lambda module: module.probe(device, dtype))
    otherwise = f"torch, as dense {str(dtype)[6:]}"
    found = first_right("quantized weights run", by_triton, otherwise=otherwise)
    return None if found is None else found.QuantizedLinear


def find_recurrence(architecture: Architecture, device: torch.device) -> Recurrence | None:
    """Triton's kernel for the model's delta nets and Mamba 2; None for a model without them.

    Raises:
        Unknown: it does not run. transformers' layers, which take a prompt in chunks, are faster
            than torch's recurrence, launched token by token.
    """
    if all(kind == "conv" for kind, *_ in architecture.state_shapes):
        return None
    if device.type == "cpu":
        raise Unknown("its recurrent layers need the native kernels")

    @torch.inference_mode()
    def probe(module: Any) -> None:
        numbers = torch.arange(2, dtype=torch.int32, device=device)
        row = torch.zeros(1, 1, 8, device=device)
        tokens = Tokens(row, row, row, row[0, :, :1, None], row[0, :, :1], delta=True)
        slots = Slots(numbers, numbers[1:] - 2, numbers[:1], numbers[1:] - 2)
        if module.recur(torch.zeros(1, 1, 8, 8, device=device), tokens, slots).any():
            raise RuntimeError("its kernel gives wrong results")  # a failed launch shows here

    task, otherwise = "recurrent layers run", "transformers' layers, without graphs"
    found = first_right(task, _triton("recurrence", probe), otherwise=otherwise)
    if found is None:
        (reason,) = trial.outcomes[task].reasons
        raise Unknown(f"nothing runs its recurrent layers: {reason}")
    return found.recur


def _triton(name: str, probe: Callable[[Any], None]) -> Trial[Any]:
    """A trial of a module in `triton/`."""
    return Trial("Triton", lambda: import_module(f"radixcache.kernels.triton.{name}"), probe)


@torch.inference_mode()
def probe_attention(
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
