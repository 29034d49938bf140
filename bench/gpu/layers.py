"""Tries every kind of attention layer of the supported models in the backend, once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report
from radixcache.kernels.attention import AttentionBackend, LayerKind
from radixcache.kernels.choice import try_out


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

NARROW = LayerKind(8, 2, 128, 128, 128**-0.5)
"""Layers whose pages are tried in 8 bits."""

MLA = LayerKind(16, 1, 512, 64, 192**-0.5, mla=True)
"""The layers of DeepSeek-V2-Lite, which attend over latents."""


def run(place: Place, report: Report) -> None:
    for dtype in (place.dtype, *place.sizes.other_dtypes):
        for model, kinds in LAYERS.items():
            for kind in kinds:
                heads = f"{kind.query_heads}/{kind.kv_heads} x {kind.head_dim}"
                rules = f"window {kind.window}, softcap {kind.softcap}"
                name = f"{model}, {dtype}, {heads}, {rules}"
                report.check(name, try_layer, place, place.make_backend, dtype, kind)
    for dtype in (torch.bfloat16, torch.float16):
        name = f"deepseek, {dtype}, latents of 512 and 64"
        report.check(name, try_layer, place, place.make_backend, dtype, MLA)


def try_layer(
    place: Place, make: Callable[..., AttentionBackend], dtype: torch.dtype, kind: LayerKind
) -> None:
    try_out(make(kind, dtype=dtype), place.device, dtype, [kind])
    torch.cuda.synchronize()
