"""A row of the table of families says how a family's layers differ from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from radixcache.kernels.spec import MLP, Activation, Experts, Layer, Mixer, Unknown
from radixcache.runtime.model.families.config import Config

RECURRENT = ("linear_attention", "mamba", "conv")
"""Types of layers that have no attention."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip

_PRE = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Family:
    """How the layers of a family differ from Llama's, and where its config says so.

    Fields that are not explained are those of `description`. A string for a `bool` names a setting.

    Attributes:
        norms: the norms around mixer and MLP, by their names in a checkpoint.
        head_norms: of `Attention`, or a setting that says whether there are some by head.
        softcaps: whether scores may have a softcap.
        activation: the setting, if any, and what it must be.
        types: the type of each layer, `full_attention`, `sliding_attention` or a recurrent one.
        turned: whether a layer with this number and type has RoPE.
        partial_rope: RoPE may turn a part of a head. nested_rope: its parameters may be by type of
            layer. query_scaling: it may have one.
        scale: of the scores, if not the root of 1 / head_dim.
        heads: (kv_heads, head_dim) of a layer, where it has its own.
        mixer, mlp: what a recurrent layer has, and a layer that has no gated MLP.
        single: a layer is a mixer or an MLP.
        residual_scale, eps: settings.
        scales: fields of `Architecture`.
        offset: its `norm_offset`.
        latent: attention is MLA.
        pairs: a checkpoint has the pairs that RoPE turns side by side.
        adjust: changes the layers where they depend on each other, or have more than a row says.
        value_is_key: of layers without a window.
        alternating: a checkpoint's experts are [in, out], and gate and up take turns in them.
        spare_layers: a checkpoint may have layers after the last, for the tokens after the next.
        renamed: settings by their names in the config, and what other families call them.
        axes: how RoPE's frequencies are shared among three axes in images, if they are.
        both_ways: of `LayerKind`, by config and type.
        ignored: settings, between spaces, that change nothing here, or not alone.
        agreed: settings that no code reads, and what they may say, as the family does just that.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: _PRE)
    head_norms: str | None = None
    value_norm: bool = False
    gated: bool = False
    sinks: bool = False
    softcaps: bool = False
    bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    activation: tuple[str | None, str] = ("hidden_act", "silu")
    gated_mlp: bool = True
    types: Callable[[Config], list[str]] = lambda config: full(config)
    turned: Callable[[Config, int, str], bool] = lambda config, number, kind: True
    partial_rope: bool = False
    nested_rope: bool = False
    query_scaling: bool = False
    scale: Callable[[Config], float] | None = None
    heads: Callable[[Config, int], tuple[int | None, int | None]] | None = None
    mixer: Callable[[Config], Mixer] | None = None
    mlp: Callable[[Config, Family, int], MLP | Experts] = lambda *a: a[1].dense(a[0])
    parallel: bool = False
    single: bool = False
    layer_scale: bool = False
    residual_scale: str | None = None
    scales: Callable[[Config], dict[str, Any]] = lambda config: {}
    centred: bool = False
    offset: float = 0.0
    eps: str = "rms_norm_eps"
    latent: bool = False
    pairs: bool = False
    adjust: Callable[[Config, Family, list[Layer]], list[Layer]] = lambda *a: a[2]
    value_is_key: str | bool = False
    alternating: bool = False
    spare_layers: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    axes: Literal["blocks", "interleaved"] | None = None
    both_ways: Callable[[Config, str], bool] = lambda config, kind: False
    ignored: str = ""
    agreed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def dense(self, config: Config, inner: str | int = "intermediate_size") -> MLP:
        """The family's MLP, of this size."""
        key, known = self.activation
        if (name := known if key is None else config.get(key)) != known:
            raise Unknown(f"its activation is {name}")
        size = config.size(inner) if isinstance(inner, str) else inner
        return MLP(size, _ACTIVATIONS[known], self.gated_mlp, config.flag(self.mlp_bias))


def full(config: Config) -> list[str]:
    """No layer has a window."""
    return ["full_attention"] * config.size("num_hidden_layers")


def all_windows(config: Config) -> list[str]:
    """All layers have a window, or none."""
    kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
    return [kind] * config.size("num_hidden_layers")


def by_type(config: Config) -> list[str]:
    """Layers have windows by their types."""
    config.ignore("sliding_window", "sliding_window_pattern", "_sliding_window_pattern")
    return config.layer_types("full_attention", "sliding_attention", *RECURRENT)


def qwen_windows(config: Config) -> list[str]:
    """The layers from `max_window_layers` on have windows, if any do, or some types have."""
    count, slides = config.size("num_hidden_layers"), config.flag("use_sliding_window")
    config.ignore("sliding_window", "max_window_layers")
    if config.maybe("layer_types") is not None:
        types = config.layer_types("full_attention", "sliding_attention")
        if "sliding_attention" in types and not slides:
            raise Unknown("its layers are of other types")
        return types
    if not slides or config.get("sliding_window") is None:
        return ["full_attention"] * count
    first = config.get("max_window_layers")
    return ["sliding_attention" if n >= first else "full_attention" for n in range(count)]
