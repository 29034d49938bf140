"""Tiny random checkpoints of models that take images, with tokenizer, processor and chat template.

Their text parts have at least four layers, of the kinds that real ones have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.helpers.models import byte_tokenizer, make_peaky

VOCAB_SIZE = 320
BOS, EOS = 256, 257
FIRST_SPECIAL = 258  # special tokens of a family have the ids from here on, in their order
HIDDEN = 64


class _Vlm(NamedTuple):
    """A family: its text, its tower, and what its folder holds beside the weights.

    `specials` are the attribute by which the tokenizer knows a token, or nothing, and the token.
    `template` is what the chat template writes for an image. `config` and `processor` are settings
    of config.json and processor_config.json, where a name in braces stands for a token's id.
    """

    text_type: str
    specials: tuple[tuple[str, str], ...]
    template: str
    text: dict[str, Any]
    vision: dict[str, Any]
    image_processor: dict[str, Any]
    config: dict[str, Any]
    processor: dict[str, Any] = {}  # noqa: RUF012


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 1024, "bos_token_id": BOS, "eos_token_id": EOS,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {**_TURNED, "mrope_interleaved": True}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "head_dim": 32,
    "rope_parameters": {
        **_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_VIT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48}
_BLOCKS = {**_VIT, "num_hidden_layers": 3, "num_attention_heads": 2}
_QWEN_VIT: dict[str, Any] = {
    **_VIT, "depth": 4, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN, "patch_size": 8,
}  # fmt: skip
_QWEN3_VIT = {**_QWEN_VIT, "num_position_embeddings": 64}
_DEEP = {**_QWEN3_VIT, "deepstack_visual_indexes": [0, 1, 2]}
_QWEN_SPECIALS = (
    ("", "<|vision_start|>"), ("", "<|vision_end|>"), ("", "<|image_pad|>"), ("", "<|video_pad|>"),
)  # fmt: skip
_QWEN_TEMPLATE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8, "merge_size": 2,
    "temporal_patch_size": 2, **_HALVES, "size": {"shortest_edge": 1024, "longest_edge": 9216},
}  # fmt: skip
_SIGLIP = {**_BLOCKS, "image_size": 56, "patch_size": 14}
_CLIP = {"model_type": "clip_vision_model", **_SIGLIP, "projection_dim": HIDDEN}
_CROPPED = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_IMAGE = (("image_token", "<image>"),)
_TILES = {
    "do_image_splitting": True, "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56}, **_HALVES,
}  # fmt: skip
_TILE_SPECIALS = (
    ("", "<fake_token_around_image>"), ("", "<image>"), ("", "<global-img>"),
    ("", "<end_of_utterance>"),
    *(("", f"<row_{row}_col_{col}>") for row in (1, 2) for col in (1, 2)),
)  # fmt: skip
_PINS = [[56, 112], [112, 56], [112, 112]]
_GLM_ROPE = {**_TURNED, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}


def _qwen(text: dict[str, Any], text_type: str, vision: dict[str, Any]) -> _Vlm:
    return _Vlm(
        text_type, _QWEN_SPECIALS, _QWEN_TEMPLATE, text, vision, _QWEN_IMAGES, _QWEN_IDS,
        {"processor_class": "Qwen3VLProcessor"},
    )  # fmt: skip


FAMILIES: dict[str, _Vlm] = {
    "qwen3_vl": _qwen({"rope_parameters": _INTERLEAVED}, "qwen3_vl_text", _DEEP),
    "qwen3_vl_moe": _qwen(
        {"rope_parameters": _INTERLEAVED, **_EXPERTS}, "qwen3_vl_moe_text", _DEEP
    ),
    "qwen3_5": _qwen(_DELTA, "qwen3_5_text", _QWEN3_VIT),
    "qwen3_5_moe": _qwen(_DELTA | _SHARED, "qwen3_5_moe_text", _QWEN3_VIT),
    "qwen2_5_vl": _qwen(
        {"rope_parameters": _TURNED}, "qwen2_5_vl_text",
        {**_QWEN_VIT, "fullatt_block_indexes": [1, 3], "window_size": 32},
    )._replace(processor={"processor_class": "Qwen2_5_VLProcessor"}),
    "qwen2_vl": _qwen(
        {"rope_parameters": _TURNED}, "qwen2_vl_text",
        {"depth": 3, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2,
         "spatial_merge_size": 2, "temporal_patch_size": 2, "patch_size": 8},
    )._replace(processor={"processor_class": "Qwen2VLProcessor"}),
    "mistral3": _Vlm(
        "ministral3", (("", "[IMG]"), ("", "[IMG_BREAK]"), ("", "[IMG_END]")), "[IMG]",
        {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {**_BLOCKS, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16},
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14,
         "size": {"longest_edge": 112}},
        {"image_token_index": "[IMG]", "spatial_merge_size": 2, "vision_feature_layer": -1},
        {"processor_class": "PixtralProcessor", "image_token": "[IMG]", "patch_size": 14,
         "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
         "spatial_merge_size": 2},
    ),
    "gemma3": _Vlm(
        "gemma3_text",
        (("boi_token", "<start_of_image>"), ("eoi_token", "<end_of_image>"),
         ("image_token", "<image_soft_token>")),
        "<start_of_image>", {**_WINDOWS, "query_pre_attn_scalar": 16, "pad_token_id": 0},
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56},
         "do_convert_rgb": None, "do_pan_and_scan": None, **_HALVES},
        {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
         "eoi_token_index": "<end_of_image>", "mm_tokens_per_image": 4},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "gemma4": _Vlm(
        "gemma4_text",
        (("image_token", "<|image|>"), ("boi_token", "<|image>"), ("eoi_token", "<image|>"),
         ("audio_token", "<|audio|>"), ("boa_token", "<|audio>"), ("eoa_token", "<audio|>"),
         ("", "<|video|>")),
        "\n\n<|image|>\n\n",
        {**_WINDOWS, "pad_token_id": 0, "use_bidirectional_attention": "vision",
         "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "hidden_size_per_layer_input": 0},
        {**_BLOCKS, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 8,
         "pooling_kernel_size": 2, "position_embedding_size": 64},
        {},
        {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
         "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_index": "<audio|>",
         "video_token_id": "<|video|>", "audio_config": None},
        {"processor_class": "Gemma4Processor", "image_seq_length": 70, "image_processor": {
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 8,
            "pooling_kernel_size": 2, "max_soft_tokens": 70}},
    ),
    "internvl": _Vlm(
        "qwen2",
        (("start_image_token", "<img>"), ("end_image_token", "</img>"),
         ("context_image_token", "<IMG_CONTEXT>"), ("video_token", "<video>")),
        "<IMG_CONTEXT>\n", {},
        {**_BLOCKS, "model_type": "internvl_vision", "image_size": [56, 56],
         "patch_size": [14, 14]},
        {"image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False,
         "min_patches": 1, "max_patches": 4, "size": {"height": 56, "width": 56}},
        {"image_token_id": "<IMG_CONTEXT>", "downsample_ratio": 0.5, "image_seq_length": 4},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "idefics3": _Vlm(
        "llama", _TILE_SPECIALS, "<image>", {},
        {**_BLOCKS, "image_size": 56, "patch_size": 14},
        {"image_processor_type": "Idefics3ImageProcessor", **_TILES},
        {"image_token_id": "<image>", "scale_factor": 2},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "smolvlm": _Vlm(
        "llama", _TILE_SPECIALS, "<image>", {},
        {**_BLOCKS, "image_size": 56, "patch_size": 14},
        {"image_processor_type": "SmolVLMImageProcessor", **_TILES},
        {"image_token_id": "<image>", "scale_factor": 2},
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    ),
    "llava": _Vlm(
        "llama", _IMAGE, "<image>\n", {}, _CLIP,
        {"image_processor_type": "CLIPImageProcessor", **_CROPPED},
        {"image_token_index": "<image>"},
        {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": "<image>",
         "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": _Vlm(
        "mistral", _IMAGE, "<image>\n", {"sliding_window": None}, _CLIP,
        {"image_processor_type": "LlavaNextImageProcessor", **_CROPPED,
         "image_grid_pinpoints": _PINS},
        {"image_token_index": "<image>", "image_grid_pinpoints": _PINS},
        {"processor_class": "LlavaNextProcessor", "patch_size": 14, "image_token": "<image>",
         "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": _Vlm(
        "qwen2", (*_IMAGE, ("", "<video>")), "<image>\n", {},
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_processor_type": "LlavaOnevisionImageProcessor", **_HALVES,
         "size": {"height": 56, "width": 56}, "image_grid_pinpoints": _PINS},
        {"image_token_index": "<image>", "video_token_index": "<video>",
         "image_grid_pinpoints": _PINS, "vision_feature_select_strategy": "full"},
        {"processor_class": "LlavaOnevisionProcessor", "image_token": "<image>",
         "num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "lfm2_vl": _Vlm(
        "lfm2",
        (*_IMAGE, ("image_start_token", "<|image_start|>"), ("image_end_token", "<|image_end|>"),
         ("image_thumbnail", "<|img_thumbnail|>")),
        "<image>",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
        {**_BLOCKS, "model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 16,
         "vision_use_head": False},
        {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 8,
         "tile_size": 64, "max_image_tokens": 16, "min_image_tokens": 4, "max_num_patches": 64,
         "do_image_splitting": False},
        {"image_token_id": "<image>", "projector_hidden_size": 48},
        {"processor_class": "Lfm2VlProcessor"},
    ),
    "glm4v": _Vlm(
        "glm4v_text",
        (("", "<|begin_of_image|>"), ("", "<|image|>"), ("", "<|end_of_image|>"),
         ("", "<|video|>"), ("", "<|begin_of_video|>"), ("", "<|end_of_video|>")),
        "<|begin_of_image|><|image|><|end_of_image|>", {"rope_parameters": _GLM_ROPE},
        {**_QWEN_VIT, "image_size": 64},
        {**_QWEN_IMAGES, "image_processor_type": "Glm4vImageProcessor",
         "size": {"shortest_edge": 2048, "longest_edge": 18432}},
        {"image_token_id": "<|image|>", "image_start_token_id": "<|begin_of_image|>",
         "image_end_token_id": "<|end_of_image|>", "video_token_id": "<|video|>",
         "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"},
        {"processor_class": "Glm4vProcessor"},
    ),
}  # fmt: skip


def write_vlm(folder: Path, family: str, seed: int = 0, **text: Any) -> Path:
    """Save a loadable model of a family, by transformers' `model_type`, and return its folder.

    `text` overrides settings of the text's config.
    """
    torch.manual_seed(seed)
    vlm, folder = FAMILIES[family], Path(folder)
    ids = {token: FIRST_SPECIAL + place for place, (_, token) in enumerate(vlm.specials)}
    settings = {
        "text_config": {"model_type": vlm.text_type, **_TEXT, **vlm.text, **text},
        "vision_config": vlm.vision, "eos_token_id": EOS, "tie_word_embeddings": False,
        **{name: ids.get(value, value) if isinstance(value, str) else value
           for name, value in vlm.config.items()},
    }  # fmt: skip
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **settings))
    make_peaky(model)
    _make_even(model)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    _tokenizer(vlm).save_pretrained(folder)
    for name, content in (
        ("preprocessor_config", vlm.image_processor),
        ("processor_config", vlm.processor),
    ):
        if content:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@torch.no_grad()
def _make_even(model: torch.nn.Module) -> None:
    """Convolutions and tables of positions that do not drown what they are added to."""
    for name, weight in model.named_parameters():
        if "patch" in name and weight.ndim > 1:
            weight.normal_(0.0, weight[0].numel() ** -0.5)
        elif "pos" in name and weight.ndim > 1:
            weight.normal_(0.0, 0.3)


def _tokenizer(vlm: _Vlm) -> PreTrainedTokenizerFast:
    part = "{{% if part.type == 'image' %}}{}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        + part.format(vlm.template)
        + "{% endfor %}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    named = {name: token for name, token in vlm.specials if name}
    specials = [token for _, token in vlm.specials]
    return byte_tokenizer(template, specials, extra_special_tokens=named)
