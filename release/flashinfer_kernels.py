"""FlashInfer's build recipes for the kernels that the backend uses."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from radixcache.kernels.attention import LayerKind
from radixcache.kernels.kv_format import FP8

_TENSOR_CORE_GROUP = 4  # as in the backend, which cannot be imported without FlashInfer


def _kinds(
    shapes: list[tuple[int, int]],
    windows: tuple[int | None, ...] = (None,),
    cap: float | None = None,
) -> list[LayerKind]:
    """A kind for each (query heads per KV head, head size) and each window."""
    return [
        LayerKind(2 * group, 2, dim, dim, dim**-0.5, window, cap)
        for group, dim in shapes
        for window in windows
    ]


LAYERS = {
    "llama": _kinds([(4, 64), (4, 128), (1, 128)]),
    "qwen2": _kinds([(7, 64), (7, 128)]),
    "qwen3": _kinds([(2, 64), (2, 128)]),
    "mistral": _kinds([(4, 128)], (None, 4096)),
    "gemma": _kinds([(8, 256), (1, 256)]),
    "gemma2": _kinds([(2, 256), (2, 128)], (None, 4096), 50.0),
    "gemma3_text": _kinds([(4, 256), (2, 256), (2, 128)], (None, 1024)),
}
"""Kinds of layers in published checkpoints, by model type."""

MLA = LayerKind(16, 1, 512, 64, 192**-0.5, mla=True)
"""The layers of DeepSeek-V2-Lite, which attend over latents."""


def all_kernels() -> list[Any]:
    """The recipes for all of `LAYERS`, latents and pages of fp8."""
    from flashinfer.jit.attention import modules

    found = [*small_kernels(), *attention_kernels(LAYERS["llama"][1], torch.bfloat16, FP8)]
    for dtype in (torch.bfloat16, torch.float16):
        for kind in (kind for kinds in LAYERS.values() for kind in kinds):
            found += attention_kernels(kind, dtype)
        dims = (MLA.head_dim, MLA.value_dim)
        types = (dtype, dtype, dtype, torch.int32)
        found.append(modules.gen_batch_mla_module("fa2", *types, *dims, False))
    return found


def small_kernels() -> list[Any]:
    """The recipes for all kernels but attention."""
    from flashinfer.jit import activation, cascade, norm, page, rope, sampling

    return [
        page.gen_page_module(), cascade.gen_cascade_module(), norm.gen_norm_module(),
        rope.gen_rope_module(), activation.gen_act_and_mul_module("silu"),
        activation.gen_act_and_mul_module("gelu_tanh"), sampling.gen_sampling_module(),
    ]  # fmt: skip


def attention_kernels(
    kind: LayerKind, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> list[Any]:
    """The recipes for a kind of layer: prefill, and decode if without tensor cores."""
    from flashinfer.jit.attention import modules

    rules = (kind.window is not None, kind.softcap is not None)
    rest = (dtype, kv_dtype or dtype, dtype, torch.int32, kind.head_dim, kind.head_dim, 0, *rules)
    found = [modules._gen_batch_prefill_primary_module("fa2", *rest, False)]
    if kind.query_heads // kind.kv_heads < _TENSOR_CORE_GROUP:
        found.append(modules.gen_batch_decode_module(*rest))
    return found


def build_llama(dtype: torch.dtype) -> None:
    """Build what a Llama lacks on all cores, as its steps would wait for one after the other;
    nothing without nvcc and ninja."""
    can_build = shutil.which("nvcc") and shutil.which("ninja") and torch.version.cuda
    if not can_build or os.environ.get("FLASHINFER_DISABLE_JIT"):
        return
    from flashinfer.jit.core import build_jit_specs

    found = [spec for spec in small_kernels() if "sampling" not in spec.name]
    found += [spec for kind in LAYERS["llama"] for spec in attention_kernels(kind, dtype)]
    missing = {spec.name: spec for spec in found if not spec.is_compiled}
    if missing:
        build_jit_specs([*missing.values()], verbose=False)
