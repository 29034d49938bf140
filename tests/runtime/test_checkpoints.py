"""Checkpoints from anybody: their code never runs, and what is wrong with them is said."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from radixcache import LLM, Chat, InvalidRequest, ModelError, SamplingParams
from radixcache.kernels.attention import PagedBatch
from radixcache.runtime.checkpoints.model_files import check_model
from radixcache.runtime.model.load import load_model
from tests.helpers.gguf.files import write_model
from tests.helpers.models import tiny_model

SEED = 20_261_204


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"), SEED)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return copytree(original, tmp_path / "model")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that planted code writes; standard input says yes to everything."""
    trace, ask = tmp_path / "was-here", Mock(return_value="y")
    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield trace
    assert not trace.exists(), "code of a checkpoint has run"
    ask.assert_not_called()


def change(file: Path, **more: Any) -> None:
    """Set these fields of a JSON file, or begin one."""
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | more))


PLANTED = "planted.Planted"
TOKENIZER, CONFIG = "tokenizer_config.json", "config.json"
CODE_OF_ALL = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), PLANTED)


@pytest.mark.parametrize(
    ("file", "fields", "refusal"),
    [
        (TOKENIZER, {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [PLANTED, None]}},
         r"the tokenizer .*: .* custom code"),
        (TOKENIZER, {"auto_map": {"AutoTokenizer": [PLANTED, PLANTED]}}, None),  # it needs none
        (CONFIG, {"model_type": "llama", "auto_map": CODE_OF_ALL}, None),  # transformers' own
        (CONFIG, {"model_type": "nonesuch", "auto_map": CODE_OF_ALL}, r"not load: .* custom code"),
        ("generation_config.json", {"auto_map": {"GenerationConfig": PLANTED}}, None),
    ],
)  # fmt: skip
def test_code_of_a_checkpoint_never_runs(folder, trace, file, fields, refusal):
    (folder / "custom_generate").mkdir()
    for name in ("planted", "custom_generate/generate"):
        code = f"open({str(trace)!r}, 'w').close()\nclass Planted: pass\n"
        (folder / f"{name}.py").write_text(code)
    change(folder / file, **fields)
    if refusal is not None:
        with pytest.raises(ModelError, match=refusal) as refused:
            LLM(folder, kv_cache_memory_bytes="1MiB")
        assert "\n" not in str(refused.value)
        return
    with LLM(folder, kv_cache_memory_bytes="1MiB") as llm:
        llm.generate("a", SamplingParams(temperature=0, max_tokens=2))
        assert llm.encode("hi") == [71, 72]


def test_pickled_weights_run_nothing(folder, trace):
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trace),)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Planted()}, 2))
    with pytest.raises(ModelError, match="does not load"):
        load_model(folder, device="cpu")


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(("file", "content", "reason"), [
    ("config.json", {"num_hidden_layers": 0}, "no layer"),
    ("config.json", {"head_dim": 32}, "where its config says"),
    ("config.json", {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    ("config.json", {"rms_norm_eps": float("nan")}, "not numbers"),
    ("config.json", {"rope_parameters": {"rope_type": ["x"], "rope_theta": 1}}, "does not load"),
    ("config.json", {"head_dim": 10**9}, "head_dim 1000000000: no model has over 65536"),
    ("config.json", {"a": {"b": {"head_dim": 10**9}}}, "head_dim 1000000000: no model has over"),
    ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000: no model has"),
    *(("config.json", text, "no dictionary|does not load") for text in ("[]", "3", "null")),
    *(("generation_config.json", text, "does not make sense") for text in ("[]", "3", "null")),
    *((INDEX, content, "is no index of weights: .") for content in (
        "", "[]", '"x"', "{}", "null", {"weight_map": ["a"]}, {"weight_map": 3}, "[" * 99999)),
    *((INDEX, {"weight_map": {"a": name}}, "is no index of weights: .* is no file of weights")
      for name in (None, 3, "", "/model.safetensors", "../model.safetensors", "config.json")),
    (INDEX, {"weight_map": {"a": "b.safetensors"}}, r"lacks b.safetensors, which its index names"),
    ("tokenizer.json", "{", "tokenizer of .* does not load: EOF while parsing an object"),
    ("tokenizer.json", "", "tokenizer of .* does not load: EOF while parsing a value"),
    ("tokenizer.json", None, "a tokenizer_config.json, and no vocabulary beside it"),
    ("tokenizer_config.json", "[", "tokenizer of .* does not load: .*Expecting value"),
    ("generation_config.json", {"max_new_tokens": 0}, "does not make sense"),
    ("generation_config.json", {"eos_token_id": 1.5}, "end a text"),
    ("generation_config.json", {"eos_token_id": "abc"}, "end a text"),
    ("generation_config.json", {"do_sample": True, "temperature": "hot"}, "makes no sense"),
    ("generation_config.json", {"do_sample": True, "top_k": float("nan")}, "makes no sense"),
])  # fmt: skip
def test_a_file_of_nonsense_is_an_error_of_one_sentence(folder, file, content, reason):
    """`content` is the file's, or fields of it; None takes it away."""
    if file == INDEX:
        (folder / "model.safetensors").unlink()
    if content is None:
        (folder / file).unlink()
    elif isinstance(content, dict):
        change(folder / file, **content)
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=reason) as error:
        LLM(folder, kv_cache_memory_bytes="1MiB")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "package"), [("awq", "gptqmodel"), ("gptq", "optimum"), ("torchao", "torchao")]
)
def test_a_quantised_checkpoint_names_the_package_that_is_missing(folder, method, package):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    # None of its tensors is quantised, so the loop would take them as they are.
    change(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    change(folder / "config.json", unknown=1)
    with pytest.raises(ModelError, match=f"does not load: .*{package}") as error:
        load_model(folder, device="cpu")
    assert "\n" not in str(error.value)
    with pytest.raises((ModelError, InvalidRequest), match="exact mode"):
        load_model(folder, device="cpu", exact=True)


def quantise(folder: Path, kind: str, block: int = 1, config: Any = None) -> None:
    """Put codes, or what they mean if `kind` is "meaning", in place of the linear layers."""
    torch.manual_seed(1)
    kept: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        codes, at = weight.to(torch.float8_e4m3fn), [torch.arange(n) // block for n in weight.shape]
        scales, is_coded = torch.rand([int(i[-1]) + 1 for i in at]) + 1, "_proj" in name
        kept[f"{name}_packed" if kind == "packed" and is_coded else name] = weight
        if is_coded and kind == "blocks":
            kept |= {name: codes, f"{name}_scale_inv": scales}
        elif is_coded and kind != "packed":
            meaning = codes.float() * scales[at[0]][:, at[1]]
            kept[name] = meaning if kind == "meaning" else weight.to(getattr(torch, kind))
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    change(folder / "config.json", quantization_config=config)


@pytest.mark.parametrize(("kind", "config", "reason"), [
    ("float8_e4m3fn", {"quant_method": "modelopt", "quant_algo": "FP8"}, r"by modelopt \(FP8\)$"),
    ("float8_e4m3fn", None, "not name .model.layers.0.mlp.down_proj.weight is in F8_E4M3"),
    ("float8_e4m3fn", None, "by ModelOpt's FP8"),
    ("int8", {"quant_method": ["w8a8_int8"]}, r"by \['w8a8_int8'\]$"),
    ("int8", {"quant_method": "bitsandbytes"}, "by bitsandbytes$"),
    ("int8", {"bits": 8}, "by a method without a name"),
    ("int8", {"bits": 8, "group_size": 64}, "by MLX$"),
    ("int8", "int8", "its quantization_config is no object, but 'int8'$"),
    ("int64", None, "not name .model.layers.0.mlp.down_proj.weight is in I64"),
    ("float8_e4m3fn", {"quant_method": "mxfp4"}, "by mxfp4 .* is in F8_E4M3"),
    ("packed", {"quant_method": "fp8", "weight_block_size": 5}, "packed by fp8"),
])  # fmt: skip
def test_codes_that_are_not_read_right_are_refused_by_their_name(folder, kind, config, reason):
    if "ModelOpt" in reason:
        change(folder / "hf_quant_config.json", quantization={"quant_algo": "FP8"})
        load_model(folder, device="cpu")  # its KV alone may be quantised
    quantise(folder, kind, config=config)
    change(folder / "config.json", unknown=1)  # which transformers' own layers ignore
    with pytest.raises(ModelError, match=reason):
        load_model(folder, device="cpu")


def test_codes_in_torch_s_own_files_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "hf_quant_config.json").write_bytes(b'\xff "quant_algo": "W8"')
    change(folder / "config.json", quantization_config={})  # asks for nothing
    torch.save(weights, folder / "pytorch_model.bin")
    load_model(folder, device="cpu")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    for index in (False, True):
        torch.save(weights, folder / ("1.bin" if index else "pytorch_model.bin"))
        if index:
            (folder / "pytorch_model.bin").unlink()
            change(folder / "pytorch_model.bin.index.json", weight_map={"lm_head.weight": "1.bin"})
        with pytest.raises(ModelError, match=r"by ModelOpt's W8 .lm_head.weight is in int8"):
            load_model(folder, device="cpu")


def test_blocks_of_fp8_in_transformers_are_right_or_refused_where_the_last_is_cut(folder, tmp_path):
    got, tokens = [], np.arange(9)
    for kind, block in (("blocks", 32), ("meaning", 32), ("blocks", 64), ("blocks", 28)):
        place = copytree(folder, tmp_path / f"{kind}{block}")
        method = {"quant_method": "fp8", "weight_block_size": [block, block]}
        quantise(place, kind, block, method if kind == "blocks" else None)
        change(place / "config.json", unknown=1)
        cut = pytest.raises(ModelError, match="FP8 in blocks that cut model")
        with cut if block != 32 else nullcontext():
            model = load_model(place, device="cpu", dtype="float32")
            batch = PagedBatch.of([np.zeros(1, np.int32)], [9], [9], 9)
            got.append(model.forward(tokens, batch, tokens, model.allocate(1, 9, 1), []))
    assert (got[0] - got[1]).std() / got[1].std() < 1e-5


def test_a_tensor_that_no_layer_takes_is_refused_unless_it_changes_no_answer(folder):
    change(folder / "config.json", unknown=1, quantization_config={"quant_method": "fp8"})
    weights = load_file(folder / "model.safetensors")
    change(folder / "config.json", quantization_config=None)
    load_model(folder, device="cpu")
    change(folder / "config.json", quantization_config={"quant_method": "fp8"})
    for name, reason in (("mtp.fc.weight", None), ("model.layers.2.eh_proj.weight", None),
        ("score.weight", "no layer takes"), ("model.norm.weight", "; .* by fp8$")):  # fmt: skip
        found = weights | {name: torch.ones(3)}
        save_file(found, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=reason) if reason else nullcontext():
            assert load_model(folder, device="cpu").layers_by == "transformers"


def test_a_gguf_file_of_another_architecture_is_refused(folder):
    write_model(folder / "model.gguf", {"general.architecture": "falcon"})
    with pytest.raises(ModelError, match=r"model.gguf has the architecture falcon, which is not"):
        LLM(folder / "model.gguf")
    with pytest.raises(ModelError, match=r"no model at .*: the folder has no other.gguf"):
        LLM(folder / "other.gguf")


def test_an_unknown_name_is_refused_after_one_question_and_a_gated_one_is_not(monkeypatch):
    """transformers would ask an unreachable hub six times, with half a minute between."""
    ask = Mock(side_effect=GatedRepoError.__new__(GatedRepoError))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    check_model("org/gated")
    for error, reason in (
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "in reach$"),
        (OSError("Name or service not known"), r"in reach \(Name or service"),
    ):
        ask.reset_mock()
        ask.side_effect = error
        with pytest.raises(ModelError, match=f"no model of that name {reason}") as refused:
            LLM("no-org/no-model")
        ask.assert_called_once()
        assert "no-org/no-model" in ask.call_args.args[0] and "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["flash_attention_2", "somebody/some-kernel"])
@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_checkpoint_asks_for_is_ignored(folder, field, value, monkeypatch):
    look = Mock()
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", look)
    change(folder / "config.json", **{field: value})
    load_model(folder, device="cpu")
    look.assert_not_called()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_checkpoint_without_a_tokenizer_completes_token_ids_only(family, tmp_path):
    """For some families transformers makes up an empty tokenizer, which reads every text as []."""
    llm = LLM(tiny_model(family, tmp_path, SEED, tokenizer=False), kv_cache_memory_bytes="1MiB")
    assert llm.tokenizer is None
    chat = [{"role": "user", "content": "hello"}]
    for call in (lambda: llm.generate("hello"), lambda: llm.chat(chat), lambda: Chat(llm).ask("x")):
        with pytest.raises(InvalidRequest, match="has no tokenizer"):
            call()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)
    assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].text == ""
