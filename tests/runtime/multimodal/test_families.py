"""Which models read images, and how their rows see each other."""

from __future__ import annotations

import pytest

from radixcache.errors import InvalidRequest
from radixcache.runtime.multimodal.families import image_family
from tests.helpers.vlm_models import FAMILIES


@pytest.mark.parametrize(
    ("settings", "both_ways"),
    [
        ({"model_type": "gemma3"}, ("full", "sliding")),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}},
         ("sliding",)),
        ({"model_type": "gemma4", "text_config": {}}, ()),
        ({"model_type": "qwen3_vl"}, ()),
    ],
)  # fmt: skip
def test_rows_that_see_each_other(settings: dict[str, object], both_ways: tuple[str, ...]):
    assert image_family(settings).both_ways == both_ways


def test_llava_with_pixtrals_tower_has_its_processor():
    plain = image_family({"model_type": "llava", "vision_config": {"model_type": "clip"}})
    other = image_family({"model_type": "llava", "vision_config": {"model_type": "pixtral"}})
    assert plain.processor == "llava.LlavaProcessor"
    assert other.processor == "pixtral.PixtralProcessor"


def test_every_tiny_model_is_of_a_family():
    deep = [name for name in FAMILIES if image_family({"model_type": name}).deep]
    assert deep == ["qwen3_vl", "qwen3_vl_moe"]


@pytest.mark.parametrize("name", ["llama", "paligemma", None])
def test_others_are_refused(name: str | None):
    with pytest.raises(InvalidRequest, match=f"images are not supported for {name}"):
        image_family({"model_type": name})
