"""A plain forward pass of the decoder loop's families, to hold the loop against at load.

It is slow and obvious on purpose, and shares nothing with the loop but the checkpoint and what
`Architecture` says: one sequence without a cache, in float32, product by product, head by head.
A comparison with transformers' layers would import them, which takes longer than the rest of a
start. So tests show that those compute what stands here, for every family and setting; and each
load, that the loop's kernels, post-ops and packed weights do so on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from radixcache.kernels.quantized import Quantized
from radixcache.runtime.model.architecture import Architecture

_PART = 8192  # rows of a weight

Weight = torch.Tensor | Quantized
Weights = Mapping[str, Weight]


def rounded_logits(
    architecture: Architecture,
    tokens: torch.Tensor,
    weight: Callable[[str], Weight],
    dtype: torch.dtype,
) -> torch.Tensor:
    """[T, vocab_size] float32 logits, with the hidden states between layers rounded to `dtype`.

    Their distance from those of `run_layer` alone is that of a loop that rounds nothing else.
    """
    embedding = weight("model.embed_tokens.weight")
    hidden = rows(embedding, tokens)
    for number in range(len(architecture.kinds)):
        names = architecture.layer_shapes(number)
        weights = {name: weight(f"model.layers.{number}.{name}") for name in names}
        hidden = run_layer(architecture, number, hidden, weights).to(dtype).float()
    hidden = rms_norm(hidden, weight("model.norm.weight"), architecture.eps)
    return product(hidden, embedding if architecture.tied else weight("lm_head.weight"))


def run_layer(
    architecture: Architecture, layer: int, hidden: torch.Tensor, weights: Weights
) -> torch.Tensor:
    """[T, hidden_size] float32 after a layer, by the weights of `layer_shapes`."""
    kind, eps = architecture.kinds[layer], architecture.eps
    normed = rms_norm(hidden, weights["input_layernorm.weight"], eps)
    query, key, value = (
        _product(normed, weights, f"self_attn.{part}_proj").unflatten(1, (-1, kind.head_dim))
        for part in "qkv"
    )
    if architecture.head_norms:
        query = rms_norm(query, weights["self_attn.q_norm.weight"], eps)
        key = rms_norm(key, weights["self_attn.k_norm.weight"], eps)
    at = torch.arange(len(hidden), device=hidden.device)
    distance = at[:, None] - at[None, :]
    hidden_keys = (distance < 0) | (distance >= (kind.window or len(hidden)))
    heads = []
    for head in range(kind.query_heads):
        group = head // (kind.query_heads // kind.kv_heads)
        scores = _turn(query[:, head], architecture) @ _turn(key[:, group], architecture).T
        scores = (scores * kind.scale).masked_fill(hidden_keys, -torch.inf)
        heads.append(scores.softmax(-1) @ value[:, group])
    hidden = hidden + _product(torch.cat(heads, 1), weights, "self_attn.o_proj")
    normed = rms_norm(hidden, weights["post_attention_layernorm.weight"], eps)
    gate, up = (_product(normed, weights, f"mlp.{part}_proj") for part in ("gate", "up"))
    return hidden + _product(gate * gate.sigmoid() * up, weights, "mlp.down_proj")


def rms_norm(x: torch.Tensor, weight: Weight, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * _dense(weight)


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[T, out]; in parts, so that a head of 128,000 rows is never held whole in float32."""
    if isinstance(weight, Quantized):
        return x @ weight.dense().T
    return torch.cat([x @ part.float().T for part in weight.split(_PART)], 1)


def rows(weight: Weight, numbers: torch.Tensor) -> torch.Tensor:
    """[T, in] float32."""
    return _dense(weight.rows(numbers) if isinstance(weight, Quantized) else weight[numbers])


def _product(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    out = product(x, weights[f"{name}.weight"])
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + _dense(bias)


def _dense(weight: Weight) -> torch.Tensor:
    return weight.dense() if isinstance(weight, Quantized) else weight.float()


def _turn(head: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """[T, head_dim] with RoPE, from position 0."""
    at = torch.arange(len(head), device=head.device)
    angles = at[:, None] * architecture.inverse_frequencies
    cos, sin = angles.cos() * architecture.rope_scale, angles.sin() * architecture.rope_scale
    first, second = head.chunk(2, 1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)
