"""Images that somebody gives are bounded by their headers, and decoded as Pillow decodes them."""

from __future__ import annotations

import struct
import sys
import warnings
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from radixcache.errors import InvalidRequest, MissingDependency
from radixcache.runtime.multimodal.image_input import (
    MAX_BYTES,
    MAX_IMAGES,
    MAX_SCANS,
    check_number,
    check_total,
    image_of_url,
    image_source,
)
from tests.helpers.pictures import FORMATS, data_url, file_of, picture, png_of

PNG = file_of(picture())
BLACK = b"\0" * 13 * 12
"""The rows of a PNG of 12 x 12."""


def pixels(given: object) -> np.ndarray:
    return np.asarray(image_source(given).open())


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("form", FORMATS)
def test_all_ways_to_give_a_file_give_its_picture(form: str, tmp_path: Path):
    file = file_of(picture(41, 27), form)
    path = tmp_path / "picture"
    path.write_bytes(file)
    expected = np.asarray(Image.open(BytesIO(file)).convert("RGB"))
    wrong_type = data_url(file, "application/pdf")
    for given in (file, bytearray(file), memoryview(file), path, str(path), wrong_type):
        source = image_source(given)
        assert source.identity == sha256(file).digest()
        assert (source.num_pixels, source.num_bytes) == (41 * 27, len(file))
        assert np.array_equal(np.asarray(source.open()), expected)
        assert source.open().mode == "RGB"


@pytest.mark.parametrize("how", [{}, {"lossless": True}, {"xmp": b"x"}])
@pytest.mark.parametrize("alpha", [255, 128])
def test_all_forms_of_webp_say_their_size(how: dict[str, Any], alpha: int):
    image = picture(300, 7)
    image.putalpha(alpha)
    assert image_source(file_of(image, "WEBP", **how)).open().size == (300, 7)


def test_a_frame_may_be_larger_than_the_screen():
    file = file_of(picture(), "GIF")
    screen, frame = struct.pack("<HH", 40, 30), struct.pack("<HHHH", 0, 0, 40, 30)
    assert file.count(screen) == 2 and file.count(frame) == 1
    file = file.replace(frame, struct.pack("<HHHH", 3, 2, 40, 30))
    file = file.replace(screen, struct.pack("<HH", 1, 1), 1)
    assert image_source(file).num_pixels == 43 * 32 and pixels(file).shape == (32, 43, 3)


def test_a_picture_of_pil_is_copied():
    given = picture()
    before, source = np.array(given), image_source(given)
    assert source.identity == image_source(picture()).identity
    given.paste("red", (0, 0, 40, 30))
    assert np.array_equal(np.asarray(source.open()), before)
    others = (given, picture(30, 40), picture(seed=1), picture().convert("L"))
    assert len({source.identity, *(image_source(other).identity for other in others)}) == 5


def test_palettes_tell_pictures_apart():
    one, other = (Image.new("P", (4, 4)) for _ in range(2))
    other.putpalette([255, 0, 0] * 256)
    assert one.tobytes() == other.tobytes()
    assert image_source(one).identity != image_source(other).identity


def test_what_is_transparent_is_on_white():
    rgba = np.asarray(picture().convert("RGBA")).copy()
    rgba[..., 3] = np.arange(1200).reshape(30, 40) % 256
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    image = Image.fromarray(rgba)
    for given in (image, file_of(image)):
        assert np.abs(pixels(given) - expected).max() <= 1
    palette = Image.new("P", (2, 1), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    palette.putpixel((0, 0), 0)
    for clear in (0, b"\0\xff"):
        found = pixels(file_of(palette, transparency=clear))
        assert found.tolist() == [[[255, 255, 255], [200, 100, 50]]]


def test_sixteen_bits_of_grey_keep_their_upper_half():
    grey = (np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)
    file = file_of(Image.fromarray(grey))
    assert np.array_equal(pixels(file), np.stack([grey >> 8] * 3, -1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "CMYK", "YCbCr", "HSV", "I", "F"])
def test_every_mode_becomes_rgb(mode: str):
    white = picture().convert("L").point(lambda _: 255).convert("RGB")
    image = white.convert("P").convert("PA") if mode == "PA" else white.convert(mode)
    assert image.mode == mode and (pixels(image) == 255).all()


def test_cmyk_of_a_file_becomes_rgb():
    file = file_of(Image.new("CMYK", (8, 8), (0, 255, 0, 0)), "JPEG")
    assert np.abs(pixels(file).astype(int) - [255, 0, 255]).max() <= 2


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_turned_as_their_exif_says(form: str):
    exif, image = Image.Exif(), picture(40, 20)
    exif[0x0112] = 6  # to be turned to the right
    how = {"quality": 100, "subsampling": 0} if form == "JPEG" else {"lossless": True}
    file = file_of(image, form, exif=exif, **(how if form != "PNG" else {}))
    expected = np.rot90(np.asarray(image), -1)
    assert pixels(file).shape == (40, 20, 3)
    assert np.abs(pixels(file).astype(int) - expected).mean() < 3


def test_of_many_frames_the_first_is_read():
    frames = [picture(seed=seed) for seed in range(500)]
    file = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(pixels(file), np.asarray(Image.open(BytesIO(file)).convert("RGB")))


PREFIX = "an image is a PNG, JPEG, WebP or GIF, and this is "
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
REFUSED: list[tuple[Any, str]] = [
    (SVG, PREFIX + "an SVG"),
    (b"\xef\xbb\xbf <?xml version='1.0'?>" + SVG, PREFIX + "an SVG"),
    (b"%PDF-1.7", PREFIX + "a PDF"),
    (b"\0\0\0\x20ftypisom", PREFIX + "a video"),
    (PNG[1:], PREFIX + "something else"),
    (b"", PREFIX + "something else"),
    (b"x" * (MAX_BYTES + 1), "an image's file has at most 20 MB"),
    (png_of(40_000, 40_000, b""), "an image has 1 to 32 million pixels, not 40000 x 40000"),
    (png_of(0, 5, b""), "the PNG is damaged"),
    (b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"!\xfe" + b"\1x" * 9999, "damaged"),
    (b"GIF89a" + struct.pack("<HH", 1, 1) + b"\0\0\0,\0\0\0\0" + b"\xff" * 9, "exceeds limit"),
    (b"\xff\xd8" + b"\xff" * 100_000, "the JPEG is damaged: "),
    (file_of(picture(), "JPEG") + b"\xff\xda" * MAX_SCANS, "a JPEG has at most 100 scans"),
    (Image.new("1", (8000, 8000)), "not 8000 x 8000"),
    ("/no/such.png", "cannot read the image /no/such.png: No such file"),
    ("a\0b", "cannot read the image"),
    ("https://example.org/a.png", "is not fetched: give the file's bytes"),
    (7, "a file's bytes or path, or a PIL image, not int"),
    ("data:image/png,%89PNG", "an image's URL is data:image/png;base64,"),
    ("data:image/png;base64", PREFIX + "something else"),
    ("data:image/png;base64,no base64!", "is no base64"),
    ("data:image/png;base64,aGk", "is no base64"),
    ("data:image/png;base64,äöü", "is no base64"),
    ("data:image/png;base64," + "A" * 27_000_000, "at most 20 MB"),
    (data_url(SVG, "image/png"), PREFIX + "an SVG"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_read_is_refused_in_a_sentence(given: Any, sentence: str):
    with pytest.raises(InvalidRequest) as refused:
        image_source(given)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_is_cut_off_is_refused(form: str):
    file = file_of(picture(200, 100), form)
    for length in (*range(40), *range(40, len(file) - 40, len(file) // 20)):
        with pytest.raises(InvalidRequest, match=r"is damaged|an image is a PNG"):
            image_source(file[:length]).open()


@pytest.mark.parametrize(
    "file",
    [
        png_of(12, 12, BLACK, (40_000, 40_000)),
        png_of(12, 12, BLACK, (10_000, 10_000)),  # Pillow's `open` would only warn
        PNG[:40] + bytes(len(PNG) - 40),
        file_of(picture(), "WEBP", xmp=b"x").replace(b"\x27\0\0\x1d\0\0", b"\x28\0\0\x1d\0\0"),
    ],
)
def test_a_file_that_lies_is_refused(file: bytes):
    with pytest.raises(
        InvalidRequest, match=r"^the (PNG|WebP) is damaged: [^\n]+$|40000 x 40000|10000 x"
    ):
        image_source(file).open()


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_damaged_raises_nothing_else(form: str):
    file, rng = file_of(picture(), form), np.random.default_rng(0)
    for _ in range(200):
        wrong = bytearray(file)
        for at in rng.integers(0, len(file), 3):
            wrong[at] = rng.integers(256)
        with suppress(InvalidRequest):
            assert image_source(wrong).open().mode == "RGB"


def peak() -> int:
    """The most memory that was in use since it was asked to forget, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_hostile_files_take_no_memory():
    """What a header says is refused before there is room for it, here of 100 MB and more."""
    canvas = b"VP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0"  # 16,384 x 16,384
    files = [png_of(12, 12, BLACK, (6000, 5000)), b"RIFF\x16\0\0\0WEBP" + canvas]
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    for given in [*files, *(given for given, _ in REFUSED)]:
        with pytest.raises(InvalidRequest):
            image_source(given).open()
    assert peak() - before < 64 << 10


def test_without_pillow_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: image_source(PNG), lambda: image_of_url(data_url(PNG))):
        with pytest.raises(MissingDependency, match=r"pip install '\.\[images\]'"):
            call()


def test_a_prompt_has_bounds():
    wide, large = png_of(8000, 4000, b""), PNG + b"\0" * (MAX_BYTES - len(PNG))
    check_number(MAX_IMAGES)
    with pytest.raises(InvalidRequest, match="a prompt has at most 64 images, not 65"):
        check_number(MAX_IMAGES + 1)
    for given, fits, sentence in (
        (wide, 2, "at most 64 million pixels of images"),
        (large, 3, "at most 64 MB of images"),
    ):
        source = image_source(given)
        check_total([source] * fits)
        with pytest.raises(InvalidRequest, match=sentence):
            check_total([source] * (fits + 1))


def test_no_text_is_decoded_twice():
    """Padding within base64 would let two texts be one file."""
    for cut in (1, 3 * (1 << 18) - 2):  # the second one ends what is decoded at a time
        file = PNG + b"x" * (1 << 20)
        text = b64encode(file[:cut]).decode() + b64encode(file[cut:]).decode()
        assert text[4 * -(-cut // 3) - 1] == "="
        with pytest.raises(InvalidRequest, match="is no base64"):
            image_of_url(f"data:;base64,{text}")
