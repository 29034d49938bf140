"""The kernels of FlashInfer that the runtime may ask for, by the names that FlashInfer gives them.

FlashInfer looks for a built kernel in `data/aot/NAME/NAME.so` of its package. On a machine that may
compile nothing, all of these must be there: one that is missing sends the whole model to torch.
The names are those of 0.7.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from radixcache.kernels.attention import LayerKind

COMMON = (
    "page", "cascade", "sampling", "norm", "rope", "silu_and_mul", "gelu_tanh_and_mul",
)  # fmt: skip
"""For all dtypes and heads: appending, merging, renormalising probabilities, and fused layers."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

_TENSOR_CORE_GROUP = 4  # as in the backend, which cannot be imported without FlashInfer


class Attention(NamedTuple):
    """A kernel that attends: one library for each dtype, head size, window or not, softcap or not.

    `use` is "decode" for the kernel without tensor cores; fa2 does everything else.
    """

    use: Literal["decode", "fa2", "fa3"]
    dtype: torch.dtype
    head_dim: int
    window: bool
    softcap: bool

    @property
    def name(self) -> str:
        types = "_".join(f"dtype_{of}_{DTYPES[self.dtype]}" for of in ("q", "kv", "o"))
        heads = f"head_dim_qk_{self.head_dim}_head_dim_vo_{self.head_dim}"
        flags = f"posenc_0_use_swa_{self.window}_use_logits_cap_{self.softcap}"
        of_all = f"with_kv_cache_{types}_dtype_idx_i32_{heads}_{flags}"
        if self.use == "decode":
            return f"batch_decode_{of_all}"
        suffix = "_kv_stride_equal" if self.use == "fa2" else "_sm90"
        return f"batch_prefill_{of_all}_f16qk_False{suffix}"


def _kind(heads: int, kv_heads: int, dim: int, window: int | None, cap: float | None) -> LayerKind:
    return LayerKind(heads, kv_heads, dim, dim, dim**-0.5, window, cap)


GATE = {
    "llama": [_kind(*heads, None, None) for heads in ((32, 8, 64), (32, 8, 128), (32, 32, 128))],
    "qwen2": [_kind(*heads, None, None) for heads in ((14, 2, 64), (28, 4, 128))],
    "qwen3": [_kind(*heads, None, None) for heads in ((4, 2, 64), (16, 8, 128))],
    "mistral": [_kind(32, 8, 128, window, None) for window in (None, 4096)],
    "gemma": [_kind(*heads, None, None) for heads in ((8, 1, 256), (16, 16, 256))],
    "gemma2": [
        _kind(*heads, window, 50.0)
        for heads in ((8, 4, 256), (32, 16, 128))
        for window in (None, 4096)
    ],
    "gemma3_text": [
        _kind(*heads, window, None)
        for heads in ((4, 1, 256), (8, 4, 256), (32, 16, 128))
        for window in (None, 1024)
    ],
}
"""Layers of published checkpoints of every model type that the gate lets pass unprobed."""


def attention_kernels(kinds: Iterable[LayerKind], dtype: torch.dtype) -> list[Attention]:
    """What the backend asks for to run these layers, each once."""
    found: dict[Attention, None] = {}
    for kind in kinds:
        rest = (dtype, kind.head_dim, kind.window is not None, kind.softcap is not None)
        found[Attention("fa2", *rest)] = None
        if kind.query_heads // kind.kv_heads < _TENSOR_CORE_GROUP:
            found[Attention("decode", *rest)] = None
    return list(found)


def all_kernels(dtypes: Sequence[torch.dtype] = tuple(DTYPES)) -> list[Attention]:
    """For every model of the gate."""
    kinds = [kind for kinds in GATE.values() for kind in kinds]
    return [kernel for dtype in dtypes for kernel in attention_kernels(kinds, dtype)]


def missing(names: Iterable[str], dtypes: Sequence[torch.dtype] = tuple(DTYPES)) -> list[str]:
    """Which of the kernels for the models of the gate are not among `names`."""
    wanted = [*COMMON, *(kernel.name for kernel in all_kernels(dtypes))]
    there = set(names)
    return [name for name in wanted if name not in there]
