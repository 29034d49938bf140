"""A GGUF file of each architecture, written as llama.cpp's converter does, is its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.configuration_utils import PreTrainedConfig

from radixcache import LLM, ModelError, SamplingParams
from radixcache.kernels import choose
from radixcache.kernels.native.attention import NativeAttention
from radixcache.kernels.quantized import Quantized, Stored
from radixcache.kernels.spec import Architecture, Unknown
from radixcache.kernels.torch.attention import TorchAttention
from radixcache.kernels.torch.recurrence import recur
from radixcache.runtime.checkpoints.gguf_file import GGUFFile, GGUFTensor
from radixcache.runtime.model.checkpoint import open_checkpoint
from radixcache.runtime.model.decoder import Decoder
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.gguf.architectures import ROWS
from radixcache.runtime.model.gguf.blocks import read_tensor
from radixcache.runtime.model.gguf.config import describe_gguf, settings_of
from radixcache.runtime.model.layer_loop import LayerLoop
from radixcache.runtime.model.load import load_model
from radixcache.runtime.model.weights.sources import GGUFSource, SafetensorsSource
from tests.helpers.gguf.converter import FAMILIES, convert
from tests.helpers.models import tiny_model
from tests.helpers.native import needs_kernels
from tests.helpers.sources import ROOT
from tests.runtime.model.steps import (
    STEPS,
    plain_logits,
    random_sequences,
    relative_error,
    run_steps,
)

CPU = torch.device("cpu")
Q8 = 5  # signed numbers of 8 bits in blocks of 32, as panels.h counts formats
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu")
_SAME = {
    "glm4v_moe_text": "glm4_moe", "solar_open": "glm4_moe", "qwen2_5_vl_text": "qwen2_vl_text",
    "glm4_moe_lite": "deepseek_v3",
}  # fmt: skip
"""Families whose files have another's name, and are described as that one."""


def made(family: str, folder: Path, **changes: Any) -> tuple[Architecture, GGUFFile]:
    """A model's description from its config.json, and the same model as a GGUF file."""
    tiny_model(family.split()[0], folder, tokenizer=False, **FAMILIES[family][1])
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    described = describe(settings)
    described = replace(described, family=_SAME.get(described.family, described.family))
    return described, GGUFFile(convert(folder, folder / "model.gguf", **changes))


def differences(one: Any, other: Any, at: str = "") -> Iterator[str]:
    if is_dataclass(one) and type(one) is type(other):
        for name in (field.name for field in fields(one)):
            yield from differences(getattr(one, name), getattr(other, name), f"{at}.{name}")
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for number, part in enumerate(one):
            yield from differences(part, other[number], f"{at}.{number}")
    elif not (torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other):
        yield f"{at}: {one} and {other}"


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    one, other = (x.dense() if isinstance(x, Quantized) else x for x in (one, other))
    return one.dtype == other.dtype and torch.equal(one, other)


def test_each_architecture_is_tried_and_on_the_page() -> None:
    assert {name for name, _ in FAMILIES.values()} == ROWS.keys()
    page = (ROOT / "docs/models.md").read_text()
    cells = re.findall(r"\| ([^|]*) \|$", page, re.MULTILINE)
    told = {name for cell in cells for name in re.split("[,;] ", cell)}
    assert told - {"none", "GGUF", "by the text's architecture"} == ROWS.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_described_as_its_checkpoint_and_has_its_weights(family, tmp_path) -> None:
    described, file = made(family, tmp_path)
    ropes = tuple(replace(rope, axes=None) for rope in described.ropes)  # of images, of no files
    described = replace(described, ropes=ropes)
    assert not [*differences(described, describe_gguf(file, settings_of(file)))]
    read = GGUFSource(file, described, CPU, torch.float32)
    with open_checkpoint(tmp_path, CPU, torch.float32) as checkpoint:
        wanted = SafetensorsSource(checkpoint, described)
        assert equal(read.embedding(), wanted.embedding())
        assert described.tied or equal(read.head(), wanted.head())
        assert equal(read.last_norm(), wanted.last_norm())
        for number in range(len(described.layers)):
            found, weights = read.layer(number), wanted.layer(number)
            assert found.keys() == weights.keys()
            assert not [name for name in found if not equal(found[name], weights[name])], number


@pytest.mark.parametrize(
    "attention", [TorchAttention, pytest.param(NativeAttention, marks=needs_kernels)]
)
def test_gemma_4_gives_the_logits_of_its_checkpoint(attention, tmp_path) -> None:
    """And keeps the table of its layers' inputs in the file's bits."""
    (tmp_path / "files").mkdir()
    folder = tiny_model("gemma4_text", tmp_path, tokenizer=False, **FAMILIES["gemma4_text"][1])
    paths = [convert(folder, tmp_path / "files" / f"{kind}.gguf", kind) for kind in ("F32", "Q8_0")]
    sequences = random_sequences()

    def logits(path: Path) -> torch.Tensor:
        model = load_model(path, device="cpu", dtype="float32", attention=attention())
        assert isinstance(model, Decoder)
        layers: Any = model._layers
        if isinstance(layers, LayerLoop):
            is_small = isinstance(layers._input_table, Stored)
        else:
            is_small = layers._per_layer.table.format == Q8
        assert is_small == (path.stem == "Q8_0")
        return torch.cat(run_steps(model, sequences, STEPS[0], 4))

    whole, *files = map(logits, [folder, *paths])
    assert torch.equal(files[0], whole)
    assert 1e-4 < relative_error([files[1]], [whole]) < 0.5
    file = GGUFFile(paths[1])
    described = describe_gguf(file, settings_of(file))
    file.tensors["blk.4.attn_k.weight"] = file.tensors["blk.2.attn_k.weight"]
    assert isinstance(GGUFSource(file, described, CPU, torch.float32).per_layer()["table"], Stored)
    file.tensors["blk.4.attn_z.weight"] = file.tensors["blk.2.attn_k.weight"]
    with pytest.raises(Unknown, match=r"it has blk.4.attn_z.weight"):
        GGUFSource(file, described, CPU, torch.float32)


@pytest.mark.parametrize(("wrong", "reason"), [
    ({"rope.dimension_count": 16}, "turns other parts of a head"),
    ({"rope.dimension_count_swa": 8}, "turns other parts of a head"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
      "rope.scaling.original_context_length": 64}, "is yarn, for a part of a head"),
    ({"attention.value_length_swa": 8}, "values are of another size"),
])  # fmt: skip
def test_rope_of_gemma_4_that_turns_otherwise_is_refused(wrong, reason, tmp_path) -> None:
    _, file = made("gemma4_text", tmp_path, **{f"gemma4.{key}": wrong[key] for key in wrong})
    with pytest.raises(Unknown, match=reason):
        settings_of(file)


def test_what_a_newer_file_says_comes_before_what_llama_cpp_knows(tmp_path) -> None:
    described, file = made("gemma3_text", tmp_path, **{"gemma3.rope.freq_base_swa": None})
    assert not [*differences(described, describe_gguf(file, settings_of(file)))]
    keys = {"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5e3}
    _, file = made("gemma3_text", tmp_path, **{f"gemma3.{key}": keys[key] for key in keys})
    described = describe_gguf(file, settings_of(file))
    kinds = [kind.window for kind in described.kinds]
    assert kinds == [11, 11, None, 11, 11, None, 11]
    near = next(rope for rope in described.ropes if rope.frequencies[1] > 0.3)
    assert float(near.frequencies[1]) == pytest.approx(5e3 ** (-1 / 8))
    slides = [True, False, True, True, True, True, False]
    _, file = made("gemma3_text", tmp_path, **{"gemma3.attention.sliding_window_pattern": slides})
    assert [
        kind.window is not None for kind in describe_gguf(file, settings_of(file)).kinds
    ] == slides


def test_layers_that_predict_further_tokens_are_left_out(tmp_path) -> None:
    keys = {"qwen35.nextn_predict_layers": 1}
    described, file = made("qwen3_5_text", tmp_path, **keys)
    shorter = describe_gguf(file, settings_of(file))
    assert shorter.layers == described.layers[:-1]
    GGUFSource(file, shorter, CPU, torch.float32)
    file.tensors["blk.0.another.weight"] = file.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(Unknown, match=r"it has blk.0.another.weight"):
        GGUFSource(file, shorter, CPU, torch.float32)
    del file.tensors["blk.0.another.weight"], file.tensors["blk.1.attn_norm.weight"]
    with pytest.raises(Unknown, match=r"it lacks blk.1.attn_norm.weight"):
        GGUFSource(file, shorter, CPU, torch.float32)


@pytest.mark.parametrize(
    "family",
    [
        "llama", "gemma3_text", "gemma4_text", "qwen3_5_moe_text", "nemotron_h", "lfm2_moe",
        "deepseek_v3", "mistral4", "kimi_linear",
    ],
)  # fmt: skip
def test_nonsense_in_the_metadata_is_one_sentence(family, tmp_path) -> None:
    _, file = made(family, tmp_path)
    whole, outcomes = dict(file.metadata), set()
    for key, value in whole.items():
        for other in (0, -1, 1, 3, 1 << 31, 1e30, "x", True, [1], None):
            file.metadata = {**whole, key: other}
            if other is None:
                del file.metadata[key]
            if key == "general.architecture" or other == value:
                continue
            try:
                GGUFSource(file, describe_gguf(file, settings_of(file)), CPU, torch.float32).layer(
                    0
                )
                outcomes.add("read")
            except (Unknown, ModelError) as error:
                outcomes.add(str(error))
    assert len(outcomes) > 20
    assert not [said for said in outcomes if "\n" in said]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_takes_the_place_of_one_that_is_not_there(family, tmp_path) -> None:
    """But the embedding that of the head; Gemma 4's values are its keys where it has no window."""
    _, file = made(family, tmp_path)
    for name in [name for name in file.tensors if name != "output.weight"]:
        tensor = file.tensors.pop(name)
        with pytest.raises((Unknown, ModelError)):
            GGUFSource(file, describe_gguf(file, settings_of(file)), CPU, torch.float32)
        file.tensors[name] = tensor


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss"])
def test_tensors_that_other_files_have_joined(family, tmp_path) -> None:
    """gate_up of experts, and the parts of a delta net by key heads."""
    described, file = made(family, tmp_path)
    wanted = GGUFSource(file, described, CPU, torch.float32).layer(0)
    for end in (".weight", ".bias"):
        if f"blk.0.ffn_up_exps{end}" in file.tensors:
            parts = [file.tensors.pop(f"blk.0.ffn_{n}_exps{end}") for n in ("gate", "up")]
            file.tensors[f"blk.0.ffn_gate_up_exps{end}"] = joined(parts, 1)
    if "ba" in wanted:
        name, order = "blk.0.ssm_in.weight", torch.arange(192).split([32, 32, 64, 64])
        by_head = torch.cat([part.view(2, -1) for part in order], 1).flatten()
        both = [file.tensors.pop(f"blk.0.attn_{part}.weight") for part in ("qkv", "gate")]
        file.tensors[name] = joined(both, 0, by_head)
    found = GGUFSource(file, described, CPU, torch.float32).layer(0)
    assert not [name for name in wanted if not equal(found[name], wanted[name])]


@pytest.mark.parametrize("family", LATENT)
def test_older_files_of_mla_have_keys_and_values_in_one_tensor(family, tmp_path) -> None:
    described, file = made(family, tmp_path, older=True)
    assert "blk.0.attn_kv_b.weight" in file.tensors
    assert not [*differences(described, describe_gguf(file, settings_of(file)))]
    _, newer = made(family, tmp_path / "newer")
    found, wanted = (GGUFSource(x, described, CPU, torch.float32).layer(1) for x in (file, newer))
    assert not [name for name in wanted if not equal(found[name], wanted[name])]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "older"), [*product(LATENT, (False, True)), ("kimi_linear", False)]
)
def test_quantised_files_of_mla_give_the_logits_of_their_weights(
    family, older, tmp_path, monkeypatch
) -> None:
    """In the older form k_b is a part whose blocks would be cut."""
    monkeypatch.setattr(choose, "find_recurrence", lambda *_: recur)
    sizes = {"qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32}
    sizes |= {"head_dim": 64} if family == "mistral4" else {}
    options: dict[str, Any] = {**FAMILIES[family][1], **sizes}
    folder = tiny_model(family, tmp_path / "made", tokenizer=False, **options)
    path = convert(folder, tmp_path / "model.gguf", "Q8_0", older=older)
    settings: dict[str, Any] = {"device": "cpu", "quantized_activations": "off"}
    model = load_model(path, **settings, exact=True)
    by_torch = load_model(path, **settings, attention=TorchAttention())
    assert ("dense k_b" in model.placement) is older
    assert "dense k_b and v_b" in by_torch.placement
    sequences = random_sequences()
    got, wanted = (run_steps(each, sequences, STEPS[0], 16) for each in (model, by_torch))
    assert relative_error(got, wanted) < 1e-5
    plain = torch.cat(plain_logits(folder, sequences))
    wrong = (torch.cat(got) - plain).std(1) / plain.std()  # some tokens have other experts
    assert wrong.median() < 0.05


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("deepseek_v3", {"expert_gating_func": 3}, "scored in another way"),
        ("mistral4", {"expert_gating_func": 2}, "scored in another way"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale"),
        ("mistral4", {"attention.temperature_length": 9}, "scaled by another length"),
        ("deepseek_v3", {"attention.indexer.top_k": 9}, "attention.indexer.top_k"),
        ("deepseek_v2", {"attention.key_length_mla": 8}, "turns 8 of 8"),
        ("deepseek_v2", {"attention.head_count_kv": 2}, "num_key_value_heads is 2"),
        ("youtu", {"attention.kv_lora_rank": None}, "no deepseek2.attention.kv_lora_rank"),
    ],
)
def test_metadata_of_mla_that_is_not_understood_is_refused(family, change, said, tmp_path) -> None:
    keys = {f"{FAMILIES[family][0]}.{key}": value for key, value in change.items()}
    _, file = made(family, tmp_path, **keys)
    with pytest.raises((Unknown, ModelError), match=said):
        describe_gguf(file, settings_of(file))


def test_what_older_files_of_mla_do_not_say(tmp_path) -> None:
    """Groups of DeepSeek V2 and V3, and how GLM-4.7-Flash scores its experts."""
    _, file = made("deepseek_v3", tmp_path, **{"deepseek2.expert_group_count": None})
    file.metadata |= {"deepseek2.expert_count": 256}
    found = settings_of(file)
    assert (found["n_group"], found["topk_group"]) == (8, 4)
    file.metadata |= {"deepseek2.expert_count": 160, "deepseek2.expert_weights_norm": False}
    del file.metadata["deepseek2.expert_gating_func"]
    found = settings_of(file)
    assert (found["model_type"], found["topk_method"]) == ("deepseek_v2", "group_limited_greedy")
    assert (found["n_group"], found["topk_group"]) == (8, 3)
    tensor = file.tensors["token_embd.weight"]
    file.tensors["token_embd.weight"] = tensor._replace(shape=(154_880, 64))
    assert settings_of(file)["model_type"] == "deepseek_v2"
    file.metadata["deepseek2.block_count"] = 47
    file.tensors |= {f"another.{n}": tensor for n in range(47)}
    assert settings_of(file)["model_type"] == "deepseek_v3"


def joined(parts: list[GGUFTensor], dim: int, order: torch.Tensor | None = None) -> GGUFTensor:
    dense: Any = torch.cat([torch.as_tensor(read_tensor("", part)) for part in parts], dim)
    dense = (dense if order is None else dense[order]).contiguous()
    data = memoryview(bytearray(dense.numpy().tobytes()))
    return parts[0]._replace(shape=tuple(dense.shape), data=data)


# What llama.cpp computes in its own way, or for models of another size only.
_DIFFER = {
    "phi3": "it has no windows", "exaone4": "windows from 64 layers on", "gpt_oss": "truncates",
    "qwen3_5_text": "sections", "qwen3_5_moe_text": "sections of a larger head",
}  # fmt: skip


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in _DIFFER])
def test_llama_cpp_gives_the_same_tokens(family, tmp_path) -> None:
    """Where llama-cpp-python is installed."""
    api = pytest.importorskip("llama_cpp")
    keys = {"tokenizer.ggml.model": "none", f"{FAMILIES[family][0]}.vocab_size": 260}
    made(family, tmp_path, **keys)
    prompt = [7, 100, 23, 5, 61, 42, 18, 250, 3, 77, 31, 90, 14]
    with LLM(tmp_path / "model.gguf", device="cpu", kv_cache_memory_bytes="4MB") as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        ours = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert ours == greedy_by_llama_cpp(api, tmp_path / "model.gguf", prompt, 16)


def greedy_by_llama_cpp(api: Any, path: Path, prompt: list[int], count: int) -> list[int]:
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    assert model, "llama.cpp does not load it"
    params = api.llama_context_default_params()
    params.n_ctx, params.type_k, params.type_v = 64, api.GGML_TYPE_F32, api.GGML_TYPE_F32
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = api.llama_init_from_model(model, params)
    size, batch = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)), prompt
    found: list[int] = []
    while len(found) < count:
        tokens = (api.llama_token * len(batch))(*batch)
        assert api.llama_decode(context, api.llama_batch_get_one(tokens, len(batch))) == 0
        found.append(max(range(size), key=api.llama_get_logits_ith(context, -1).__getitem__))
        batch = found[-1:]
    api.llama_free(context)
    api.llama_model_free(model)
    return found
