"""`kv_cache_dtype`: what it takes, which models it refuses, and what it changes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixcache import LLM, InvalidRequest, SamplingParams
from radixcache.errors import ModelError
from radixcache.kernels.attention import PagedBatch
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.runtime.model import kv_dtype
from radixcache.runtime.model.kv_dtype import _scales
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.paged_model import PagedModel
from tests.helpers import engines
from tests.helpers.models import tiny_model
from tests.helpers.native import needs_kernels
from tests.runtime.model.exact_schedules import WIDE, folder

load = partial(load_model, device="cpu")
TOKENS = np.random.default_rng(1).integers(0, 250, 60)


def logits_of(model: PagedModel) -> torch.Tensor:
    """Of 60 tokens in chunks."""
    pool, done, found = model.allocate(20, 4, 1), 0, []
    for count in (40, 1, 19):
        done += count
        batch = PagedBatch.of([np.arange(15, dtype=np.int32)], [count], [done], 4)
        chunk = TOKENS[done - count : done]
        found.append(model.forward(chunk, batch, np.arange(count), pool))
    return torch.cat(found)


@pytest.mark.parametrize("attention", [None, TorchAttention()], ids=["chosen", "torch"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "gemma3_text"])
def test_fewer_bits_take_less_memory_and_change_little(family, attention) -> None:
    """With windows, caps and sinks."""
    path = folder(family, True)
    plain = load(path, attention=attention)
    expected, spread = logits_of(plain), float(logits_of(plain).std())
    limits = {"int8": 0.1, "bfloat16": 0.03, "float16": 0.005}
    for name, limit in limits.items():
        size = 34 / 128 if name == "int8" else 0.5
        model = load(path, attention=attention, kv_cache_dtype=name)
        assert model.bytes_per_token == plain.bytes_per_token * size
        assert f"KV in {name}" in model.placement and "KV in" not in plain.placement
        off = float((logits_of(model) - expected).std()) / spread
        assert 0 < off < limit, name


@needs_kernels
def test_both_backends_of_a_cpu_write_the_same_bytes(tmp_path: Path) -> None:
    path = tiny_model("qwen3", tmp_path, tokenizer=False, **WIDE)
    first = []
    for attention in (None, TorchAttention()):
        model = load(path, attention=attention, kv_cache_dtype="int8")
        pool, table = model.allocate(1, 64), np.zeros(1, np.int32)
        batch = PagedBatch.of([table], [60], [60], 64)
        model.forward(TOKENS, batch, np.arange(0), pool)
        first.append(pool.layers[0])  # later layers have other inputs
    for one, other in zip(*first, strict=True):
        assert (one != other).float().mean() < 0.01, "but for what lies between two numbers"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_cache_dtype": "int4"}, "unknown kv_cache_dtype 'int4': say auto, float16"),
        ({"kv_cache_dtype": "fp8"}, "needs FlashInfer on an NVIDIA GPU, not cpu: say int8"),
        ({"kv_cache_dtype": "fp8", "exact": True}, "every kv_cache_dtype but fp8"),
        ({"kv_cache_dtype": "float16", "dtype": "bfloat16"}, "is for a model in float32"),
        ({"kv_cache_dtype": "int8"}, r"for heads of multiples of 32, not of \[16\]: say auto"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, match, tmp_path: Path) -> None:
    path = tiny_model("qwen3", tmp_path, tokenizer=False)
    with pytest.raises(InvalidRequest, match=match):
        load(path, **options)


def test_latents_of_mla_are_refused(tmp_path: Path) -> None:
    from tests.runtime.model.steps import LATENT

    path = tiny_model("deepseek_v3", tmp_path, tokenizer=False, **LATENT)
    with pytest.raises(InvalidRequest, match="not for the latents of MLA"):
        load(path, kv_cache_dtype="bfloat16")


def huge_biases(path: Path, **sizes: int) -> Path:
    """As in Qwen2.5: the keys of some pairs lie far from 0, so that blocks have wide steps."""
    tiny_model("qwen2", path, tokenizer=False, **(WIDE | sizes))
    weights = load_file(path / "model.safetensors")
    for name, bias in weights.items():
        if name.endswith("k_proj.bias"):
            bias[5::16] = 900.0
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_model_that_does_not_bear_it_is_refused(tmp_path: Path) -> None:
    path = huge_biases(tmp_path)
    with pytest.raises(ModelError, match=r"does not bear kv_cache_dtype='int8': .* nats \(0.05"):
        load(path, kv_cache_dtype="int8")
    assert load(path, kv_cache_dtype="float16").kv_dtype == torch.float16
    with pytest.raises(ModelError, match="does not bear"), LLM(path, kv_cache_dtype="int8"):
        pass


def test_scales_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    """Its layers stay those of the loop, which needs none of them."""
    path = tiny_model("qwen3", tmp_path, tokenizer=False)
    weights = load_file(path / "model.safetensors")

    def scales(**found: torch.Tensor) -> list[tuple[float, float]]:
        start = "model.layers."
        more = {start + name.replace("_", ".", 1): scale.clone() for name, scale in found.items()}
        save_file(weights | more, path / "model.safetensors", {"format": "pt"})
        return _scales(path, 2)

    one, two = torch.tensor(0.5), torch.tensor([2.0])
    assert scales() == [(1.0, 1.0)] * 2
    names = ("0_self_attn.k_scale", "0_self_attn.v_scale", "1_self_attn.k_proj.k_scale")
    assert scales(**dict(zip(names, (one, two, two), strict=True))) == [(0.5, 2.0), (2.0, 1.0)]
    assert "radixcache" in load(path).layers_by
    with pytest.raises(ModelError, match="of 1 layers, and 2 attend"):
        scales(**{names[0]: one})
    for wrong in (torch.zeros(()), torch.tensor(torch.nan), torch.ones(2)):
        with pytest.raises(ModelError, match="is not one number above 0"):
            scales(**{names[0]: wrong})


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    path = tiny_model("qwen3", tmp_path, tokenizer=False, **WIDE)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(torch.nan)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="logits are not numbers"):
        load(path, kv_cache_dtype="int8")


def test_fp8_gives_a_hit_the_tokens_of_a_miss(gpu, path: Path, monkeypatch) -> None:
    """In graphs and copies of pages; with the scales of the checkpoint, which the pool keeps."""
    monkeypatch.setattr(kv_dtype, "_scales", lambda path, layers: [(0.5, 0.25)] * layers)
    monkeypatch.setattr(kv_dtype, "MOST_KL", 0.2)  # a random model is more sensitive
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 256, 30).tolist()
    prompts = [stem + rng.integers(0, 256, int(n)).tolist() for n in rng.integers(1, 20, 7)]
    params, answers = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for cache in ("radix", "none"):
        model = load_model(path, device="cuda", dtype="float32", kv_cache_dtype="fp8")
        monkeypatch.setattr(engines, "paged_model", lambda *_, made=model: made)
        made = engines.make_engine(path, cache, page_size=4)
        gpu.kernels.calls.clear()
        answers.append(
            [engines.generated(engines.run(made, [prompt], params)) for prompt in prompts]
        )
        assert not gpu.kernels.calls["ragged"] and gpu.kernels.calls["paged"]
        assert bool(made.cache.stats.copied_pages) == (cache == "radix")
        pages = made.kv_pool.layers[1]
        assert pages.k.dtype == torch.float8_e4m3fn and model.bytes_per_token == 2 * 2 * 2 * 16
        assert (pages.k_scale, pages.v_scale) == (0.5, 0.25)  # type: ignore[attr-defined]
    assert answers[0] == answers[1]


def test_fp8_without_flashinfer_is_refused_and_so_is_a_model_that_does_not_bear_it(
    gpu, path: Path, tmp_path: Path, monkeypatch
) -> None:
    load_on_gpu = partial(load_model, device="cuda", dtype="float32", kv_cache_dtype="fp8")
    with pytest.raises(ModelError, match="does not bear kv_cache_dtype='fp8'"):
        load_on_gpu(huge_biases(tmp_path, head_dim=16))
    monkeypatch.setitem(sys.modules, "radixcache.kernels.flashinfer.attention", None)
    with pytest.raises(InvalidRequest, match="'fp8' needs FlashInfer: FlashInfer is not installed"):
        load_on_gpu(path)


def test_int8_on_a_gpu_is_not_for_flashinfer(gpu, tmp_path: Path) -> None:
    path = tiny_model("qwen3", tmp_path, tokenizer=False, **WIDE)
    model = load_model(path, device="cuda", dtype="float32", kv_cache_dtype="int8")
    assert "FlashInfer" not in model.attention.name and model.kv_dtype == torch.int8
    expected = logits_of(load(path, kv_cache_dtype="int8"))
    assert (logits_of(model).cpu() - expected).abs().max() < 0.02 * expected.abs().max()
