"""The decoder loop computes what transformers' layers do, and leaves to them what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from radixcache.errors import ModelError
from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.backend import Backend
from radixcache.kernels.choose import choose_backend
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.spec import Architecture, Attention, Unknown, Weights
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.operators import TorchLinear
from radixcache.runtime.model import decoder, layer_loop
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.fallback import loading
from radixcache.runtime.model.fallback.model import TransformersModel
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.runtime.model.load import load_model
from tests.helpers.decoders import DECODERS
from tests.helpers.models import NUM_LAYERS, tiny_model
from tests.helpers.native import needs_kernels
from tests.runtime.model import exact_schedules
from tests.runtime.model.steps import (
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
    settings_of,
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), tokenizer=False)


PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("starcoder2", {}, "no loop for starcoder2"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("llama", {"attention_magic": 2.0}, "its config has attention_magic"),
        ("llama", {"rope_parameters": PARTIAL}, "its RoPE is default"),
        ("mistral", {"attention_bias": True}, "its checkpoint has other weights"),
    ],
)
def test_transformers_layers_run_what_the_loop_does_not_know(
    family, options, reason, tmp_path, caplog
) -> None:
    caplog.set_level("INFO", "radixcache")
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    assert isinstance(load_model(folder, device="cpu"), TransformersModel)
    assert reason in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"rope_parameters": "yarn"},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},  # beside rope_parameters
        {"num_hidden_layers": "three"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": False},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"vocab_size": 260.0},
        {"eos_token_id": "2"},
        {"layer_types": ["full_attention"] * (NUM_LAYERS + 1)},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["linear_attention"] * NUM_LAYERS},
        {"layer_types": ["sliding_attention"] * NUM_LAYERS, "use_sliding_window": True},
        {"model_type": "mistral", "layer_types": None, "sliding_window": 0},
        {
            "layer_types": None,
            "max_window_layers": 1,
            "sliding_window": 0,
            "use_sliding_window": True,
        },
    ],
)
def test_what_makes_no_sense_is_left_to_transformers(qwen, settings) -> None:
    with pytest.raises(Unknown):
        describe({**settings_of(qwen), **settings})


def test_a_checkpoint_in_several_files_gives_the_same_model(qwen, tmp_path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(qwen)
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sequences = random_sequences()
    one, many = (load_model(folder, device="cpu") for folder in (qwen, tmp_path))
    assert isinstance(many, Decoder)
    for a, b in zip(*(run_steps(m, sequences, STEPS[1], 4) for m in (one, many)), strict=True):
        assert torch.equal(a, b)
    index = tmp_path / "model.safetensors.index.json"
    weights = json.loads(index.read_text())
    (tmp_path / weights["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(ModelError, match=r"lacks model-.*, which its index names"):
        load_model(tmp_path, device="cpu")


def test_a_wrong_scale_is_refused_at_load(qwen, monkeypatch, caplog) -> None:
    load = partial(load_model, qwen, device="cpu", attention=TorchAttention(torch.device("cpu")))
    caplog.set_level("INFO", "radixcache")
    assert isinstance(load(), Decoder) and not caplog.text
    right = TorchLinear.__call__
    monkeypatch.setattr(TorchLinear, "__call__", lambda *given: right(*given) * 1.05)
    assert isinstance(load(), TransformersModel) and "come out wrong" in caplog.text


def swap_products(weights: list[Weights], _: float) -> None:
    weights[0]["down"], weights[1]["down"] = weights[1]["down"], weights[0]["down"]


def scale_scores(architecture: Architecture, by: float) -> Architecture:
    first, *rest = architecture.layers
    assert isinstance(first.mixer, Attention)
    mixer = replace(first.mixer, kind=first.mixer.kind._replace(scale=by))
    return replace(architecture, layers=(replace(first, mixer=mixer), *rest))


def scale_rope(architecture: Architecture, by: float) -> Architecture:
    return replace(architecture, ropes=(replace(architecture.ropes[0], scale=by),))


def scale_frequencies(architecture: Architecture, by: float) -> Architecture:
    (rope,) = architecture.ropes
    return replace(architecture, ropes=(replace(rope, frequencies=rope.frequencies * by),))


WRONG_WEIGHTS: dict[str, Callable[[list[Weights], float], object]] = {
    "norm": lambda weights, by: weights[1]["mlp_norm"].mul_(by),
    "norm of keys": lambda weights, by: weights[0]["key_norm"].mul_(by),
    "products": swap_products,
}
WRONG_DESCRIPTIONS = {
    "scores": scale_scores, "scale of RoPE": scale_rope, "frequencies": scale_frequencies,
}  # fmt: skip


def refuses_fault(folder: Path, fault: str, scale: float, dtype: str, patch: Any, log: Any) -> None:
    """The layers get other weights, or another description, than the reference."""

    def choose(architecture: Architecture, *rest: Any) -> Any:
        change = WRONG_DESCRIPTIONS.get(fault, lambda same, _: same)
        return choose_backend(change(architecture, scale), *rest)

    def make(backend: Backend) -> Any:
        layers: Any = layer_loop.layers_of(backend)
        load_layer, load_last, weights = layers.layer, layers.loaded, list[Weights]()

        def loaded(last_norm: torch.Tensor) -> None:
            WRONG_WEIGHTS.get(fault, lambda *_: None)(weights, scale)
            for number, of_layer in enumerate(weights):
                load_layer(number, of_layer)
            load_last(last_norm)

        layers.layer = lambda _, of_layer: weights.append(dict(of_layer))
        layers.loaded = loaded
        return layers

    log.set_level("INFO", "radixcache")
    patch.setattr(decoder, "choose_backend", choose)
    patch.setattr(decoder, "layers_of", make)
    assert isinstance(load_model(folder, device="cpu", dtype=dtype), TransformersModel)
    assert "come out wrong" in log.text


@needs_kernels
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.05), ("bfloat16", 1.5)])
@pytest.mark.parametrize("fault", [*WRONG_WEIGHTS, *WRONG_DESCRIPTIONS])
def test_a_fault_in_what_the_native_step_is_given_is_refused_at_load(
    qwen, fault, dtype, scale, monkeypatch, caplog
) -> None:
    refuses_fault(qwen, fault, scale, dtype, monkeypatch, caplog)


@needs_kernels
def test_a_deep_model_may_round_more_and_is_refused_all_the_same(monkeypatch, caplog, tmp_path):
    deep = tiny_model("llama", tmp_path, tokenizer=False, num_hidden_layers=40)
    monkeypatch.setitem(decoder._TOLERANCES, torch.bfloat16, 1e-3)
    assert isinstance(load_model(deep, device="cpu", dtype="bfloat16"), Decoder)
    monkeypatch.setattr(loading, "check_logits", lambda *_: None)  # it rounds, too
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_ROUNDINGS", 0)
        assert isinstance(load_model(deep, device="cpu", dtype="bfloat16"), TransformersModel)
    refuses_fault(deep, "norm", 2, "bfloat16", monkeypatch, caplog)


@needs_kernels
def test_experts_may_change_places_in_bfloat16_and_faults_are_seen(monkeypatch, caplog, tmp_path):
    model = load_model(exact_schedules.folder("qwen3_next"), device="cpu", dtype="bfloat16")
    assert isinstance(model, Decoder)
    folder = tiny_model(
        "qwen3_moe", tmp_path, tokenizer=False, **exact_schedules.MODELS["qwen3_moe"]
    )
    monkeypatch.setattr(loading, "check_logits", lambda *_: None)
    refuses_fault(folder, "norm", 2, "bfloat16", monkeypatch, caplog)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_that_is_stored_beside_a_tied_embedding_is_taken(qwen, equal, tmp_path) -> None:
    """As transformers does, which ties them if they are equal."""
    settings = {**settings_of(qwen), "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    weights = load_file(qwen / "model.safetensors")
    if equal:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, sequences = load_model(tmp_path, device="cpu"), random_sequences()
    assert isinstance(model, Decoder)
    plain = plain_logits(tmp_path if equal else qwen, sequences)
    assert relative_error(run_steps(model, sequences, STEPS[1], 4), plain) < 1e-4


def test_weights_that_are_not_numbers_are_refused_at_load(qwen, tmp_path, caplog) -> None:
    """Also one that chooses experts, after which logits are numbers."""
    caplog.set_level("INFO", "radixcache")
    folder = tiny_model("glm4_moe", tmp_path / "moe", tokenizer=False, **DECODERS["glm4_moe"])
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.gate.e_score_correction_bias"][2] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="correction of the model's layer 1 has values that are N"):
        load_model(folder, device="cpu")
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((qwen / file).read_text())
    weights = load_file(qwen / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="its logits are not numbers"):
        load_model(tmp_path, device="cpu")
    assert "own layers run this model: its logits are not numbers" in caplog.text


def one_sequence(count: int) -> PagedBatch:
    return PagedBatch.of([np.array([3, 1, 0, 2], np.int32)], [count], [count], 4)


@pytest.mark.parametrize(
    "backend", [TorchAttention, pytest.param(NativeAttention, marks=needs_kernels)]
)
def test_logits_of_some_rows_in_any_order_are_those_of_all(qwen, backend) -> None:
    attention = backend() if backend is NativeAttention else backend(torch.device("cpu"))
    model = load_model(qwen, device="cpu", attention=attention)
    pool, tokens = model.allocate(4, 4), np.arange(11)
    whole = model.forward(tokens, one_sequence(11), np.arange(11), pool)
    for wanted in ([10], [3, 0, 9], [5, 5], [], [7] * 2000):
        some = model.forward(tokens, one_sequence(11), np.array(wanted, np.int64), pool)
        torch.testing.assert_close(some, whole[wanted], atol=1e-4, rtol=1e-4)


@needs_kernels
def test_tokens_and_rows_that_do_not_exist_are_refused(qwen) -> None:
    model = load_model(qwen, device="cpu")
    pool = model.allocate(4, 4)
    for tokens, wanted in (([-1, 3], [1]), ([3, model.vocab_size], [1]), ([3, 4], [2])):
        with pytest.raises(IndexError):
            model.forward(np.array(tokens), one_sequence(2), np.array(wanted), pool)
    model.forward(np.array([3, 4]), one_sequence(2), np.array([1]), pool)
    wrong = KVPool(model.shapes, 4, 4, torch.float64, model.device)
    with pytest.raises(ValueError, match="no native kernels"):
        model.forward(np.array([3, 4]), one_sequence(2), np.array([1]), wrong)


@pytest.mark.parametrize(
    "backend", [TorchAttention, pytest.param(NativeAttention, marks=needs_kernels)]
)
def test_a_step_of_many_rows_gives_what_steps_of_few_give(qwen, backend, monkeypatch) -> None:
    """More rows than an MLP holds at once."""
    monkeypatch.setattr(layer_loop, "_MLP_ROWS", 5)
    attention = backend() if backend is NativeAttention else backend(torch.device("cpu"))
    model = load_model(qwen, device="cpu", attention=attention)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 1100)
    outs = []
    for counts in ([1100], [500, 500, 100]):
        pool, done, rows = model.allocate(1, 1100), 0, []
        for count in counts:
            done += count
            batch = PagedBatch.of([np.zeros(1, np.int32)], [count], [done], 1100)
            chunk = tokens[done - count : done]
            rows.append(model.forward(chunk, batch, np.arange(count), pool))
        outs.append(torch.cat(rows))
    assert relative_error(outs[:1], outs[1:]) < 1e-4
