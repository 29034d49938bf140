"""Describes a model from its config.json: a row of the table, and what the settings say."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from radixcache.errors import first_sentence
from radixcache.kernels.attention import LayerKind
from radixcache.kernels.spec import Architecture, Attention, Latent, Layer, Unknown
from radixcache.runtime.model.families.config import Config, Lacks, Settings, complete
from radixcache.runtime.model.families.family import RECURRENT, Family
from radixcache.runtime.model.families.rope import Ropes
from radixcache.runtime.model.families.table import ALIASES, FAMILIES, WRAPPERS

# transformers' config class has defaults, but importing it takes longer than all of this. So these
# are tried without, if their configs have the settings whose defaults are not false.
_PLAIN: dict[str, tuple[str, ...]] = {
    "llama": (), "mistral": ("sliding_window",), "qwen2": (), "qwen3": ("head_dim",),
}  # fmt: skip
_FALSE = dict.fromkeys(
    ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), False
)


def describe(
    settings: Settings, max_model_len: int | None = None, *, whole: bool = False
) -> Architecture:
    """The architecture that the settings of a config.json describe.

    Args:
        max_model_len: the most tokens of a sequence, for RoPE whose frequencies depend on it.
        whole: the settings are of a GGUF file, which has all that counts but the activation: what
            is not there is null or false, if the family can be described so. Importing
            transformers' config class takes longer.

    Raises:
        Unknown: another family, or a setting that is not understood.
    """
    family = settings.get("model_type")
    if isinstance(family, str) and family in ALIASES:
        family = ALIASES[family]
        settings = {**settings, "model_type": family}
    if not isinstance(family, str) or family not in {*FAMILIES, *WRAPPERS}:
        raise Unknown(f"no loop for {family}")
    try:
        quick: Config | None = None
        passed: type[Unknown] = Lacks
        if whole and family in FAMILIES:
            key, activation = FAMILIES[family].activation
            known = {} if key is None else {key: activation}
            quick, passed = Config(known | {**settings}, complete=True), Unknown
        elif family in _PLAIN and all(name in settings for name in _PLAIN[family]):
            quick = Config(_FALSE | {**settings}, complete=False)
        if quick is not None:
            with suppress(passed, KeyError):
                return _describe(family, quick, max_model_len)
        family, settings = complete(settings, family in WRAPPERS)
        if family not in FAMILIES:
            raise Unknown(f"no loop for {family}")
        settings = {FAMILIES[family].renamed.get(name, name): x for name, x in settings.items()}
        return _describe(family, Config(settings, complete=True), max_model_len)
    except Unknown:
        raise
    except Exception as error:  # whatever nonsense raises, here and in transformers
        raise Unknown(f"its config does not make sense ({first_sentence(error)})") from None


def _describe(family: str, config: Config, max_model_len: int | None) -> Architecture:
    row = FAMILIES[family]
    if config.denies("is_causal"):
        raise Unknown("its attention looks at what comes later")
    ropes = Ropes(config, row, max_model_len)
    types = row.types(config)
    layers = [_layer(config, row, ropes, n, kind) for n, kind in enumerate(types)]
    eos = config.maybe("eos_token_id")
    if any(type(token) is not int for token in (eos if isinstance(eos, list) else [eos or 0])):
        raise Unknown(f"its eos_token_id is {eos}")
    described = Architecture(
        family=family,
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        max_context=ropes.max_context,
        eos_token_id=eos,
        layers=tuple(row.adjust(config, row, layers)),
        ropes=tuple(ropes.made),
        eps=config.number(row.eps),
        centred=row.centred,
        norm_offset=row.offset,
        tied=config.flag("tie_word_embeddings"),
        **row.scales(config),
    )
    config.ignore(*row.ignored.split())
    for name, known in row.agreed.items():
        config.agree(name, *known)
    config.finish()
    return described


def _layer(config: Config, row: Family, ropes: Ropes, number: int, kind: str) -> Layer:
    mixer: Any = None
    if kind in RECURRENT:
        if row.mixer is None:
            raise Unknown("its layers are of other types")
        mixer = row.mixer(config)
    elif kind not in ("mlp", "moe"):
        describes = _latent if row.latent else _attention
        mixer = describes(config, row, ropes, number, kind)
    alone = row.single and mixer is not None
    return Layer(
        mixer,
        None if alone else row.mlp(config, row, number),
        tuple(n for n in row.norms if not row.single or (n == "input_norm") is alone),
        row.parallel,
        1.0 if row.residual_scale is None else config.number(row.residual_scale),
        row.layer_scale,
    )


def _attention(config: Config, row: Family, ropes: Ropes, number: int, kind: str) -> Attention:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else None
    kv_heads = kv_heads or config.size("num_key_value_heads")
    dim = hidden // heads if config.maybe("head_dim") is None else config.size("head_dim")
    config.agree("attention_head_dim", dim)
    if row.heads is not None:
        own = row.heads(config, number)
        kv_heads, dim = own[0] or kv_heads, own[1] or dim
    if heads % kv_heads or dim % 2 or dim > 1 << 16:  # whose RoPE would take gigabytes
        raise Unknown(f"its heads are {heads} on {kv_heads} of {dim}")
    window = config.size("sliding_window") if kind == "sliding_attention" else None
    scale = dim**-0.5 if row.scale is None else row.scale(config)
    softcap = config.softcap("attn_logit_softcapping") if row.softcaps else None
    turned, norms = row.turned(config, number, kind), row.head_norms
    if norms not in (None, "head", "whole"):
        norms = "head" if config.flag(norms) else None
    return Attention(
        LayerKind(
            *(heads, kv_heads, dim, dim, scale, window, softcap),
            both_ways=row.both_ways(config, kind),
        ),
        rope=ropes.index(kind, dim) if turned else None,
        head_norms=norms,  # type: ignore[arg-type]
        value_norm=row.value_norm,
        value_is_key=config.flag(row.value_is_key) and window is None,
        gated=row.gated,
        bias=config.flag(row.bias),
        out_bias=config.flag(row.out_bias),
        sinks=row.sinks,
        query_scaling=ropes.query_scaling(kind) if row.query_scaling else None,
    )


def _latent(config: Config, row: Family, ropes: Ropes, number: int, kind: str) -> Latent:
    heads, rank = config.size("num_attention_heads"), config.size("kv_lora_rank")
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope, turned, value = (config.size(name) for name in names)
    config.agree("num_key_value_heads", heads)
    config.agree("qk_head_dim", nope + turned)
    if max(heads, rank, nope, turned, value) > 1 << 16:
        raise Unknown(f"its heads are {heads} of {nope} and {turned} over latents of {rank}")
    rope, scale = None, (nope + turned) ** -0.5
    config.ignore("head_dim")
    if row.turned(config, number, kind):
        config.agree("head_dim", turned, nope + turned)
        if config.denies("rope_interleave"):
            raise Unknown("its RoPE turns the halves of a head")
        rope = ropes.index(kind, nope + turned if row.partial_rope else turned)
        if 2 * len(ropes.made[rope].frequencies) != turned:
            raise Unknown(f"its RoPE turns other elements than {turned}")
        scale *= ropes.mscale(kind) ** 2
    return Latent(
        LayerKind(heads, 1, rank, turned, scale, mla=True),
        nope,
        value,
        None if config.get("q_lora_rank") is None else config.size("q_lora_rank"),
        rope,
        bias=config.flag(row.bias),
        query_scaling=ropes.query_scaling(kind) if row.query_scaling else None,
        gated=row.gated,
    )
