"""GGUF files as they lie around: split into parts, Ollama's without a suffix, those with towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from radixcache import LLM, ModelError
from radixcache.runtime.checkpoints.gguf_file import GGUFFile
from radixcache.runtime.checkpoints.model_files import check_model, split_gguf
from radixcache.runtime.kv_offload.fingerprint import _files
from radixcache.runtime.model.families.describe import describe
from radixcache.runtime.model.gguf.config import describe_gguf, open_gguf, settings_of
from radixcache.runtime.model.load import load_model
from radixcache.runtime.server.settings import read_settings
from tests.helpers.gguf.converter import FAMILIES, convert
from tests.helpers.gguf.files import Stored, gguf_bytes, metadata_of, write_model
from tests.helpers.models import tiny_model
from tests.runtime.model.steps import run_steps

STEPS = [(9, 0), (1, 6)]
TOWERS = {"v.patch_embd.weight": Stored("F16", (2, 3), bytes(12))}
TOWERS |= {name: Stored("F32", (2,), bytes(8)) for name in ("mm.input_projection.weight", "a.x")}
KEYS = {"{}.vision.block_count": 27, "{}.audio.block_count": 3, "{}.mm.tokens_per_image": 256}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write_model(path := tmp_path / "whole.gguf", kinds=["Q8_0", "Q4_K", "IQ2_S"])
    return path


def split(whole: Path, folder: Path, count: int = 3) -> list[Path]:
    """The parts of a file of the tiny Llama, as llama-gguf-split writes them."""
    folder.mkdir()
    tensors, parts = GGUFFile(whole).tensors, []
    stored = [(n, Stored(t.kind.name, t.shape, bytes(t.data))) for n, t in tensors.items()]
    for number in range(count):
        keys: dict[str, Any] = {"split.no": number, "split.count": count}
        keys["split.tensors.count"] = len(stored)
        keys |= {} if number else metadata_of("llama")
        parts.append(folder / f"m-{number + 1:05}-of-{count:05}.gguf")
        parts[-1].write_bytes(gguf_bytes(keys, stored[number::count]))
    return parts


def logits(path: Path) -> torch.Tensor:
    model = load_model(path, device="cpu", quantized_activations="off")
    rng = np.random.default_rng(3)
    return torch.cat(run_steps(model, [rng.integers(0, 260, n) for n in (10, 6)], STEPS, 4))


def test_any_part_and_the_folder_open_all_parts(whole, tmp_path) -> None:
    parts, wanted = split(whole, tmp_path / "parts"), logits(whole)
    for named in (*parts, tmp_path / "parts"):
        check_model(str(named))
        assert split_gguf(str(named)) == (str(tmp_path / "parts"), parts[0].name)
        assert torch.equal(logits(named), wanted)
        assert _files(str(named)) == [*map(str, parts)]  # each counts for what a kv_dir keeps
    file = open_gguf(parts[2])
    assert file is not None
    assert file.tensors.keys() == GGUFFile(whole).tensors.keys()
    last = [*file.tensors.values()][-1].data  # of another part
    before, last[0] = last[0], last[0] ^ 1
    file.release()
    assert last[0] == before


def test_parts_that_do_not_belong_together_are_refused_in_one_sentence(whole, tmp_path) -> None:
    parts = split(whole, tmp_path / "parts")
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"m-00002-of-00003.gguf is another part than its name"):
        open_gguf(parts[0])
    doubled = next(iter(GGUFFile(parts[0]).tensors))
    again = {doubled: Stored("F32", (1,), bytes(4))}
    keys = {"split.no": 1, "split.count": 3, "split.tensors.count": len(GGUFFile(whole).tensors)}
    parts[1].write_bytes(gguf_bytes(keys, again))
    with pytest.raises(ModelError, match=r"m-00002-of-00003.gguf is another part than its name"):
        open_gguf(parts[0])
    parts[1].write_bytes(gguf_bytes(keys, {}))
    with pytest.raises(ModelError, match=r"its parts have 14 tensors, where it says 21"):
        open_gguf(parts[0])
    parts[1].write_bytes(gguf_bytes({**keys, "split.tensors.count": 22}, {}))
    with pytest.raises(ModelError, match=r"m-00002-of-00003.gguf is another part than its name"):
        open_gguf(parts[0])
    check_model(str(parts[2]))  # what is there now may not be later
    parts[1].unlink()
    for load in (check_model, open_gguf):
        with pytest.raises(ModelError, match=r"lacks m-00002-of-00003|not all of its parts$"):
            load(str(parts[2]))
    whole.rename(alone := tmp_path / "m-00001-of-00001.gguf")
    assert open_gguf(alone) is not None
    alone.rename(pair := tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(gguf_bytes({"split.no": 1, "split.count": 2}))
    with pytest.raises(ModelError, match="a GGUF file in 1 parts, and by its name in 2"):
        open_gguf(pair)


def test_a_file_without_a_suffix_is_known_by_its_first_bytes(whole, tmp_path) -> None:
    whole.rename(blob := tmp_path / "sha256-0f00")
    assert LLM(blob, device="cpu").generate([1, 2, 3])[0].outputs[0].token_ids
    _, server = read_settings({"model": str(blob)})
    assert server.served_model_name == ["sha256-0f00"]
    (other := tmp_path / "sha256-0f01").write_bytes(b"GGUX")
    with pytest.raises(ModelError, match=r"a model is a folder with a config.json"):
        LLM(other)


def test_towers_are_left_out(whole, tmp_path) -> None:
    wanted = logits(whole)
    write_model(path := tmp_path / "m.gguf", KEYS, kinds=["Q8_0", "Q4_K", "IQ2_S"], extra=TOWERS)
    assert torch.equal(logits(path), wanted)
    write_model(path, KEYS, extra={"w.x": TOWERS["a.x"]})
    with pytest.raises(ModelError, match=r"it has w\.x"):
        load_model(path, device="cpu")
    write_model(path, {**KEYS, "{}.rope.freq_base": None})
    with pytest.raises(ModelError, match=r"has towers, and no llama.rope.freq_base"):
        load_model(path, device="cpu")


def test_gemma_3_with_a_tower_has_the_constants_that_ollama_leaves_out(tmp_path) -> None:
    tiny_model("gemma3_text", tmp_path, tokenizer=False, **FAMILIES["gemma3_text"][1])
    left_out = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa")
    keys = dict.fromkeys([*left_out, "rope.scaling.type", "rope.scaling.factor"])
    changes: dict[str, Any] = {
        f"gemma3.{key}": value for key, value in {**keys, "vision.block_count": 27}.items()
    }
    file = GGUFFile(convert(tmp_path, tmp_path / "m.gguf", **changes))
    found = describe_gguf(file, settings_of(file))
    wanted = describe(PreTrainedConfig.get_config_dict(tmp_path)[0])
    assert found.eps == wanted.eps
    for one, other in zip(found.ropes, wanted.ropes, strict=True):
        assert torch.equal(one.frequencies, other.frequencies)
