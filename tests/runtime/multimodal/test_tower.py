"""Rows of images, compared with what transformers' whole models make of them."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from radixcache.errors import InvalidRequest, ModelError
from radixcache.kernels.native.library import problem
from radixcache.runtime.model.checkpoint import Checkpoint
from radixcache.runtime.model.fallback.patches.linear import NativeLinear
from radixcache.runtime.multimodal.features import ImageFeatures
from radixcache.runtime.multimodal.tower import VisionTower
from tests.helpers.vlm_models import FAMILIES, HIDDEN
from tests.runtime.multimodal.pictures import picture, processor_of, source_of

Vlm = Callable[[str], Path]
CPU = torch.device("cpu")


def tower_of(path: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    return VisionTower(path, CPU, dtype)


def inputs_of(path: Path, height: int = 48, width: int = 80) -> dict[str, torch.Tensor]:
    ours = processor_of(path)
    return ours.inputs(ours.prepare(source_of(picture(height, width))))


def whole_rows(path: Path, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Rows of transformers' whole model, and those of its tower's inner layers."""
    model: Any = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    known = inspect.signature(model.get_image_features).parameters
    given = {name: tensor for name, tensor in inputs.items() if name in known}
    with torch.inference_mode():
        found = model.get_image_features(**given, return_dict=True)
    return flat(found.pooler_output), getattr(found, "deepstack_features", None)


def flat(parts: Any) -> torch.Tensor:
    return torch.cat([part.reshape(-1, HIDDEN) for part in parts])


def check(path: Path, reference: Path | None = None, **shape: int) -> ImageFeatures:
    """Compare the rows of a picture with those of a whole model."""
    inputs = inputs_of(path, **shape)
    found = tower_of(path).encode(inputs)
    expected, deep = whole_rows(reference or path, inputs)
    size = float(expected.std())
    assert size > 0.1
    torch.testing.assert_close(found.rows, expected, atol=3e-5 * size, rtol=1e-4)
    assert len(found.deep) == len(deep or ())
    for ours, theirs in zip(found.deep, deep or [], strict=True):
        torch.testing.assert_close(ours, flat(theirs), atol=2e-5, rtol=1e-4)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_whole_model(vlm: Vlm, family: str):
    image = processor_of(vlm(family)).prepare(source_of(picture(48, 80)))
    found = check(vlm(family))
    assert found.rows.shape == (image.num_rows, HIDDEN)
    inner = 3 if family.startswith("qwen3_vl") else 0
    assert found.deep.shape == (inner, image.num_rows, HIDDEN)
    assert found.nbytes == (1 + inner) * found.rows.nbytes


@pytest.mark.parametrize(
    ("family", "height", "width"),
    [("qwen3_vl", 16, 16), ("qwen2_5_vl", 96, 33), ("mistral3", 112, 5), ("internvl", 20, 300)],
)
def test_other_sizes(vlm: Vlm, family: str, height: int, width: int):
    check(vlm(family), height=height, width=width)


def rewritten(path: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint whose tensors are changed."""
    shutil.copytree(path, to)
    stored = load_file(to / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_names_that_older_files_have(vlm: Vlm, tmp_path: Path):
    def rename(stored: dict[str, torch.Tensor]) -> None:
        for name in [name for name in stored if name.startswith("vision_tower.")]:
            stored[name.replace("vision_tower.", "vision_tower.vision_model.")] = stored.pop(name)

    path = rewritten(vlm("gemma3"), tmp_path / "older", rename)
    inputs = inputs_of(path)
    rows = [tower_of(each).encode(inputs).rows for each in (path, vlm("gemma3"))]
    assert torch.equal(*rows)


def test_a_checkpoint_in_many_files(vlm: Vlm, tmp_path: Path):
    path = shutil.copytree(vlm("qwen3_vl"), tmp_path / "sharded")
    model = AutoModelForImageTextToText.from_pretrained(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="100KB")
    assert len([*path.glob("*.safetensors")]) > 3
    check(path, vlm("qwen3_vl"))


def test_nothing_of_the_text_is_read(vlm: Vlm, monkeypatch: pytest.MonkeyPatch):
    read, stored = list[str](), Checkpoint.stored

    def noting(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return stored(self, name)

    monkeypatch.setattr(Checkpoint, "stored", noting)
    tower = tower_of(vlm("mistral3"))
    assert not read
    tower.encode(inputs_of(vlm("mistral3")))
    assert {name.partition(".")[0] for name in read} == {"vision_tower", "multi_modal_projector"}
    tower.encode(inputs_of(vlm("mistral3")))
    assert len(read) == len({*read})


def test_rows_have_the_dtype_of_the_text(vlm: Vlm):
    inputs = inputs_of(vlm("qwen3_vl"))
    found = tower_of(vlm("qwen3_vl"), torch.bfloat16).encode(inputs)
    expected = tower_of(vlm("qwen3_vl")).encode(inputs)
    assert torch.equal(found.rows, expected.rows.bfloat16())
    assert torch.equal(found.deep, expected.deep.bfloat16())


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "mistral3"])
def test_the_number_of_threads_changes_no_bit(vlm: Vlm, family: str):
    inputs, threads = inputs_of(vlm(family)), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(tower_of(vlm(family)).encode(inputs).rows)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    packed = [isinstance(each, NativeLinear) for each in tower_of(vlm(family))._model.modules()]
    assert sum(packed) > 9 or problem()  # libraries' own sums may depend on them, in large layers


def test_a_weight_that_is_missing_is_named(vlm: Vlm, tmp_path: Path):
    def drop(stored: dict[str, torch.Tensor]) -> None:
        del stored["model.visual.merger.norm.weight"]

    path = rewritten(vlm("qwen3_vl"), tmp_path / "missing", drop)
    with pytest.raises(ModelError, match=r"lacks 1 weights .*, model.visual.merger.norm.weight"):
        tower_of(path).encode(inputs_of(path))


def test_weights_of_another_shape_or_without_value_are_refused(vlm: Vlm, tmp_path: Path):
    name = "multi_modal_projector.linear_1.bias"

    def cut(stored: dict[str, torch.Tensor]) -> None:
        stored[name] = stored[name][:-1].clone()

    def spoil(stored: dict[str, torch.Tensor]) -> None:
        stored[name][0] = float("nan")

    path, inputs = vlm("llava"), inputs_of(vlm("llava"))
    with pytest.raises(ModelError, match="weights of other shapes than its config says"):
        tower_of(rewritten(path, tmp_path / "cut", cut)).encode(inputs)
    with pytest.raises(ModelError, match="gives rows without value"):
        tower_of(rewritten(path, tmp_path / "spoilt", spoil)).encode(inputs)


def test_a_file_that_is_cut_is_refused(vlm: Vlm, tmp_path: Path):
    path, inputs = shutil.copytree(vlm("llava"), tmp_path / "cut"), inputs_of(vlm("llava"))
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="weights that read images"):
        tower_of(path).encode(inputs)


def quantised(path: Path, to: Path, part: str) -> Path:
    """A copy that says that it is quantised, with codes for the weights of a part."""

    def code(stored: dict[str, torch.Tensor]) -> None:
        names = [name for name in stored if part in name and name.endswith("proj.weight")]
        assert names
        for name in names:
            stored[name] = stored[name].to(torch.float8_e4m3fn)

    rewritten(path, to, code)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_a_tower_may_be_plain_beside_a_quantised_text(vlm: Vlm, tmp_path: Path):
    path = quantised(vlm("qwen3_5"), tmp_path / "text", "language_model")
    expected = tower_of(vlm("qwen3_5")).encode(inputs_of(path)).rows
    assert torch.equal(tower_of(path).encode(inputs_of(path)).rows, expected)


def test_a_quantised_tower_is_refused(vlm: Vlm, tmp_path: Path):
    path = quantised(vlm("qwen3_5"), tmp_path / "tower", "visual")
    with pytest.raises(InvalidRequest, match=r"are quantised \(model.visual"):
        tower_of(path).encode(inputs_of(path))
