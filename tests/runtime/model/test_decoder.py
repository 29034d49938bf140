"""The decoder loop computes what transformers' layers do, and leaves to them what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from radixcache.errors import ModelError
from radixcache.kernels import native
from radixcache.kernels.attention import AttentionBackend, PagedBatch
from radixcache.kernels.native import NativeBackend
from radixcache.kernels.torch_backend import TorchBackend
from radixcache.runtime.model import (
    decoder,
    native_operations,
    operations,
    packed_linear,
    reference,
)
from radixcache.runtime.model.architecture import Unknown, understand
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.native_operations import NativeOperations
from radixcache.runtime.model.operations import Operations, PlainProduct, join
from radixcache.runtime.model.packed_linear import PackedProduct, can_pack
from radixcache.runtime.model.stock_model import StockModel
from tests.models import EOS, NUM_LAYERS, tiny_model
from tests.runtime.model.test_paged_model import (
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
)

needs_native = pytest.mark.skipif(native.problem() is not None, reason="no C++ compiler")
needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="oneDNN on x86-64 only")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), tokenizer=False)


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-2}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        ("llama", rope("linear", factor=3.0)),
        ("llama", rope("llama3", **LLAMA3)),
        ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
        ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0)),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32, "max_window_layers": 1, "sliding_window": 9,
                   "use_sliding_window": True}),
        ("qwen2", {"max_window_layers": 1, "sliding_window": 9, "use_sliding_window": True}),
        ("mistral", {"sliding_window": None, "head_dim": 8}),
        ("mistral", {"sliding_window": 1 << 32}),
    ],
)  # fmt: skip
def test_settings_of_the_known_families(family, options, tmp_path) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    model = load_model(folder, device="cpu")
    assert isinstance(model, Decoder)
    sequences = random_sequences()
    plain = plain_logits(folder, sequences)
    assert relative_error(run_steps(model, sequences, STEPS[2], 4), plain) < 1e-4


@pytest.mark.parametrize(
    ("family", "options", "scaling"),
    [
        ("llama", {}, None),
        ("llama", rope("linear", factor=3.0), {"type": "linear", "factor": 3.0}),
        ("llama", rope("llama3", **LLAMA3), {"rope_type": "llama3", **LLAMA3}),
        ("qwen2", {"max_window_layers": 1, "sliding_window": 9, "use_sliding_window": True}, None),
        ("mistral", {}, None),
    ],
)
def test_configs_as_they_were_written_before_version_5(family, options, scaling, tmp_path) -> None:
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    settings = settings_of(folder)
    settings["rope_theta"] = settings.pop("rope_parameters")["rope_theta"]
    settings |= {"rope_scaling": scaling, "torch_dtype": settings.pop("dtype")}
    settings.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink()
    model = load_model(folder, device="cpu")
    assert isinstance(model, Decoder) and model.eos_token_ids == [EOS]
    sequences = random_sequences()
    plain = plain_logits(folder, sequences)
    assert relative_error(run_steps(model, sequences, STEPS[2], 4), plain) < 1e-4


def test_the_reference_is_transformers_forward_pass(tmp_path) -> None:
    """Which it stands for at load: with windows, biases, and norms of heads."""
    options = {"max_window_layers": 1, "sliding_window": 5, "use_sliding_window": True}
    for family, more in (("qwen3", options), ("llama", {"attention_bias": True, "mlp_bias": True})):
        folder = tiny_model(family, tmp_path / family, tokenizer=False, **more)
        architecture = understand(settings_of(folder))
        weights = load_file(folder / "model.safetensors")
        tokens = np.random.default_rng(3).integers(0, 256, 20)
        hidden = weights["model.embed_tokens.weight"][tokens]
        for layer in range(len(architecture.kinds)):
            names = architecture.layer_shapes(layer)
            of_layer = {name: weights[f"model.layers.{layer}.{name}"] for name in names}
            hidden = reference.run_layer(architecture, layer, hidden, of_layer)
        hidden = reference.rms_norm(hidden, weights["model.norm.weight"], architecture.eps)
        logits = [hidden @ weights["lm_head.weight"].T]
        assert relative_error(logits, plain_logits(folder, [tokens])) < 1e-5


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma", {}, "no loop for gemma"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("llama", {"attention_magic": 2.0}, "its config has attention_magic"),
        ("llama", rope("default", partial_rotary_factor=0.5), "its RoPE is default"),
        ("mistral", {"attention_bias": True}, "its checkpoint has other weights"),
    ],
)
def test_transformers_layers_run_what_the_loop_does_not_know(
    family, options, reason, tmp_path, caplog
) -> None:
    caplog.set_level("INFO", "radixcache")
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    assert isinstance(load_model(folder, device="cpu"), StockModel)
    assert reason in caplog.text


def test_a_checkpoint_with_more_weights_is_not_for_the_loop(qwen, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "radixcache")
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((qwen / file).read_text())
    weights = load_file(qwen / "model.safetensors")
    weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(load_model(tmp_path, device="cpu"), StockModel)
    assert "other weights" in caplog.text


@pytest.mark.parametrize(
    ("setting", "off", "on"),
    [("quantization_config", None, {"quant_method": "fp8"}), ("use_mrope", False, True)],
)
def test_a_setting_that_is_off_changes_nothing(qwen, setting, off, on) -> None:
    assert understand({**settings_of(qwen), setting: off}).head_norms
    with pytest.raises(Unknown, match=setting):
        understand({**settings_of(qwen), setting: on})


@pytest.mark.parametrize("setting", ["rms_norm_eps", "head_dim", "num_key_value_heads"])
def test_what_a_config_leaves_to_a_default_of_the_family_is_left_to_transformers(
    qwen, setting
) -> None:
    settings = settings_of(qwen)
    del settings[setting]
    with pytest.raises(Unknown, match=setting):
        understand(settings)


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
        understand({**settings_of(qwen), **settings})


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
    with pytest.raises(ModelError, match="does not load"):
        load_model(tmp_path, device="cpu")


def scaled(result: Any, by: float) -> Any:
    """The result of an operation with each of its tensors as many times as large."""
    return [t * by for t in result] if isinstance(result, tuple) else result * by


def refuses_wrong_scale(
    folder: Path,
    owner: Any,
    operation: str,
    attention: AttentionBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str = "float32",
    scale: float = 1.05,
) -> None:
    """The model is ours with `owner.operation` as it is, and transformers' with a wrong one."""

    def load() -> Any:
        return load_model(folder, device="cpu", dtype=dtype, attention=attention)

    caplog.set_level("INFO", "radixcache")
    assert isinstance(load(), Decoder) and not caplog.text
    right, calls = getattr(owner, operation), []

    def wrong(*args: Any, **options: Any) -> Any:
        calls.append(operation)
        return scaled(right(*args, **options), scale)

    monkeypatch.setattr(owner, operation, wrong)
    assert isinstance(load(), StockModel) and "come out wrong" in caplog.text and calls


@pytest.mark.parametrize(
    ("owner", "operation"),
    [
        (Operations, "norm"), (Operations, "rotation"), (Operations, "turn"),
        (Operations, "attend"), (Operations, "project"), (Operations, "gated"),
        (PlainProduct, "__call__"), (PlainProduct, "silu"), (TorchBackend, "run"),
        pytest.param(PackedProduct, "__call__", marks=needs_packing),
        pytest.param(PackedProduct, "silu", marks=needs_packing),
    ],
)  # fmt: skip
def test_a_wrong_scale_in_any_operation_is_refused_at_load(
    qwen, owner, operation, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(packed_linear, "_MIN_WEIGHTS", 1 if owner is PackedProduct else 1 << 30)
    refuses_wrong_scale(
        qwen, owner, operation, TorchBackend(torch.device("cpu")), monkeypatch, caplog
    )


@needs_native
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.05), ("bfloat16", 1.5)])
@pytest.mark.parametrize(
    ("owner", "operation"),
    [
        (NativeOperations, "norm"), (NativeOperations, "rotation"), (NativeOperations, "heads"),
        (NativeOperations, "attend"), (NativeOperations, "project"), (NativeOperations, "gated"),
        (native_operations, "rms_norm"), (NativeBackend, "run"),
    ],
)  # fmt: skip
def test_a_wrong_scale_in_any_native_operation_is_refused_at_load(
    qwen, owner, operation, dtype, scale, monkeypatch, caplog
) -> None:
    refuses_wrong_scale(qwen, owner, operation, NativeBackend(), monkeypatch, caplog, dtype, scale)


@needs_native
@pytest.mark.parametrize(
    ("owner", "operation"), [(NativeOperations, "heads"), (native_operations, "rms_norm")]
)
def test_a_deep_model_may_round_more_and_is_refused_all_the_same(
    owner, operation, monkeypatch, caplog, tmp_path
) -> None:
    deep = tiny_model("llama", tmp_path, tokenizer=False, num_hidden_layers=40)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_ROUNDINGS", 0)
        assert isinstance(load_model(deep, device="cpu", dtype="bfloat16"), StockModel)
    refuses_wrong_scale(deep, owner, operation, NativeBackend(), monkeypatch, caplog, "bfloat16", 2)


def test_weights_that_are_not_numbers_are_refused_at_load(qwen, tmp_path, caplog) -> None:
    caplog.set_level("INFO", "radixcache")
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((qwen / file).read_text())
    weights = load_file(qwen / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="its logits are not numbers"):
        load_model(tmp_path, device="cpu")
    assert "come out wrong" in caplog.text


def test_the_last_layer_ends_with_the_rows_whose_logits_are_wanted(qwen, monkeypatch) -> None:
    model = load_model(qwen, device="cpu")
    rows: list[int] = []
    gated = operations.Operations.gated

    def count(self: Operations, x: torch.Tensor, weights: Any) -> torch.Tensor:
        rows.append(len(x))
        return gated(self, x, weights)

    monkeypatch.setattr(operations.Operations, "gated", count)
    batch = PagedBatch(
        np.array([0, 7], np.int32), np.array([0, 2], np.int32), np.array([3, 1], np.int32),
        np.array([3], np.int32), 4,
    )  # fmt: skip
    pool = model.allocate(4, 4)
    model.forward(np.arange(7), batch, np.array([6]), pool)
    model.forward(np.arange(7), batch, np.array([], np.int64), pool)
    assert rows == [7] * (NUM_LAYERS - 1) + [1] + [7] * (NUM_LAYERS - 1)


def test_many_rows_go_through_the_mlp_in_parts_of_two_rows_or_more(qwen, monkeypatch) -> None:
    model = load_model(qwen, device="cpu")
    assert isinstance(model, Decoder)
    whole, layer, rows = model._operations.gated, model._layers[0], list[int]()
    monkeypatch.setattr(operations, "_MLP_ROWS", 5)

    def gated(x: torch.Tensor, weights: Any) -> torch.Tensor:
        rows.append(len(x))
        return whole(x, weights)

    monkeypatch.setattr(model._operations, "gated", gated)
    torch.manual_seed(3)
    for count in range(1, 19):
        x = torch.randn(count, model._architecture.hidden_size)
        expected = layer.down(whole(x.clone(), layer.gate_up))
        rows.clear()
        assert relative_error([model._operations.mlp(layer, x)], [expected]) < 1e-5
        assert sum(rows) == count and max(rows) <= 6 and (min(rows) > 1 or count == 1)


@needs_packing
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_is_read_from_the_packed_head(dtype, tmp_path, monkeypatch) -> None:
    if not can_pack(getattr(torch, dtype)):
        pytest.skip("no bfloat16 here")
    monkeypatch.setattr(packed_linear, "_MIN_WEIGHTS", 1)
    folder = tiny_model("llama", tmp_path, tokenizer=False, tie_word_embeddings=True)
    tied = load_model(folder, device="cpu", dtype=dtype)
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert isinstance(tied, Decoder)
    ids = torch.arange(len(weight))
    assert torch.equal(tied._embed(ids), weight.to(tied.dtype))
    if torch.cpu._is_avx512_supported():
        assert isinstance(tied._embed, packed_linear.PackedRows)


def test_weights_side_by_side_are_joined_without_a_copy() -> None:
    whole = torch.randn(9, 4)
    first, second, third = whole.split([2, 3, 4])
    joined = join([first, second, third])
    assert torch.equal(joined, whole) and joined.data_ptr() == whole.data_ptr()
    assert join([second, third]).data_ptr() == second.data_ptr()
    for parts in ([second, first], [first, third], [first[:, :2], second[:, :2]]):
        copied = join(list(parts))
        assert torch.equal(copied, torch.cat(list(parts)))
        assert copied.data_ptr() not in {part.data_ptr() for part in parts}
    biases = torch.randn(6)
    assert join([biases[:2], biases[2:]]).data_ptr() == biases.data_ptr()
