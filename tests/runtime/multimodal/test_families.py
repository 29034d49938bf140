"""Which models read images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixcache.errors import InvalidRequest
from radixcache.runtime.multimodal.families import image_family
from radixcache.runtime.multimodal.images import open_images
from tests.helpers.vlm_models import FAMILIES


def test_llava_with_pixtrals_tower_has_its_processor():
    plain = image_family({"model_type": "llava", "vision_config": {"model_type": "clip"}})
    other = image_family({"model_type": "llava", "vision_config": {"model_type": "pixtral"}})
    assert plain.processor == "llava.LlavaProcessor"
    assert other.processor == "pixtral.PixtralProcessor"


def test_every_tiny_model_is_of_a_family():
    known = {name: image_family({"model_type": name, "vision_config": {}}) for name in FAMILIES}
    deep = [name for name, family in known.items() if family.deep]
    assert deep == ["qwen3_vl", "qwen3_vl_moe"]


@pytest.mark.parametrize("name", ["llama", "paligemma", None])
def test_others_are_refused(name: str | None):
    with pytest.raises(InvalidRequest, match=f"images are not supported for {name}"):
        image_family({"model_type": name, "vision_config": {}})


def test_a_text_takes_none():
    with pytest.raises(InvalidRequest, match="takes no images"):
        image_family({"model_type": "gemma3", "vision_config": None})


def test_a_gguf_file_takes_none(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    model: Any = None  # nothing of it is read
    with pytest.raises(InvalidRequest, match="not read from GGUF files"):
        open_images(str(tmp_path / "model.gguf"), model).prepare([b""])
