"""A layer's small operations: FlashInfer's fused kernels against transformers' stock ones.

Each in a CUDA graph, so that launches do not count, at the shape of the big model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from radixcache.bench.gpu.place import Place, Work
from radixcache.bench.gpu.report import Figure, NotRun, Report
from radixcache.bench.gpu.steps import TOLERANCE, error

_REPEATS = 20  # in one graph

Pair = tuple[Work, Work]
"""The stock and the fused operation. Each returns what it computes."""


def run(place: Place, report: Report) -> None:
    pairs: dict[str, Callable[[Place, int], Pair]] = {
        "residual and RMSNorm": _norm,
        "SiLU and product": _silu,
        "RoPE": _rope,
        "top-p 0.95": _top_p,
    }
    for name, make in pairs.items():
        for rows in place.sizes.decode_batches:
            report.measure(f"{name}, {rows} rows", _compare, place, name, make, rows)


@torch.inference_mode()
def _compare(place: Place, name: str, make: Callable[[Place, int], Pair], rows: int) -> Figure:
    try:
        stock, fused = make(place, rows)
    except AttributeError as missing:
        raise NotRun(str(missing)) from missing
    right, found = stock().float().clone(), fused().float().clone()
    worst = error(found, right)
    assert worst <= TOLERANCE, f"{name} differs by {worst:.2g} of the largest value"
    seconds = [place.gpu_seconds([work] * _REPEATS, place.sizes.repeat) for work in (stock, fused)]
    note = f"{seconds[0] * 1e6:.1f} against {seconds[1] * 1e6:.1f} µs, error {worst:.1e}"
    return Figure(f"{name}, {rows} rows: stock over fused", seconds[0] / seconds[1], "x", note=note)


def _norm(place: Place, rows: int) -> Pair:
    width = place.sizes.big["hidden_size"]
    norm = LlamaRMSNorm(width, eps=1e-6).to(place.device, place.dtype)
    fused = place.flashinfer.fused_add_rmsnorm
    x, residual = place.randn(rows, width), place.randn(rows, width)
    added, sums = x.clone(), residual.clone()  # both are written in place, each time further

    def both() -> torch.Tensor:
        fused(added, sums, norm.weight.detach(), 1e-6)
        return added

    return lambda: norm(x + residual), both


def _silu(place: Place, rows: int) -> Pair:
    width = place.sizes.big["intermediate_size"]
    gate_up, out = place.randn(rows, 2 * width), place.randn(rows, width)
    fused = place.flashinfer.silu_and_mul
    gate, up = gate_up[:, :width].contiguous(), gate_up[:, width:].contiguous()

    def both() -> torch.Tensor:
        fused(gate_up, out=out)
        return out

    return lambda: silu(gate) * up, both


def _rope(place: Place, rows: int) -> Pair:
    (heads, kv_heads), dim = place.sizes.heads[0], place.sizes.head_dim
    fused = place.flashinfer.apply_rope_with_cos_sin_cache_inplace
    query, key = place.randn(rows, heads, dim), place.randn(rows, kv_heads, dim)
    turned, keys = query.flatten(1).clone(), key.flatten(1).clone()  # and turned further
    positions = torch.arange(rows, device=place.device)
    angles = positions[:, None] * 10_000.0 ** -(torch.arange(0, dim, 2, device=place.device) / dim)
    table = torch.cat([angles.cos(), angles.sin()], -1)  # float32, as the kernel wants it
    cos, sin = (torch.cat([t, t], -1).to(place.dtype)[None] for t in (angles.cos(), angles.sin()))
    on_heads = query.transpose(0, 1)[None], key.transpose(0, 1)[None]

    def both() -> torch.Tensor:
        fused(positions, turned, keys, dim, table)
        return turned.view_as(query)

    return lambda: apply_rotary_pos_emb(*on_heads, cos, sin)[0][0].transpose(0, 1), both


def _top_p(place: Place, rows: int) -> Pair:
    """Of many rows' probabilities: sorted, or by FlashInfer's search for the threshold."""
    fused, vocab = place.flashinfer.top_p_renorm_probs, place.sizes.big["vocab_size"]
    probs = (place.randn(rows, vocab).float() * 4).softmax(-1)

    def by_sorting() -> torch.Tensor:
        ordered, order = probs.sort(descending=True)
        ordered = ordered.where(ordered.cumsum(-1) - ordered < 0.95, 0)
        kept = torch.zeros_like(probs).scatter_(-1, order, ordered)
        return kept / kept.sum(-1, keepdim=True)

    limits = probs.new_full((rows,), 0.95)
    return by_sorting, lambda: fused(probs, limits, is_deterministic=True)
