"""Names FlashInfer's kernels, and builds those of the check's first call all at once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch

from radixcache.bench.gpu.layers import LAYERS, NARROW
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Row, figure
from radixcache.kernels.attention import LayerKind
from radixcache.kernels.kv_format import FP8

_TENSOR_CORE_GROUP = 4  # as in the backend, which cannot be imported without FlashInfer


def small_kernels() -> list[Any]:
    """FlashInfer's build recipes for all kernels but attention."""
    from flashinfer.jit import activation, cascade, norm, page, rope, sampling

    return [
        page.gen_page_module(), cascade.gen_cascade_module(), norm.gen_norm_module(),
        rope.gen_rope_module(), activation.gen_act_and_mul_module("silu"),
        activation.gen_act_and_mul_module("gelu_tanh"), sampling.gen_sampling_module(),
    ]  # fmt: skip


def attention_kernels(
    kind: LayerKind, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[Any]:
    """The build recipes for a kind of layer: prefill, and decode if without tensor cores."""
    from flashinfer.jit.attention import modules

    rules = (kind.window is not None, kind.softcap is not None)
    rest = (dtype, kv_dtype or dtype, dtype, torch.int32, kind.head_dim, kind.head_dim, 0, *rules)
    found = [modules._gen_batch_prefill_primary_module("fa2", *rest, False)]
    if kind.query_heads // kind.kv_heads < _TENSOR_CORE_GROUP:
        found.append(modules.gen_batch_decode_module(*rest))
    return found


def build(place: Place) -> Iterator[Row]:
    """Build missing kernels on all cores, since a step would wait for one after the other; builds
    nothing without nvcc and ninja."""
    can_build = shutil.which("nvcc") and shutil.which("ninja") and torch.version.cuda
    if not place.with_flashinfer or not can_build or os.environ.get("FLASHINFER_DISABLE_JIT"):
        return
    from flashinfer.jit.core import build_jit_specs

    found = [spec for spec in small_kernels() if "sampling" not in spec.name]
    found += [s for kind in LAYERS["llama"] for s in attention_kernels(kind, place.dtype)]
    found += attention_kernels(NARROW, place.dtype, FP8)
    missing = {spec.name: spec for spec in found if not spec.is_compiled}
    if not missing:
        return
    start = time.perf_counter()
    build_jit_specs([*missing.values()], verbose=False)
    note = f"{len(missing)} kernels, {os.cpu_count()} cores"
    yield figure("kernels of the first call", time.perf_counter() - start, "s", note=note)
