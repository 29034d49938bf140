"""MLA in the loop: pages of latents give transformers' answers, whatever a step is made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from radixcache import SamplingParams
from radixcache.errors import ModelError
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.native.layers import NativeLayers
from radixcache.kernels.spec import Latent, Unknown
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.operators import TorchBackend
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.kv_pool import LayerShape
from radixcache.runtime.model.load import load_model
from tests.helpers import engines
from tests.helpers.decoders import DECODERS
from tests.helpers.engines import generated, is_greedy, make_engine, run
from tests.helpers.models import MLA, tiny_model
from tests.helpers.native import needs_kernels
from tests.kernels.gpu import simulated_gpu
from tests.runtime.model.steps import (
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
    settings_of,
)

FAMILIES = [family for family in MLA if family in DECODERS]
ATTENTION = [TorchAttention, pytest.param(NativeAttention, marks=needs_kernels)]


def made(family: str, folder: Path, **options: Any) -> Path:
    return tiny_model(family, folder, tokenizer=False, **{**DECODERS[family], **options})


def typical_error(got: list[torch.Tensor], plain: list[torch.Tensor]) -> float:
    """A token's median: nearly tied experts may change places, and give some another MLP."""
    wrong = (torch.cat(got) - torch.cat(plain)).std(1) / torch.cat(plain).std()
    return float(wrong.nan_to_num(torch.inf).median())


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.08)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_any_chunks_are_those_of_one_forward_and_a_wrong_page_shows(
    family: str, dtype: str, limit: float, attention: Any, tmp_path: Path
) -> None:
    folder, sequences = made(family, tmp_path), random_sequences()
    model = load_model(folder, device="cpu", dtype=dtype, attention=attention())
    assert isinstance(model, Decoder)
    assert model.shapes == [LayerShape(1, 32, 8)] * 2
    assert model.bytes_per_token == 2 * (32 + 8) * model.dtype.itemsize
    plain = plain_logits(folder, sequences)

    error = relative_error if dtype == "float32" else typical_error
    for page_size, steps in ((16, STEPS[0]), (1, STEPS[1]), (4, STEPS[2])):
        assert error(run_steps(model, sequences, steps, page_size), plain) < limit
    if dtype == "float32":
        damaged = run_steps(model, sequences, STEPS[2], 16, damage=True)
        assert relative_error(damaged, plain) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_behind_hits_are_greedy(family: str, tmp_path: Path) -> None:
    folder, rng = made(family, tmp_path), random.Random(3)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stem = [rng.randrange(250) for _ in range(30)]
    prompts = [[*stem[: rng.randint(5, 30)], rng.randrange(250)] for _ in range(6)]
    engine = make_engine(folder, page_size=4, max_num_batched_tokens=20)
    answers = [tokens for (tokens,) in generated(run(engine, prompts, params))]
    assert engine.scheduler.cache.stats.hit_tokens
    assert all(is_greedy(folder, *pair, 1e-4) for pair in zip(prompts, answers, strict=True))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["k_b", "v_b"])
def test_a_loop_that_does_not_absorb_is_found_at_load(
    attention: Any, name: str, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Queries meet the latents as they are, or the output takes their first numbers."""
    folder = made("deepseek_v3", tmp_path)

    def plain(by_head: Any) -> Any:
        def patched(self: Any, weight: Any, heads: int) -> Any:
            size = weight.shape[0] // heads
            if size == {"k_b": 32, "v_b": 24}[name]:
                weight = torch.eye(size, weight.shape[1]).tile(heads, 1)
            return by_head(self, weight, heads)

        return patched

    monkeypatch.setattr(TorchBackend, "heads_linear", plain(TorchBackend.heads_linear))
    monkeypatch.setattr(NativeLayers, "_by_head", plain(NativeLayers._by_head))
    caplog.set_level("INFO", "radixcache")
    model = load_model(folder, device="cpu", attention=attention())
    assert not isinstance(model, Decoder)
    assert "come out wrong in our loop" in caplog.text


@pytest.mark.parametrize("wrong", [
    {"index_topk": 4}, {"rope_interleave": False}, {"num_key_value_heads": 2},
    {"qk_rope_head_dim": 1 << 17}, {"kv_lora_rank": 0}, {"scoring_func": "softmax"},
    {"topk_method": "greedy"}, {"qk_head_dim": 23}, {"moe_layer_freq": 2},
])  # fmt: skip
def test_settings_of_another_model_are_not_taken_for_this_one(wrong, tmp_path: Path) -> None:
    settings = settings_of(made("deepseek_v3", tmp_path))
    describe(settings)
    with pytest.raises(Unknown):
        describe({**settings, **wrong})


@pytest.mark.parametrize("wrong", [{"topk_method": "noaux_tc"}, {"norm_topk_prob": True}])
def test_routers_that_deepseek_v2_lacks_leave_the_loop(wrong, tmp_path: Path) -> None:
    settings = settings_of(made("deepseek_v2", tmp_path))
    plain = describe({**settings, "topk_method": "greedy", "n_group": None, "topk_group": None})
    assert plain.layers[1].mlp.groups == 1  # type: ignore[union-attr]
    with pytest.raises(Unknown):
        describe({**settings, **wrong})


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_model_with_an_indexer_is_refused_by_name(family: str, tmp_path: Path) -> None:
    settings = settings_of(made("deepseek_v3", tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": family}))
    with pytest.raises(ModelError, match=f"'{family}' cannot run over KV pages"):
        load_model(tmp_path, device="cpu")


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    settings = settings_of(made("deepseek_v3", tmp_path))
    (mixer, *_) = (layer.mixer for layer in describe({**settings, "model_type": "kimi_k2"}).layers)
    assert isinstance(mixer, Latent)
    assert (mixer.nope, mixer.value, mixer.q_rank, mixer.kind.head_dim) == (16, 24, 32, 32)


SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
"""Of FlashInfer's kernel."""


@pytest.mark.parametrize(
    "family", ["deepseek_v2", "glm4_moe_lite", "youtu", "kimi_linear", "bailing_hybrid"]
)
def test_flashinfer_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    folder, sequences = made(family, tmp_path, **SIZES), random_sequences()
    plain = plain_logits(folder, sequences)
    with simulated_gpu() as gpu:
        model = load_model(folder, device="cuda", dtype="bfloat16")
        assert isinstance(model, Decoder) and "with FlashInfer" in model.layers_by
        assert "over latents" in model.attention.name
        gpu.kernels.calls.clear()
        for page_size, steps in ((16, STEPS[0]), (1, STEPS[1])):
            got = [rows.cpu() for rows in run_steps(model, sequences, steps, page_size)]
            assert typical_error(got, plain) < 0.08
        assert gpu.kernels.calls["mla"]


@pytest.mark.parametrize(("family", "looped"), [
    ("deepseek_v3", True), ("deepseek_v3", False), ("kimi_linear", True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_decodes_take_graphs_or_torch_where_flashinfer_has_no_kernel(
    family: str, looped: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, recurs = dict[str, Any](SIZES), family == "kimi_linear"
    if recurs:  # states would remember experts that change places
        options["mlp_layer_types"] = ["dense"] * 3 + ["sparse"]
    else:
        options["rope_interleave"] = looped
    if not looped:
        options["first_k_dense_replace"] = 2  # torch counts an expert's tokens otherwise on a GPU
    folder = tiny_model(family, tmp_path, tokenizer=False, **options)
    rng, params = random.Random(3), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    stem = [rng.randrange(250) for _ in range(30)]
    prompts = [[*stem[: rng.randint(5, 30)], rng.randrange(250)] for _ in range(6)]
    with simulated_gpu() as gpu:
        monkeypatch.setattr(
            engines, "paged_model", lambda path, *_: load_model(path, device="cuda", dtype=dtype)
        )
        states = 40 if recurs else 0
        engine = make_engine(folder, page_size=4, max_num_batched_tokens=20, num_states=states)
        assert isinstance(engine.model, Decoder) is looped
        assert engine.model.shapes == [LayerShape(1, 512, 64)] * 2
        gpu.kernels.calls.clear()
        answers = [tokens for (tokens,) in generated(run(engine, prompts, params))]
        if dtype == "bfloat16":
            assert engine.model.attention.name.startswith("FlashInfer")
            assert engine.runner.graphs is not None and gpu.kernels.calls["mla"]
            assert engine.runner.graphs._replays and all(engine.runner.graphs._replays.values())
        else:
            assert engine.model.attention.name.startswith("torch") and engine.runner.graphs is None
    tie = 1e-4 if dtype == "float32" else 3e-2
    assert all(is_greedy(folder, *pair, tie) for pair in zip(prompts, answers, strict=True))
