"""What an image is to a model, compared with transformers' whole processors."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any

import pytest
from PIL.Image import Image as PILImage
from transformers import AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.processing_utils import ProcessorMixin

from radixcache.errors import ContextExceeded, InvalidRequest, ModelError
from radixcache.runtime.multimodal import processor as module
from radixcache.runtime.multimodal.image import ImageSource
from radixcache.runtime.multimodal.processor import ImageProcessor
from tests.helpers.vlm_models import FAMILIES, FIRST_SPECIAL
from tests.runtime.multimodal.pictures import family_of, picture, processor_of, source_of

Vlm = Callable[[str], Path]


def whole_processor(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor of all media; a part for videos, which needs torchvision, is None."""
    settings = json.loads((path / "processor_config.json").read_text())
    folder, _, _ = family_of(path).processor.partition(".")
    package = f"transformers.models.{folder}"
    if folder == "pixtral" and f"{package}.processing_pixtral" not in sys.modules:
        twin = import_module(f"{package}.image_processing_pil_pixtral")
        monkeypatch.setitem(sys.modules, f"{package}.image_processing_pixtral", twin)
    if settings["processor_class"] == "SmolVLMProcessor":
        package = "transformers.models.smolvlm"
        monkeypatch.setattr(f"{package}.processing_smolvlm.num2words", str)
        folder = "smolvlm"
    kind = getattr(import_module(f"{package}.processing_{folder}"), settings["processor_class"])
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    parts = dict.fromkeys(kind.get_attributes())
    parts["tokenizer"] = AutoTokenizer.from_pretrained(path)
    parts["image_processor"] = AutoImageProcessor.from_pretrained(path, backend="pil")
    known = {"processor_class", *parts}
    return kind(**parts, **{n: x for n, x in settings.items() if n not in known})


@pytest.mark.parametrize("family", FAMILIES)
def test_two_images_in_a_text_are_tokenised_as_by_the_whole_processor(
    vlm: Vlm, family: str, monkeypatch: pytest.MonkeyPatch
):
    path, pictures = vlm(family), [picture(48, 80), picture(70, 40, seed=1)]
    ours = processor_of(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    parts = [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "image"}]
    asked: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "\n\nWhich?"}]}]
    text: Any = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    images = [ours.prepare(source_of(each)) for each in pictures]
    before, between, after = text.split(ours.placeholder)
    replaced = before + images[0].text + between + images[1].text + after
    ids = tokenizer.encode(replaced, add_special_tokens=False)

    whole = whole_processor(path, monkeypatch)
    given = [pictures] if family in ("gemma3", "gemma4", "idefics3", "smolvlm") else pictures
    expected = whole(images=given, text=[text], padding=False)
    assert ids == [*expected["input_ids"][0]]
    assert ids.count(ours.token) == sum(image.num_rows for image in images) > 0
    if family_of(path).axes:
        grids = [[1, 2 * image.grid[0], 2 * image.grid[1]] for image in images if image.grid]
        assert grids == [[*map(int, grid)] for grid in expected["image_grid_thw"]]
        assert [height * width for _, height, width in grids] == [
            4 * image.num_rows for image in images
        ]
    else:
        assert [image.grid for image in images] == [None, None]


def test_rows_of_pixtral_stand_in_lines(vlm: Vlm):
    image = processor_of(vlm("mistral3")).prepare(source_of(picture(56, 84)))
    assert image.text == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert (image.num_rows, image.token) == (6, FIRST_SPECIAL)


def test_the_digest_follows_from_pixels_alone(vlm: Vlm):
    ours, drawn = processor_of(vlm("qwen3_vl")), picture(48, 80)
    changed = drawn.copy()
    changed.putpixel((79, 47), (1, 2, 3))
    images = [
        ours.prepare(source_of(each, compress_level=level))
        for each, level in ((drawn, 9), (drawn, 1), (changed, 9))
    ]
    assert len({image.source.identity for image in images}) == 3
    assert images[0].digest == images[1].digest != images[2].digest
    assert images[0].text == images[2].text


def test_the_digest_follows_from_the_model_and_its_processor_too(vlm: Vlm, tmp_path: Path):
    source, path = source_of(picture(48, 80)), vlm("gemma3")
    other = shutil.copytree(path, tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["do_convert_rgb"] = True  # which it is: the pixels stay
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    makers = [
        processor_of(path, fingerprint=b"a"), processor_of(path, fingerprint=b"b"),
        processor_of(other, fingerprint=b"a"),
    ]  # fmt: skip
    images = [maker.prepare(source) for maker in makers]
    assert len({image.digest for image in images}) == 3
    assert (
        makers[0]
        .inputs(images[0])["pixel_values"]
        .equal(makers[2].inputs(images[2])["pixel_values"])
    )
    again = processor_of(shutil.copytree(path, tmp_path / "moved"), fingerprint=b"a")
    assert again.prepare(source).digest == images[0].digest


def counted(source: ImageSource, opened: list[bytes]) -> ImageSource:
    """The source, which notes when it is decoded."""

    def opening() -> PILImage:
        opened.append(source.identity)
        return source.open()

    return replace(source, open=opening)


def test_a_source_is_decoded_once_while_it_is_known(vlm: Vlm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MOST_KNOWN", 2)
    ours, opened = processor_of(vlm("gemma3")), list[bytes]()
    first, second, third = (counted(source_of(picture(8, 9, n)), opened) for n in range(3))
    one = ours.prepare(first)
    again = ours.prepare(replace(first))
    assert (again.digest, len(opened)) == (one.digest, 1)
    for source in (second, first, third, first):  # the third takes the second's place
        ours.prepare(source)
    assert opened == [first.identity, second.identity, third.identity]
    ours.prepare(second)
    assert len(opened) == 4


def test_what_the_processor_refuses_is_refused_in_a_sentence(vlm: Vlm):
    ours = processor_of(vlm("qwen3_vl"))
    with pytest.raises(
        InvalidRequest, match=r"an image of 603 x 3 pixels: .* 200, got 201"
    ) as said:
        ours.prepare(source_of(picture(3, 603)))
    assert "\n" not in str(said.value)
    ours.prepare(source_of(picture(3, 600)))


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "idefics3"])
def test_an_image_of_more_rows_than_the_context_is_not_resized(
    vlm: Vlm, family: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    source = source_of(picture(96, 96))
    rows = processor_of(vlm(family)).prepare(source).num_rows
    ours = processor_of(vlm(family), max_rows=rows - 1)
    monkeypatch.setattr(ours._processor.image_processor, "preprocess", refuse)
    with pytest.raises(ContextExceeded, match=f"maximum context length is {rows - 1} tokens"):
        ours.prepare(source)


def test_rows_that_no_size_tells_are_bounded_as_well(vlm: Vlm, monkeypatch: pytest.MonkeyPatch):
    source = source_of(picture(96, 96))
    rows = processor_of(vlm("internvl")).prepare(source).num_rows
    ours = processor_of(vlm("internvl"), max_rows=rows - 1)
    monkeypatch.delattr(InternVLProcessor, "_get_num_multimodal_tokens")
    with pytest.raises(ContextExceeded, match=f"is {rows} tokens"):
        ours.prepare(source)


def test_inputs_are_those_of_the_image(vlm: Vlm):
    ours, drawn = processor_of(vlm("qwen3_5")), picture(48, 80)
    inputs = ours.inputs(ours.prepare(source_of(drawn)))
    plain = AutoImageProcessor.from_pretrained(vlm("qwen3_5"), backend="pil")
    expected = plain([drawn], return_tensors="pt")
    assert inputs.keys() == expected.keys() == {"pixel_values", "image_grid_thw"}
    assert all(bool((inputs[name] == expected[name]).all()) for name in inputs)


def test_threads_take_turns(vlm: Vlm, monkeypatch: pytest.MonkeyPatch):
    ours, busy, drawn = processor_of(vlm("gemma3")), Lock(), [picture(8, 9, n) for n in range(8)]
    process = ours._process

    def alone(source: ImageSource) -> Any:
        assert busy.acquire(blocking=False)
        sleep(0.01)
        busy.release()
        return process(source)

    monkeypatch.setattr(ours, "_process", alone)
    with ThreadPoolExecutor(8) as threads:
        images = [*threads.map(lambda each: ours.prepare(source_of(each)), drawn)]
        assert all(threads.map(ours.inputs, images))
    assert len({image.digest for image in images}) == 8


def test_a_model_without_a_processor_says_so(vlm: Vlm, tmp_path: Path):
    path = shutil.copytree(vlm("llava"), tmp_path / "llava")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"the image processor of .* does not load: "):
        _ = processor_of(path).placeholder
    ImageProcessor(tmp_path / "nowhere", family_of(path), b"", 1)  # which reads nothing yet
