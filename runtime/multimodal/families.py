"""Which models read images here, and what is true of their rows.

Read from each family's code in transformers: in all of them the rows of an image take the place of
its placeholders' embeddings after any scale of embeddings (Gemma's), and neither the rows nor the
text of an image depend on others in the prompt, where images are processed one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from radixcache.errors import InvalidRequest


class ImageFamily(NamedTuple):
    """What is true of a family's images.

    Attributes:
        processor: transformers' folder of its processor, and the processor's class there.
        axes: whether RoPE turns rows by time, height and width, as their grid says, and text goes
            on behind the larger of height and width.
        deep: whether rows of the tower's inner layers are added to those behind the text's first
            layers (DeepStack).
    """

    processor: str
    axes: bool = False
    deep: bool = False


_QWEN3 = ImageFamily("qwen3_vl.Qwen3VLProcessor", axes=True)
_PIXTRAL = ImageFamily("pixtral.PixtralProcessor")  # a token that is no row ends each line of rows
_TILES = ImageFamily("idefics3.Idefics3Processor")  # SmolVLM's would need num2words, for videos

_FAMILIES: dict[str, ImageFamily] = {
    "qwen2_vl": ImageFamily("qwen2_vl.Qwen2VLProcessor", axes=True),
    "qwen2_5_vl": ImageFamily("qwen2_5_vl.Qwen2_5_VLProcessor", axes=True),
    "qwen3_vl": _QWEN3._replace(deep=True),
    "qwen3_vl_moe": _QWEN3._replace(deep=True),
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "glm4v": ImageFamily("glm4v.Glm4vProcessor", axes=True),
    "glm4v_moe": ImageFamily("glm4v.Glm4vProcessor", axes=True),
    "mistral3": _PIXTRAL,
    "gemma3": ImageFamily("gemma3.Gemma3Processor"),
    "gemma4": ImageFamily("gemma4.Gemma4Processor"),
    "internvl": ImageFamily("internvl.InternVLProcessor"),
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "llava": ImageFamily("llava.LlavaProcessor"),
    "llava_next": ImageFamily("llava_next.LlavaNextProcessor"),
    # Several images in one call would give each a single tile; here each is alone.
    "llava_onevision": ImageFamily("llava_onevision.LlavaOnevisionProcessor"),
    "lfm2_vl": ImageFamily("lfm2_vl.Lfm2VlProcessor"),  # its image processor needs torchvision
}  # fmt: skip


def image_family(settings: Mapping[str, Any]) -> ImageFamily:
    """What is true of images in the model of this config.json.

    Raises:
        InvalidRequest: it reads none, or none here.
    """
    name = str(settings.get("model_type"))
    vision, family = settings.get("vision_config"), _FAMILIES.get(name)
    if not isinstance(vision, Mapping):
        raise InvalidRequest("this model takes no images: send text")
    if family is None:
        raise InvalidRequest(f"images are not supported for {name[:100]}")
    if name == "llava" and vision.get("model_type") == "pixtral":
        return _PIXTRAL
    return family
