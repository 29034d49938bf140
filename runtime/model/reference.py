"""A plain forward pass of a description, to hold the loop against at load.

It is slow and obvious on purpose, and shares nothing with the loop but the checkpoint and what
`Architecture` says: one sequence without a cache, in float32, product by product, head by head,
expert by expert, token by token. A comparison with transformers' layers would import them, which
takes longer than the rest of a start. So tests show that those compute what stands here, for every
family; and each load, that the loop's kernels and packed weights do so on this machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from radixcache.kernels.quantized import Quantized
from radixcache.runtime.model.description import (
    MLP,
    Architecture,
    Attention,
    DeltaNet,
    Experts,
    Mamba2,
    Mixer,
    Rope,
    Weight,
    Weights,
)
from radixcache.runtime.model.weights import ModelWeights

_PART = 8192  # rows of a weight


def rounded_logits(
    architecture: Architecture,
    tokens: torch.Tensor,
    weights: ModelWeights,
    dtype: torch.dtype,
    rows: torch.Tensor,
) -> torch.Tensor:
    """[T, n] float32 logits of the n tokens `rows`, with what layers give rounded to `dtype`.

    Their distance from those of `run_layer` alone is that of a loop that rounds nothing else.
    """
    embedding = weights.embedding()
    hidden = embed(architecture, tokens, embedding)
    for number in range(len(architecture.layers)):
        hidden = run_layer(architecture, number, hidden, weights.layer(number)).to(dtype).float()
    head = weights.head()
    head = embedding if head is None else head
    return logits(architecture, hidden, weights.last_norm(), dense_rows(head, rows))


def embed(architecture: Architecture, tokens: torch.Tensor, embedding: Weight) -> torch.Tensor:
    """[T, hidden_size] float32."""
    return dense_rows(embedding, tokens) * architecture.embed_scale


def logits(
    architecture: Architecture,
    hidden: torch.Tensor,
    last_norm: torch.Tensor,
    head: Weight,
) -> torch.Tensor:
    """[T, n] float32, by the output layer's weights [n, hidden_size] of some or all tokens."""
    out = product(_norm(architecture, hidden, last_norm), head) * architecture.logit_scale
    return _softcap(out, architecture.logit_softcap)


def run_layer(
    architecture: Architecture, number: int, hidden: torch.Tensor, weights: Weights
) -> torch.Tensor:
    """[T, hidden_size] float32 after a layer, by the weights of `layer_shapes`."""
    layer = architecture.layers[number]

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return _norm(architecture, x, weights[name]) if name in layer.norms else x

    before = normed(hidden, "input_norm")
    if layer.mixer is not None:
        out = normed(_mix(architecture, layer.mixer, before, weights), "attended_norm")
        hidden = hidden + layer.residual_scale * out
    if layer.mlp is not None:
        before = before if layer.parallel else normed(hidden, "mlp_norm")
        run = _mlp if isinstance(layer.mlp, MLP) else _experts
        out = normed(run(layer.mlp, before, weights), "after_norm")  # type: ignore[arg-type]
        hidden = hidden + layer.residual_scale * out
    return hidden * weights["layer_scale"] if layer.layer_scale else hidden


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[T, out]; in parts, so that a head of 128,000 rows is never held whole in float32."""
    if isinstance(weight, Quantized):
        at = torch.arange(weight.shape[0], device=x.device).split(_PART)
        parts = (weight.rows(numbers).dense() for numbers in at)
    else:
        parts = (part.float() for part in weight.split(_PART))
    return torch.cat([x @ part.T for part in parts], 1)


def dense_rows(weight: Weight, numbers: torch.Tensor) -> torch.Tensor:
    """[T, in] float32."""
    if isinstance(weight, Quantized):
        return weight.rows(numbers).dense()
    return weight[numbers].float()


def _product(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    out, bias = product(x, weights[name]), weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def _norm(
    architecture: Architecture, x: torch.Tensor, weight: torch.Tensor | float
) -> torch.Tensor:
    if architecture.centred:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + architecture.eps).sqrt() * weight


def _softcap(x: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return x if softcap is None else softcap * (x / softcap).tanh()


def _mix(architecture: Architecture, mixer: Mixer, x: torch.Tensor, w: Weights) -> torch.Tensor:
    if isinstance(mixer, Attention):
        return _product(_attend(architecture, mixer, x, w), w, "o")
    if isinstance(mixer, DeltaNet):
        return _product(_delta_net(architecture, mixer, x, w), w, "o")
    if isinstance(mixer, Mamba2):
        return _product(_mamba(architecture, mixer, x, w), w, "o")
    before, after, values = _product(x, w, "in").chunk(3, 1)
    return _product(after * _convolve(before * values, w), w, "o")


def _attend(a: Architecture, attention: Attention, x: torch.Tensor, w: Weights) -> torch.Tensor:
    """[T, width], before the last product."""
    kind, at = attention.kind, torch.arange(len(x), device=x.device)
    query, key, value = (_product(x, w, name) for name in "qkv")
    if attention.head_norms == "whole":
        query, key = _norm(a, query, w["query_norm"]), _norm(a, key, w["key_norm"])
    query, key = (part.unflatten(1, (-1, kind.head_dim)) for part in (query, key))
    value = value.unflatten(1, (-1, kind.value_dim))
    if attention.head_norms == "head":
        query, key = _norm(a, query, w["query_norm"]), _norm(a, key, w["key_norm"])
    if attention.value_norm:
        value = _norm(a, value, 1.0)
    rope = None if attention.rope is None else a.ropes[attention.rope]
    distance = at[:, None] - at[None, :]
    hidden_keys = (distance < 0) | (distance >= (kind.window or len(x)))
    heads = []
    for head in range(kind.query_heads):
        group, turned = head // (kind.query_heads // kind.kv_heads), _turn(query[:, head], rope)
        if attention.query_scaling is not None:
            beta, length = attention.query_scaling
            turned = turned * (1 + beta * (1 + at // length).log())[:, None]
        scores = _softcap(turned @ _turn(key[:, group], rope).T * kind.scale, kind.softcap)
        scores = scores.masked_fill(hidden_keys, -torch.inf)
        if attention.sinks:
            scores = torch.cat([scores, w["sinks"][head].expand(len(x), 1)], 1)
        heads.append(scores.softmax(-1)[:, : len(x)] @ value[:, group])
    out = torch.cat(heads, 1)
    return out * _product(x, w, "q_gate").sigmoid() if attention.gated else out


def _turn(head: torch.Tensor, rope: Rope | None) -> torch.Tensor:
    """[T, head_dim] with RoPE, from position 0."""
    if rope is None:
        return head
    frequencies = rope.frequencies.to(head.device)
    angles = torch.arange(len(head), device=head.device)[:, None] * frequencies
    cos, sin, half = angles.cos() * rope.scale, angles.sin() * rope.scale, len(frequencies)
    first, second, rest = head[:, :half], head[:, half : 2 * half], head[:, 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 1)


def _convolve(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """[T, channels]: each channel's last taps, the oldest first."""
    taps = w["conv"]
    padded = F.pad(x, (0, 0, len(taps) - 1, 0))
    out = sum(padded[n : n + len(x)] * tap for n, tap in enumerate(taps))
    return out + w["conv.bias"] if "conv.bias" in w else out


def _delta_net(a: Architecture, net: DeltaNet, x: torch.Tensor, w: Weights) -> torch.Tensor:
    keys = net.key_heads * net.key
    mixed = F.silu(_convolve(_product(x, w, "in"), w))
    query, key, value = mixed.split([keys, keys, net.heads * net.value], 1)
    query, key = (part.unflatten(1, (-1, net.key)) for part in (query, key))
    query, key = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (query, key))
    query, key = (t.repeat_interleave(net.heads // net.key_heads, 1) for t in (query, key))
    value = value.unflatten(1, (-1, net.value))
    beta, alpha = _product(x, w, "ba").chunk(2, 1)
    fade = (w["rate"] * F.softplus(alpha + w["rate_bias"])).exp()
    state, out = x.new_zeros(net.heads, net.key, net.value), []
    for q, k, v, b, f in zip(query, key, value, beta.sigmoid(), fade, strict=True):
        state = state * f[:, None, None]
        error = (v - torch.einsum("hkv,hk->hv", state, k)) * b[:, None]
        state = state + k[:, :, None] * error[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q * net.key**-0.5))
    gate = F.silu(_product(x, w, "z").unflatten(1, (-1, net.value)))
    return (_norm(a, torch.stack(out), w["mixer_norm"]) * gate).flatten(1)


def _mamba(a: Architecture, mamba: Mamba2, x: torch.Tensor, w: Weights) -> torch.Tensor:
    widths = [mamba.out_width, mamba.channels, mamba.heads]
    gate, mixed, steps = _product(x, w, "in").split(widths, 1)
    states = mamba.groups * mamba.state
    values, b, c = F.silu(_convolve(mixed, w)).split([mamba.out_width, states, states], 1)
    values = values.unflatten(1, (mamba.heads, -1))
    b, c = (
        t.unflatten(1, (mamba.groups, -1)).repeat_interleave(mamba.heads // mamba.groups, 1)
        for t in (b, c)
    )
    steps = F.softplus(steps + w["rate_bias"]).clamp(mamba.least, mamba.most)
    state, out = x.new_zeros(mamba.heads, mamba.state, mamba.value), []
    for v, key, query, step in zip(values, b, c, steps, strict=True):
        written = key[:, :, None] * (v * step[:, None])[:, None, :]
        state = state * (w["rate"] * step).exp()[:, None, None] + written
        out.append(torch.einsum("hsv,hs->hv", state, query) + w["skip"][:, None] * v)
    gated = (torch.stack(out).flatten(1) * F.silu(gate)).unflatten(1, (mamba.groups, -1))
    return _norm(a, gated, 1.0).flatten(1) * w["mixer_norm"]


def _mlp(mlp: MLP, x: torch.Tensor, w: Weights, prefix: str = "") -> torch.Tensor:
    up = _product(x, w, f"{prefix}up")
    gate = _product(x, w, f"{prefix}gate") if mlp.gated else up
    if mlp.activation == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        gate = gate * (1.702 * gate).sigmoid()
    elif mlp.activation == "silu":
        gate = gate * gate.sigmoid()
    elif mlp.activation == "relu2":
        gate = gate.relu().square()
    else:
        gate = F.gelu(gate, approximate="tanh" if mlp.activation == "gelu_tanh" else "none")
    return _product(gate * up if mlp.gated else gate, w, f"{prefix}down")


def _experts(experts: Experts, x: torch.Tensor, w: Weights) -> torch.Tensor:
    shares, out = _shares(experts, x, w), torch.zeros_like(x)
    for number in range(experts.count):
        rows = shares[:, number].nonzero().flatten()
        if len(rows):
            own = {
                name[8:]: each[number] for name, each in w.items() if name.startswith("experts.")
            }
            out[rows] += shares[rows, number, None] * _mlp(experts.each, x[rows], own)
    if experts.shared is None:
        return out
    shared = _mlp(experts.shared, x, w, "shared.")
    if experts.shared_gate:
        shared = shared * _product(x, w, "shared.router").sigmoid()
    return out + shared


def _shares(experts: Experts, x: torch.Tensor, w: Weights) -> torch.Tensor:
    """[T, count]: the share of each expert in a row, 0 of those that are not chosen."""
    scores = _product(x, w, "router")
    if experts.scores == "softmax":
        scores = scores.softmax(-1)
    elif experts.scores == "sigmoid":
        scores = scores.sigmoid()
    choice = scores + w["correction"] if experts.correction else scores
    if experts.groups > 1:
        groups = choice.unflatten(1, (experts.groups, -1))
        kept = groups.topk(2, -1).values.sum(-1)
        kept = kept.sort(dim=-1, descending=True, stable=True).indices[:, : experts.kept_groups]
        passed = torch.zeros_like(groups[:, :, 0]).scatter_(1, kept, 1.0).bool()
        choice = groups.masked_fill(~passed[:, :, None], -torch.inf).flatten(1)
    # Of equal ones, those with the lower numbers: topk may take any.
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : experts.active]
    found = scores.gather(1, chosen)
    if experts.scores == "softmax of chosen":
        found = found.softmax(-1)
    elif experts.renormalise:
        found = found / (found.sum(-1, keepdim=True) + experts.epsilon)
    return torch.zeros_like(scores).scatter_(1, chosen, found * experts.scale)
