"""Whatever a config of the loop's families says: transformers' logits, or a refusal in a sentence.

Each seed draws a config.json, in the spelling of transformers 5 or in the one before, some with a
value that makes no sense; or changes that of any family. transformers reads it and makes the
weights and the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from radixcache.errors import ModelError
from radixcache.kernels.spec import Architecture, Unknown
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from tests.helpers.decoders import DECODERS
from tests.helpers.models import make_peaky, tiny_model
from tests.runtime.model.steps import (
    LOOPED,
    logits_by_reference,
    relative_error,
    run_steps,
    settings_of,
)

Settings = dict[str, Any]

SEEDS = [*range(30), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(30, 300))]
STEPS = [(13,), (1,), (30,), (1,)]
PROMPT = 45
"""Tokens, as many as are allowed: more than most windows, and than RoPE was scaled from."""
NONSENSE: tuple[Any, ...] = (
    None, 0, -1, 3, 4.0, "2", True, False, [], {}, [2, 2], {"full_attention": 1},
)  # fmt: skip


NAMES = {
    "input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


def draw(rng: Random) -> Settings:
    """A config.json that more often than not makes sense."""
    family = rng.choice(LOOPED)
    heads = rng.choice([1, 2, 3, 4, 6])
    dim = rng.choice([None, None, 4, 6, 8, 20])
    hidden = rng.randint(5, 50)
    if dim is None or family == "llama":
        hidden = heads * rng.choice([2, 4, 6, 10])
    settings: Settings = {
        "model_type": family,
        "vocab_size": rng.randint(50, 99),
        "hidden_size": hidden,
        "intermediate_size": rng.randint(3, 70),
        "num_hidden_layers": rng.choice([1, 2, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if not heads % n]),
        "hidden_act": rng.choice(["silu"] * 40 + ["gelu", "swish", "gelu_pytorch_tanh"]),
        "max_position_embeddings": rng.choice([16, 40, 128, 4096, 10**30]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2, 1.0]),
        "tie_word_embeddings": rng.random() < 0.4,
        "eos_token_id": rng.choice([2, [2, 3], None]),
        rng.choice(["dtype", "torch_dtype"]): rng.choice(["float32", "bfloat16", "float16"]),
    }
    if family == "qwen3":
        settings["head_dim"] = dim or 10
    elif dim is not None or rng.random() < 0.2:
        settings["head_dim"] = dim
    for name in ("attention_bias", "mlp_bias"):
        if rng.random() < 0.6:
            settings[name] = rng.random() < (0.5 if family == "llama" else 0.2)
    settings |= draw_windows(rng, settings["num_hidden_layers"]) if family != "llama" else {}
    settings |= draw_rope(rng)
    if rng.random() < 0.06:
        settings["partial_rotary_factor"] = rng.choice([0.5, 1.0, None])
    if rng.random() < 0.1:  # whatever else stands in configs
        settings[rng.choice(["use_cache", "pretraining_tp", "rope_interleaved", "use_mrope"])] = (
            rng.choice([False, None, 1, True])
        )
    if rng.random() < 0.07:
        del settings[rng.choice([*settings][1:])]
    if rng.random() < 0.15:
        settings[rng.choice([*settings][1:])] = rng.choice(NONSENSE)
    return settings


def draw_windows(rng: Random, layers: int) -> Settings:
    """Which layers have a window, in the words of each family; sometimes in those of another."""
    found: Settings = {"sliding_window": rng.choice([None, 0, 1, 3, 9, 30, 200, 2**32])}
    if rng.random() < 0.7:
        found["use_sliding_window"] = rng.random() < 0.7
        found["max_window_layers"] = rng.choice([0, 1, 2, 28])
    if rng.random() < 0.3:
        kinds = ["full_attention", "sliding_attention"]
        found["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    return found


def draw_rope(rng: Random) -> Settings:
    """RoPE in one of its spellings."""
    kind = rng.choice(["default"] * 8 + ["linear", "llama3", "yarn"] * 6 + ["dynamic", "longrope"])
    more: Settings = {}
    if kind != "default":
        more["factor"] = rng.choice([1.0, 2.0, 4, 7.5])
    if kind == "llama3":
        more |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([4.0, 2])}
    if kind in ("llama3", "yarn", "longrope") and rng.random() < 0.9:
        more["original_max_position_embeddings"] = rng.choice([8, 20, 32])
    if kind == "longrope":
        more |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    if kind == "yarn":
        options = {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2, "truncate": False,
                   "mscale": 0.7, "mscale_all_dim": 1.1}  # fmt: skip
        more |= {name: value for name, value in options.items() if rng.random() < 0.3}
    if rng.random() < 0.1:
        more["partial_rotary_factor"] = rng.choice([0.5, 1.0, 1.0])
    theta = {"rope_theta": rng.choice([10_000.0, 500_000.0, 50, 1000])}
    named = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    spelling = rng.choice(["new", "old"] * 6 + ["new, theta apart", "both", "none"])
    if spelling == "new":
        return {"rope_parameters": {"rope_type": kind, **theta, **more}}
    if spelling == "old":
        scaling = None if kind == "default" else {**named, **more}
        return theta | ({} if scaling is None and rng.random() < 0.5 else {"rope_scaling": scaling})
    if spelling == "new, theta apart":
        return theta | {"rope_parameters": {**named, **more}}
    if spelling == "both":
        parameters = {"rope_type": "default", "rope_theta": 77.0}
        return theta | {"rope_parameters": parameters, "rope_scaling": {**named, **more}}
    return {}


def plain_logits(
    folder: Path, settings: Settings, tokens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the checkpoint, and the logits of all tokens by transformers, in float32 and bfloat16.

    Those in float32 are of the weights as they are saved, which bfloat16 can hold.
    """
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    make_peaky(model)
    found = []
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        found.append(model(torch.tensor(tokens)[None], use_cache=False).logits[0])
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    with torch.inference_mode():
        rough = model.bfloat16()(torch.tensor(tokens)[None], use_cache=False).logits[0]
    return found[0], rough.float()


def other_weights(settings: Settings) -> bool:
    """Whether transformers has no biases of that family where its config asks for some."""
    known = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}
    biases = {name for name in ("attention_bias", "mlp_bias") if settings.get(name)}
    return not biases <= {*known.get(settings["model_type"], ())}


def understood(settings: Settings) -> Architecture | None:
    try:
        return describe(settings)
    except Unknown:
        return None


def load(folder: Path, dtype: str) -> PagedModel | None:
    """None if it is refused, in one sentence."""
    try:
        return load_model(folder, device="cpu", dtype=dtype, max_model_len=PROMPT)
    except ModelError as error:
        if "\n" in str(error):
            raise
        return None


@pytest.mark.parametrize("seed", SEEDS)
def test_any_config_gives_transformers_logits_or_a_sentence(seed: int, tmp_path: Path) -> None:
    settings = draw(Random(seed))
    print(f"seed {seed}: {json.dumps(settings)}")
    tokens = np.random.default_rng(seed).integers(0, 50, PROMPT)
    try:
        exact, rough = plain_logits(tmp_path, settings, tokens)
    except Exception as error:
        print(f"transformers: {error!r}")
        weightless(tmp_path, settings)
        return
    spread, finite = float(exact.std()), bool(exact.isfinite().all())
    model = load(tmp_path, "float32")
    if model is not None and finite:
        assert relative_error(run_steps(model, [tokens], STEPS, 4), [exact]) < 1e-4
        assert isinstance(model, Decoder) or understood(settings) is None or other_weights(settings)
    model = load(tmp_path, "bfloat16")
    if model is not None and finite:
        (got,) = run_steps(model, [tokens], STEPS, 4)
        ours, theirs = (float((logits - exact).std()) / spread for logits in (got, rough))
        print(f"bfloat16: {ours:.4f}, transformers {theirs:.4f}")
        assert ours < 2 * theirs + 0.01


def weightless(folder: Path, settings: Settings) -> None:
    """What transformers does not run, with the weights that the loop would ask for, if it does."""
    architecture = understood(settings)
    if architecture is not None:
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
        if not architecture.tied:
            shapes["lm_head"] = (vocab, hidden)
        for number in range(len(architecture.layers)):
            for name, shape in architecture.layer_shapes(number).items():
                stem, _, end = name.partition(".")
                shapes[f"model.layers.{number}.{NAMES[stem]}.{end or 'weight'}"] = shape
        weights = {
            name if name.endswith(("weight", "bias")) else f"{name}.weight": torch.randn(shape)
            for name, shape in shapes.items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("float32", "bfloat16"):
        load(folder, dtype)


PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CHANGES: list[tuple[str, Settings]] = [
    ("gemma", {"final_logit_softcapping": 30.0}),
    ("gemma2", {"query_pre_attn_scalar": -1}),
    ("gemma2", {"attn_logit_softcapping": 0.0}),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}),
    ("gemma4_text", {"attn_logit_softcapping": 5.0}),
    ("glm", {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0}}),
    ("glm", {"rope_parameters": PARTIAL}),
    ("granite", {"rope_parameters": PARTIAL}),
    ("lfm3", {"partial_rotary_factor": 0.5}),
    ("nemotron_h", {"tie_word_embeddings": True}),
    ("bailing_hybrid", {"tie_word_embeddings": True}),
]


def change(rng: Random, value: Any) -> Any:
    """Another value, more often than not of the same type."""
    if isinstance(value, bool):
        return rng.choice([not value, not value, None])
    if isinstance(value, int):
        return rng.choice([0, 1, 2, value + 1, 2 * value, value // 2, float(value), -1, None])
    if isinstance(value, float):
        return rng.choice([0.0, 1.0, 2 * value, value / 2, -value, "x", None])
    if isinstance(value, list) and value:
        return rng.choice([value[::-1], value[:-1], value + value[:1], rng.sample(value, 1) * 2])
    if isinstance(value, dict) and value:
        return {**value, (name := rng.choice([*value])): change(rng, value[name])}
    return rng.choice([*NONSENSE, "silu", "gelu", "relu2", 0.5])


@pytest.mark.parametrize("seed", [*CHANGES, *SEEDS])
def test_a_changed_config_of_any_family_gives_transformers_logits_or_a_reason(
    seed: int | tuple[str, Settings], tmp_path: Path
) -> None:
    if isinstance(seed, tuple):
        family, more = seed
        rng, settings = Random(0), settings_of(tiny_model(family, tmp_path, **DECODERS[family]))
        settings |= more
    else:
        rng = Random(seed)
        family, other = rng.sample([*DECODERS], 2)
        settings = settings_of(tiny_model(family, tmp_path, **DECODERS[family]))
        foreign = settings_of(tiny_model(other, tmp_path / other, **DECODERS[other]))
        for _ in range(rng.choice([1, 1, 2])):
            name = rng.choice(sorted(settings.keys() - {"model_type", "num_hidden_layers"}))
            settings[name] = change(rng, settings[name])
        if rng.random() < 0.5:
            settings = {rng.choice([*foreign]): rng.choice([*foreign.values()]), **settings}
        if rng.random() < 0.4:
            settings |= draw_rope(rng)
    print(f"{family}: {json.dumps(settings)}")
    try:
        described = describe(settings, PROMPT)
    except Unknown as reason:
        print(reason)
        return
    tokens = np.random.default_rng(0).integers(0, 256, min(PROMPT, described.max_context))
    try:
        expected, _ = plain_logits(tmp_path, settings, tokens)
    except Exception as error:
        print(f"transformers: {error!r}")
        return
    try:
        got = logits_by_reference(tmp_path, described, tokens=torch.tensor(tokens))
    except (Unknown, ModelError) as reason:
        print(reason)
        return
    if expected.isfinite().all() and expected.std():
        assert relative_error([got], [expected]) < 1e-4
