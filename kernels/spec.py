"""Describes what a model computes, layer by layer: one description for loading, checks and kernels.

A family's config is read into an `Architecture` (`families/`), and its weights into the names of
`layer_shapes` (`weights/`). The loop and the backends walk these, and know no family by name.

What can be done once at load is done there, and no description has it: a norm's weights are float32
with what the family adds to them; RoPE turns the two halves of a head, so rows that a checkpoint
keeps pair by pair are reordered; fused tensors are cut; factors that fold into weights are folded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from radixcache.kernels.attention import LayerKind
from radixcache.kernels.quantized import Quantized
from radixcache.kernels.recurrence import StateName, StateShapes

Shapes = dict[str, tuple[int, ...]]

Weights = dict[str, Any]
"""A layer's weights by the names of `layer_shapes`: a `Weight`, or a list of one per expert."""

Weight = torch.Tensor | Quantized


class Unknown(Exception):
    """Why the loop does not run a model, in a few words."""


@dataclass(frozen=True, eq=False)
class Rope:
    """How RoPE turns a head: the pair (i, i + n) of its first 2n elements by position times the
    i-th of n frequencies [n], float32; the rest of the head is not turned.

    Attributes:
        scale: factor on the cosines and sines.
        axes: [n] which of three positions, in images, a pair turns by (M-RoPE); None: there is one.
    """

    frequencies: torch.Tensor
    scale: float = 1.0
    axes: tuple[int, ...] | None = None


Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped"]
"""An MLP computes act(gate) * up, or act(up) without a gate. `clamped` is gpt-oss's: gate limited
to 7 from above and up to [-7, 7], gate * sigmoid(1.702 gate) * (up + 1)."""


@dataclass(frozen=True)
class Attention:
    """Attention over KV pages.

    Attributes:
        kind: heads, sizes, scale, window and softcap.
        rope: the index of the layer's RoPE in `Architecture.ropes`; None turns nothing.
        head_norms: what the norms of queries and keys cover: each head, all heads at once, or None.
        value_norm: whether values are normed head by head, without weights.
        value_is_key: whether the product that makes keys makes values, too.
        gated: whether the output is multiplied by the sigmoid of `q_gate`'s product.
        bias: whether queries, keys and values have biases.
        out_bias: whether the output has one.
        sinks: whether each head has a sink (`LayerInputs.sinks`).
        shares: it has queries alone; K/V are those of the last layer of its kind that has some.
        query_scaling: (beta, length): a query at p is times 1 + beta * log(1 + p // length).
    """

    kind: LayerKind
    rope: int | None = None
    head_norms: Literal["head", "whole"] | None = None
    value_norm: bool = False
    value_is_key: bool = False
    gated: bool = False
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    shares: bool = False
    query_scaling: tuple[float, int] | None = None

    @property
    def width(self) -> int:
        """Columns of the output before its product."""
        return self.kind.query_heads * self.kind.value_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (MLA, DeepSeek V2): pages keep a token's normed latent c and one
    rotated key, which all heads share.

    Keys and values of head h are K_h c and V_h c. They are absorbed, for every number of rows: a
    query's first numbers go through K_h transposed (`k_b`), all heads attend over latents as both
    keys and values, and V_h (`v_b`) makes a head's output of their mean.

    Attributes:
        kind: of the attention over latents, with `mla`.
        nope, value: sizes of a head's query without its rotated numbers, and of its output.
        q_rank: size of the normed latent that queries are made of; None if they are one product.
        rope: as in `Attention`; it turns the last numbers of a query's head, and the shared key.
        bias: whether `q_a`, `kv_a` and the output have biases.
        query_scaling: as in `Attention`.
        eps: of the norms of latents.
        gated: whether the sigmoid of `z` [heads], a product of the row, scales each head's output.
    """

    kind: LayerKind
    nope: int
    value: int
    q_rank: int | None
    rope: int | None
    bias: bool = False
    query_scaling: tuple[float, int] | None = None
    eps: float = 1e-6
    gated: bool = False

    @property
    def query_width(self) -> int:
        """Columns of the queries before they are absorbed."""
        return self.kind.query_heads * (self.nope + self.kind.value_dim)

    @property
    def width(self) -> int:
        """Columns of the output before its product."""
        return self.kind.query_heads * self.value


@dataclass(frozen=True)
class ShortConv:
    """LFM's gated causal convolution of `width` taps: out = C * conv(B * x).

    `in` gives B, C and x [channels] each.
    """

    width: int
    channels: int
    conv_bias: bool = False
    bias: bool = False


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net (Qwen3-Next, Qwen3.5): a state [heads, key, value] fades and is corrected.

    `in` gives queries and keys [key_heads * key] each and values [heads * value]; they go through
    a causal convolution and SiLU. `ba` gives beta, then alpha [heads]; the SiLU of `z` gates the
    normed output.

    Attributes:
        by_channel: Kimi Delta Attention (KDA): each row of the state fades by itself, so that alpha
            is [heads * key], and the sigmoid of z gates.
        rank: of KDA, the size of the latents whose products are alpha and z; None for the row.
        bound: of KDA, what limits the logarithm of a decay, below 0.
    """

    width: int
    key_heads: int
    heads: int
    key: int
    value: int
    by_channel: bool = False
    rank: int | None = None
    bound: float | None = None

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def out_width(self) -> int:
        return self.heads * self.value

    @property
    def decays(self) -> int:
        """Numbers of alpha, by which the state of a token fades."""
        return self.heads * self.key if self.by_channel else self.heads

    @property
    def products(self) -> tuple[dict[str, int], dict[str, int]]:
        """Columns by name, in their order, of the products of a row, and of those of latents."""
        keys, values = self.key_heads * self.key, self.out_width
        if not self.by_channel:
            return {"in": self.channels, "ba": 2 * self.heads, "z": values}, {}
        parts = {"q": keys, "k": keys, "v": values, "b": self.heads}
        own, rank = {"a": self.decays, "z": values}, self.rank
        if rank is None:
            return parts | own, {}
        return {**parts, "a_a": rank, "z_a": rank}, {f"{name}_b": n for name, n in own.items()}


@dataclass(frozen=True)
class Mamba2:
    """Mamba 2 (SSD): a state [heads, state, value] of every head.

    `in` gives z [heads * value], then x, B and C, which go through a causal convolution and SiLU,
    then dt [heads], limited to [least, most] after softplus. The gated output is normed in
    `groups` parts.
    """

    width: int
    heads: int
    value: int
    state: int
    groups: int
    conv_bias: bool = True
    bias: bool = False
    least: float = 0.0
    most: float = float("inf")

    @property
    def channels(self) -> int:
        return self.heads * self.value + 2 * self.groups * self.state

    @property
    def out_width(self) -> int:
        return self.heads * self.value


RECURRENT = ShortConv | DeltaNet | Mamba2
ATTENDS = Attention | Latent
Mixer = ATTENDS | RECURRENT


@dataclass(frozen=True)
class MLP:
    """down(act(gate) * up), or down(act(up)) without a gate."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, `active` of `count` for each row, and one that all rows share.

    Scores are float32. A row's experts are added in the order of their numbers, then the shared
    one.

    Attributes:
        each: an expert.
        scores: softmax or sigmoid of all logits, or softmax of the chosen ones' alone.
        correction: whether a bias [count] is added to the scores that choose, and only to those.
        renormalise: whether the chosen scores are divided by their sum.
        epsilon: what is added to that sum.
        scale: factor on the scores, after all else.
        groups, kept_groups: experts are chosen from the `kept_groups` groups whose `group_best`
            best scores add up to the most.
        router_bias: whether the router has a bias.
        shared: the shared expert; None if there is none.
        shared_gate: whether the sigmoid of a product with the row scales it.
        each_scale: whether a weight `expert_scale` [count] multiplies the scores last.
        latent: size of the space in which the experts work, between the products `latent_in` of a
            row and `latent_out` of their sum (Nemotron 3 Super); None if that is the row's.
    """

    count: int
    active: int
    each: MLP
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    correction: bool = False
    renormalise: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    router_bias: bool = False
    shared: MLP | None = None
    shared_gate: bool = False
    each_scale: bool = False
    latent: int | None = None

    def __post_init__(self) -> None:
        size, kept = self.count // max(self.groups, 1), self.kept_groups
        whole = size * self.groups == self.count and (size >= self.group_best or self.groups == 1)
        if not (whole and 0 < kept <= self.groups and 0 < self.active <= size * kept):
            groups = f"{kept} of {self.groups} groups"
            raise Unknown(f"it chooses {self.active} of {self.count} experts from {groups}")


@dataclass(frozen=True)
class Layer:
    """One layer: x += residual_scale * mixer(norm(x)), then the same with the MLP.

    Attributes:
        norms: which stand: `input_norm` before the mixer, `attended_norm` after it, `mlp_norm`
            before the MLP, `after_norm` after it.
        parallel: the MLP reads what the mixer reads, so there is no `mlp_norm`.
        layer_scale: whether the layer's output is multiplied by a weight `layer_scale` [1].
        beside: experts that read the residual x beside the MLP: in place of the MLP's result y,
            `after_norm` gets mlp_out_norm(y) + expert_out_norm(z), where z is their result for
            expert_norm(x), chosen by router_norm(x). All four are in `norms`.
        per_layer: an MLP without a gate for what the row has beside x for this layer, its input:
            at the layer's end x += per_layer_norm(down(act(up(x)) * input)).
    """

    mixer: Mixer | None
    mlp: MLP | Experts | None
    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    parallel: bool = False
    residual_scale: float = 1.0
    layer_scale: bool = False
    beside: Experts | None = None
    per_layer: MLP | None = None

    @property
    def experts(self) -> Experts | None:
        """The layer's experts, in the MLP's place or beside it."""
        return self.mlp if isinstance(self.mlp, Experts) else self.beside

    @property
    def shares_kv(self) -> bool:
        return isinstance(self.mixer, Attention) and self.mixer.shares


@dataclass(frozen=True)
class Architecture:
    """A decoder.

    Attributes:
        family: transformers' name of the model type.
        centred: norms subtract the mean first (LayerNorm without bias).
        norm_offset: what the family adds to the norm weights that it stores, 0 or 1. The weights
            here have it; kernels that add it themselves subtract it.
        embed_scale, logit_scale: factors on the embedding's rows and on the logits.
        logit_softcap: logits become softcap * tanh(logits / softcap).
        tied: the embedding is also the output layer's weight.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_context: int
    eos_token_id: int | list[int] | None
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    eps: float
    centred: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False

    @property
    def kinds(self) -> list[LayerKind]:
        """The attention of each layer that has KV pages, in order."""
        own = [x.mixer for x in self.layers if not x.shares_kv]
        return [mixer.kind for mixer in own if isinstance(mixer, ATTENDS)]

    @property
    def is_recurrent(self) -> bool:
        return bool(self.conv_widths)

    @property
    def conv_widths(self) -> set[int]:
        """The taps of the convolutions of recurrent layers."""
        return {x.mixer.width for x in self.layers if isinstance(x.mixer, RECURRENT)}

    @property
    def state_shapes(self) -> StateShapes:
        """The states of a sequence, float32: the inputs that a convolution still needs, and what a
        delta net or Mamba 2 remembers: [heads, key, value] or [heads, state, value]."""
        shapes: dict[StateName, tuple[tuple[int, ...], torch.dtype]] = {}
        for number, layer in enumerate(self.layers):
            if not isinstance(mixer := layer.mixer, RECURRENT):
                continue
            shapes["conv", number, 0] = (mixer.width - 1, mixer.channels), torch.float32
            if not isinstance(mixer, ShortConv):
                rows = mixer.key if isinstance(mixer, DeltaNet) else mixer.state
                shape = (mixer.heads, rows, mixer.value)
                shapes["recurrent", number, 0] = shape, torch.float32
        return shapes

    @property
    def per_layer_shapes(self) -> Shapes:
        """The shapes of the weights behind the inputs of each layer [layers, size]; none if the
        layers have no inputs.

        They are (norm(projection(e)) + table[token] * size^0.5) / 2^0.5 for a token and its row e
        of the embedding, before `embed_scale`.
        """
        if (mlp := self.layers[0].per_layer) is None:
            return {}
        width = len(self.layers) * mlp.inner
        table, projection = (self.vocab_size, width), (width, self.hidden_size)
        return {"table": table, "projection": projection, "norm": (mlp.inner,)}

    def layer_shapes(self, number: int) -> Shapes:
        """The shapes of a layer's weights by name. Those of experts are one expert's, and stand in
        lists. [out, in] for products; norms are float32."""
        layer, hidden = self.layers[number], self.hidden_size
        shapes: Shapes = dict.fromkeys(layer.norms, (hidden,))
        if layer.layer_scale:
            shapes["layer_scale"] = (1,)
        if isinstance(layer.mixer, Attention):
            _attention_shapes(shapes, layer.mixer, hidden)
        elif isinstance(layer.mixer, Latent):
            _latent_shapes(shapes, layer.mixer, hidden)
        elif layer.mixer is not None:
            _recurrent_shapes(shapes, layer.mixer, hidden)
        if isinstance(layer.mlp, MLP):
            _mlp_shapes(shapes, layer.mlp, hidden)
        if (experts := layer.experts) is not None:
            _product(shapes, "router", experts.count, hidden, experts.router_bias)
            if experts.correction:
                shapes["correction"] = (experts.count,)
            if experts.each_scale:
                shapes["expert_scale"] = (experts.count,)
            size = hidden if experts.latent is None else experts.latent
            if experts.latent is not None:
                shapes |= {"latent_in": (size, hidden), "latent_out": (hidden, size)}
            _mlp_shapes(shapes, experts.each, size, "experts.")
            if experts.shared is not None:
                _mlp_shapes(shapes, experts.shared, hidden, "shared.")
            if experts.shared_gate:
                shapes["shared.router"] = (1, hidden)
        if layer.per_layer is not None:
            _mlp_shapes(shapes, layer.per_layer, hidden, "per_layer.")
        return shapes


def _product(shapes: Shapes, name: str, rows: int, columns: int, bias: bool) -> None:
    shapes[name] = (rows, columns)
    if bias:
        shapes[f"{name}.bias"] = (rows,)


def _attention_shapes(shapes: Shapes, attention: Attention, hidden: int) -> None:
    kind = attention.kind
    queries, keys = kind.query_heads * kind.head_dim, kind.kv_heads * kind.head_dim
    _product(shapes, "q", queries, hidden, attention.bias)
    if attention.gated:
        _product(shapes, "q_gate", attention.width, hidden, attention.bias)
    if not attention.shares:
        _product(shapes, "k", keys, hidden, attention.bias)
        _product(shapes, "v", kind.kv_heads * kind.value_dim, hidden, attention.bias)
    _product(shapes, "o", hidden, attention.width, attention.out_bias)
    if attention.head_norms is not None:
        one = attention.head_norms == "head"
        shapes["query_norm"] = (kind.head_dim if one else queries,)
        if not attention.shares:
            shapes["key_norm"] = (kind.head_dim if one else keys,)
    if attention.sinks:
        shapes["sinks"] = (kind.query_heads,)


def _latent_shapes(shapes: Shapes, latent: Latent, hidden: int) -> None:
    """`k_b` and `v_b` have a product for each head, one below the other, and the first is that of
    queries: K_h transposed."""
    kind = latent.kind
    if latent.q_rank is None:
        shapes["q"] = latent.query_width, hidden
    else:
        _product(shapes, "q_a", latent.q_rank, hidden, latent.bias)
        shapes |= {"q_a_norm": (latent.q_rank,), "q_b": (latent.query_width, latent.q_rank)}
    _product(shapes, "kv_a", kind.head_dim + kind.value_dim, hidden, latent.bias)
    shapes |= {"kv_a_norm": (kind.head_dim,), "v_b": (latent.width, kind.head_dim)}
    shapes["k_b"] = kind.query_heads * kind.head_dim, latent.nope
    if latent.gated:
        shapes["z"] = kind.query_heads, hidden
    _product(shapes, "o", hidden, latent.width, latent.bias)


def _recurrent_shapes(shapes: Shapes, mixer: ShortConv | DeltaNet | Mamba2, hidden: int) -> None:
    """`conv` [width, channels]: the oldest tap first. `rate` is -exp(A_log), and `rate_bias` is
    dt_bias, float32 like all vectors here: the logarithm of a decay is rate * softplus(alpha +
    rate_bias), or bound * sigmoid(-rate * (alpha + rate_bias))."""
    shapes["conv"] = (mixer.width, mixer.channels)
    if isinstance(mixer, DeltaNet):
        for products, depth in zip(mixer.products, (hidden, mixer.rank or 0), strict=True):
            shapes |= {name: (columns, depth) for name, columns in products.items()}
        shapes |= {"rate": (mixer.heads,), "rate_bias": (mixer.decays,)}
        shapes |= {"mixer_norm": (mixer.value,), "o": (hidden, mixer.out_width)}
        return
    if mixer.conv_bias:
        shapes["conv.bias"] = (mixer.channels,)
    columns, out = 3 * mixer.channels, mixer.channels
    if isinstance(mixer, Mamba2):
        columns, out = mixer.out_width + mixer.channels + mixer.heads, mixer.out_width
        shapes |= dict.fromkeys(("rate", "rate_bias", "skip"), (mixer.heads,))
        shapes["mixer_norm"] = (out,)
    _product(shapes, "in", columns, hidden, mixer.bias)
    _product(shapes, "o", hidden, out, mixer.bias)


def _mlp_shapes(shapes: Shapes, mlp: MLP, hidden: int, prefix: str = "") -> None:
    if mlp.gated:
        _product(shapes, f"{prefix}gate", mlp.inner, hidden, mlp.bias)
    _product(shapes, f"{prefix}up", mlp.inner, hidden, mlp.bias)
    _product(shapes, f"{prefix}down", hidden, mlp.inner, mlp.bias)
