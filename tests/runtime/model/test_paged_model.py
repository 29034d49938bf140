"""Models over pages give the logits of the plain forward, or the gate stops them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels import choose
from radixcache.kernels.attention import AttentionBackend
from radixcache.kernels.native.library import problem
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.recurrence import recur as loop
from radixcache.runtime.model import load
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.fallback import loading
from radixcache.runtime.model.fallback.loading import load_transformers
from radixcache.runtime.model.fallback.model import TransformersModel
from radixcache.runtime.model.fallback.verification import check_logits
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from tests.helpers.cover import covering_of
from tests.helpers.decoders import DECODERS
from tests.helpers.models import FAMILIES, MULTIMODAL, NUM_LAYERS, VOCAB_SIZE, tiny_model
from tests.runtime.model.steps import (
    LATENT,
    LOOPED,
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
)
from tests.scripts.families import OTHERS

OPERATIONS = ["torch"] if problem() else ["torch", "native kernels"]
OTHER_DECODERS = [family for family in [*DECODERS, *MULTIMODAL] if family not in LOOPED]


def load_layers(folder: Path, layers: str) -> PagedModel:
    """With transformers' layers ("stock"), or with the loop and those operations."""
    cpu = torch.device("cpu")
    if layers == "stock":
        model = load_transformers(folder, torch.float32, cpu)
        assert isinstance(model, TransformersModel)
        return model
    attention = TorchAttention(cpu) if layers == "torch" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "find_recurrence", lambda *_: loop)
        model = load_model(folder, device=cpu, dtype="float32", attention=attention)
    assert isinstance(model, Decoder) and f"by radixcache with {layers}" in model.placement
    return model


KINDS = [
    *((family, "stock") for family in FAMILIES),
    *((family, layers) for family in LOOPED for layers in OPERATIONS),
    *((family, "torch") for family in OTHER_DECODERS),
    *((family, "native kernels") for family in OTHER_DECODERS if len(OPERATIONS) > 1),
]


@covering_of(["family", "layers"], KINDS)
def test_logits_over_pages_equal_the_plain_forward_and_a_wrong_page_shows(family, layers, tmp_path):
    folder = tiny_model(family, tmp_path, tokenizer=False, **DECODERS.get(family, {}))
    sequences = random_sequences()
    plain = plain_logits(folder, sequences)
    top = torch.cat([rows.softmax(-1).max(-1).values for rows in plain])
    assert top.mean() > 0.3 or family not in FAMILIES, "weights that are not peaky hide bugs"
    model = load_layers(folder, layers)
    assert model.dtype == torch.float32 and model.vocab_size == VOCAB_SIZE
    for page_size in (1, 16):
        for steps in STEPS:
            assert relative_error(run_steps(model, sequences, steps, page_size), plain) < 1e-4
        damaged = run_steps(model, sequences, STEPS[2], page_size, damage=True)
        assert relative_error(damaged, plain) > (1e-2 if page_size == 1 else 0.05)


UNLISTED = "stablelm gpt_neox gpt2 phi starcoder2".split()
PER_LAYER = {
    "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_hidden_layers": 3,
    "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0, "sliding_window": 11,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "attention_magic": 1,  # which our loop does not know
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # Fused QKV, no keyword arguments, learned positions, and attention sinks are among them.
        *((family, OTHERS[family]) for family in UNLISTED),
        ("deepseek_v3", {**LATENT, "attention_magic": 1}),  # values wider than keys
        ("gemma4_text", PER_LAYER),  # other heads in full attention layers than in sliding ones
    ],
)
def test_an_unlisted_family_passes_through_conformance(family, options, tmp_path, monkeypatch):
    checked, check = [], check_logits

    def check_and_note(model: TransformersModel, again: Callable[[], object] | None) -> None:
        check(model, again)
        checked.append(model)

    monkeypatch.setattr(loading, "check_logits", check_and_note)
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    model = load_model(folder, device="cpu")
    assert checked == [model]
    sequences = random_sequences()
    plain = plain_logits(folder, sequences)
    assert relative_error(run_steps(model, sequences, STEPS[0], 4), plain) < 1e-4


def test_deep_models_that_round_much_are_judged_in_float32(tmp_path, monkeypatch) -> None:
    checked, check = [], check_logits

    def note(model: TransformersModel, again: Callable[[], object] | None) -> None:
        checked.append(model.dtype)
        check(model, again)

    monkeypatch.setattr(loading, "check_logits", note)
    folder = tiny_model("nemotron", tmp_path, tokenizer=False, num_hidden_layers=16)
    model = load_model(folder, device="cpu", dtype="bfloat16")
    assert isinstance(model, TransformersModel)
    with pytest.raises(ModelError, match="float32 tells if it is rounding"):
        check(model)
    assert checked == [torch.bfloat16, torch.float32] and model.dtype == torch.bfloat16
    attend_as(monkeypatch, type(model.attention), window=20)
    with pytest.raises(ModelError, match="logits come out wrong"):
        load_model(folder, device="cpu", dtype="bfloat16")


def test_the_gate_refuses_logits_that_differ(path, monkeypatch) -> None:
    model: Any = load_layers(path, "stock")
    check_logits(model)
    for wrong in ({"window": 20}, {"softcap": 1.0}, {"scale": 0.2}):
        with monkeypatch.context() as patch:
            attend_as(patch, type(model.attention), **wrong)
            with pytest.raises(ModelError, match="come out wrong"):
                check_logits(model)


def attend_as(patch: pytest.MonkeyPatch, backend: type[AttentionBackend], **wrong: Any) -> None:
    """Let all layers attend as one of a kind with these options."""
    make = backend._plan

    def plan(*args: Any) -> Any:
        made: Any = make(*args)
        run = made.run
        made.run = lambda x: run(x._replace(layer=x.layer._replace(**wrong)))
        return made

    patch.setattr(backend, "_plan", plan)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma3_text", {"rope_parameters": {"full_attention": DYNAMIC}}, "dynamic RoPE"),
        ("mistral", {"sliding_window": 0}, "a window of no token"),
        ("llama4_text", {}, "chunked_attention"),
        ("jamba", {}, "a trial run with a cache failed"),
        ("diffllama", {}, "more than once"),
        ("bloom", {}, "does not let its attention be replaced"),
        ("gptj", {}, "does not let its attention be replaced|a trial run failed"),  # since 5.24
        ("bert", {}, "an encoder"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "an encoder"),
        ("bart", {}, f"names {NUM_LAYERS} layers with attention, but attention runs in 12"),
    ],
)
def test_a_model_that_would_be_wrong_is_refused_in_one_sentence(family, options, reason, tmp_path):
    tiny_model(family, tmp_path, tokenizer=False, **options)
    with pytest.raises(ModelError, match=reason) as refused:
        load_model(tmp_path, device="cpu")
    message = str(refused.value)
    assert repr(family) in message and "\n" not in message and ". " not in message


@pytest.mark.parametrize(
    ("rope", "allowed", "context"),
    [(DYNAMIC, None, 64), (DYNAMIC, 100, 100), (LONG, None, 32), (LONG, 33, 33), (LONG, 32, 32)],
)
def test_frequencies_are_those_of_the_length_that_is_allowed(rope, allowed, context, tmp_path):
    """Of a short hit as of a long text: transformers has them at a length beyond the first."""
    rope = {**rope, "original_max_position_embeddings": 32}
    options = {"rope_parameters": rope, "max_position_embeddings": 64}
    folder = tiny_model("llama", tmp_path, tokenizer=False, **options)
    model = load_model(folder, device="cpu", max_model_len=allowed)
    assert model.max_context == context
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, context)
    steps = [(5,), (context - 6,), (1,)]
    plain = plain_logits(folder, [tokens])
    assert relative_error(run_steps(model, [tokens], steps, 4), plain) < 1e-4


def test_what_cannot_be_loaded_is_said_in_one_sentence(path, tmp_path) -> None:
    def refusal(path: Path | str) -> str:
        with pytest.raises(ModelError) as refused:
            load_model(path, device="cpu")
        error = refused.value
        assert error.__cause__ is None and (error.__suppress_context__ or not error.__context__)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "no such folder" in refusal(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "the folder has no config.json" in refusal(tmp_path / "empty")
    config = json.loads((path / "config.json").read_text())
    for more in ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        assert "the folder has no .safetensors file" in refusal(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of its weights, model.norm.weight" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    assert "nonesuch" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "does not load" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("a/b is not a local folder"), "no model at a/b: no such folder"),
        (OSError("You are trying to access a gated repo.\nMake sure"), "a gated repo"),
        (ValueError("The repository a/b contains custom code\nmore"), "contains custom code"),
    ],
)
def test_a_model_of_the_hub_that_does_not_load_is_not_called_absent(error, said, monkeypatch):
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(load, "check_model", lambda name: None)  # the hub has answered
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", fail)
    with pytest.raises(ModelError, match=said) as refused:
        load_model("a/b", device="cpu")
    assert ("no such folder" in str(refused.value)) == ("no such folder" in said)


def test_dtypes_and_devices(path) -> None:
    assert load_model(path, device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(path, device="cpu", dtype=torch.float16).dtype == torch.float16
    wrong: list[dict[str, Any]] = [{"dtype": "int8"}, {"dtype": torch.int64}, {"device": "gpu"}]
    for options in wrong:
        with pytest.raises(InvalidRequest, match="unknown"):
            load_model(path, **{"device": "cpu", **options})
    if not torch.cuda.is_available():
        assert load_model(path).device.type == "cpu"
        with pytest.raises(InvalidRequest, match="no CUDA"):
            load_model(path, device="cuda")


@pytest.mark.parametrize(
    ("named", "ends"), [([1, 10**6, -1], [1]), (VOCAB_SIZE, []), (VOCAB_SIZE - 1, [VOCAB_SIZE - 1])]
)
def test_ends_outside_the_vocabulary_are_none(tmp_path: Path, named: Any, ends: list[int]) -> None:
    tiny_model("llama", tmp_path, tokenizer=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    model = load_model(tmp_path, device="cpu")
    assert model.eos_token_ids == ends
