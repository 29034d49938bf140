"""What somebody gives as an image becomes an `ImageSource`: its bounds are checked at once, by its
header, and it is decoded when its pixels are needed."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from radixcache.errors import InvalidRequest, MissingDependency, first_sentence
from radixcache.runtime.multimodal.image import ImageSource, digest_of

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage
    from PIL.ImageFile import ImageFile

MAX_PIXELS, MAX_BYTES = 32_000_000, 20_000_000
"""Of one image, and of its file."""

MAX_IMAGES, MAX_ALL_PIXELS, MAX_ALL_BYTES = 64, 64_000_000, 64_000_000
"""Of one prompt: images, their pixels, and the bytes of their files."""

MAX_SCANS = 100
"""Scans of a JPEG; each takes as long as the picture is large, however few its bytes are."""

_OTHERS = {
    "an SVG": rb"(?i)<svg", "a PDF": rb"^%PDF", "a video": rb"^....ftyp(?!heic|mif1|avif)",
}  # fmt: skip

_PIECE = 1 << 20
"""Characters of base64 that are decoded before other threads get their turn; a multiple of 4."""


@dataclass(frozen=True)
class GivenImage(ImageSource):
    """An image within the bounds of one.

    Attributes:
        num_pixels: of the picture.
        num_bytes: of its file; 0 without one.
    """

    num_pixels: int
    num_bytes: int


def image_source(given: object) -> GivenImage:
    """An image that is given as bytes of a file, as a path, as a PIL image, which is copied, or as
    a data: URL. Paths are not for strangers: see `image_of_url`.

    Raises:
        InvalidRequest: it is none of these, or no PNG, JPEG, WebP or GIF within the bounds.
        MissingDependency: Pillow is not installed.
    """
    pil = _pillow()
    match given:
        case bytes() | bytearray() | memoryview():
            return _of_file(bytes(given))
        case str() if given[:5].lower() == "data:":
            return image_of_url(given)
        case str() if given[:8].lower().startswith(("http://", "https://")):
            raise InvalidRequest("an image at a URL is not fetched: give the file's bytes")
        case str() | Path():
            return _of_file(_read(Path(given)))
        case pil.Image():
            return _of_picture(given)
    kind = type(given).__name__
    raise InvalidRequest(f"an image is a file's bytes or path, or a PIL image, not {kind}")


def image_of_url(url: str) -> GivenImage:
    """The image in a data: URL; raises as `image_source` does."""
    _pillow()
    head, _, text = url.partition(",")
    if not (head[:5].lower() == "data:" and head[-7:].lower() == ";base64"):
        raise InvalidRequest("an image's URL is data:image/png;base64, with base64 behind it")
    if len(text) > 4 * (MAX_BYTES // 3 + 1):
        raise _too_large()
    try:
        if 0 <= text.find("=") < len(text) - 2:  # which ends a piece, too
            raise ValueError
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        file = b"".join(b64decode(piece, validate=True) for piece in pieces)
    except ValueError:
        raise InvalidRequest("what follows base64, in an image's data: URL is no base64") from None
    return _of_file(file)


def check_total(images: Sequence[ImageSource]) -> None:
    """Refuse a prompt with these images if they are too large altogether."""
    given = [image for image in images if isinstance(image, GivenImage)]
    for count, most, unit in (
        (sum(image.num_pixels for image in given), MAX_ALL_PIXELS, "million pixels"),
        (sum(image.num_bytes for image in given), MAX_ALL_BYTES, "MB"),
    ):
        if count > most:
            raise InvalidRequest(f"a prompt has at most {most // 10**6} {unit} of images")


def check_number(count: int) -> None:
    """Refuse a prompt of so many images."""
    if count > MAX_IMAGES:
        raise InvalidRequest(f"a prompt has at most {MAX_IMAGES} images, not {count}")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        reason = "images need Pillow: in a checkout, pip install '.[images]'"
        raise MissingDependency(reason) from None
    return Image


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"an image's file has at most {MAX_BYTES // 10**6} MB")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequest(f"cannot read the image {path}: {reason}") from None


def _of_file(file: bytes) -> GivenImage:
    if len(file) > MAX_BYTES:
        raise _too_large()
    with _opened(file) as picture:  # which reads the header alone
        num_pixels = _check_size(*picture.size)
    return GivenImage(sha256(file).digest(), lambda: _decode(file), num_pixels, len(file))


def _of_picture(picture: PILImage) -> GivenImage:
    num_pixels = _check_size(*picture.size)
    try:
        copy = _in_rgb(picture)
    except Exception as error:  # it may lie in a file, which is read only now
        raise InvalidRequest(
            f"the image does not convert to RGB: {first_sentence(error)}"
        ) from None
    size = np.asarray(copy.size, "<u4").tobytes()
    return GivenImage(digest_of(b"RGB", size, copy.tobytes()), lambda: copy, num_pixels, 0)


def _check_size(width: int, height: int) -> int:
    """The number of pixels."""
    if not 0 < width * height <= MAX_PIXELS:
        most = MAX_PIXELS // 10**6
        raise InvalidRequest(f"an image has 1 to {most} million pixels, not {width} x {height}")
    return width * height


@contextmanager
def _opened(file: bytes) -> Iterator[PILImage]:
    """The picture, by no other decoder and without the warnings of `Image.open`; `InvalidRequest`
    for whatever is raised while it is read."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    readers: dict[str, tuple[bytes, type[ImageFile]]] = {
        "PNG": (rb"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
        "JPEG": (rb"\xff\xd8\xff", JpegImagePlugin.JpegImageFile),
        "GIF": (rb"GIF8[79]a", GifImagePlugin.GifImageFile),
        "WebP": (rb"RIFF....WEBP", WebPImagePlugin.WebPImageFile),
    }
    name = next((n for n, (mark, _) in readers.items() if re.match(mark, file, re.DOTALL)), None)
    if name is None:
        other = next(
            (o for o, mark in _OTHERS.items() if re.search(mark, file[:1000])), "something else"
        )
        raise InvalidRequest(f"an image is a PNG, JPEG, WebP or GIF, and this is {other}")
    if name == "JPEG" and file.count(b"\xff\xda") > MAX_SCANS:
        raise InvalidRequest(f"a JPEG has at most {MAX_SCANS} scans here")
    try:
        with readers[name][1](BytesIO(file)) as picture:
            yield picture
    except InvalidRequest:
        raise
    except Exception as error:  # damaged files may raise anything
        raise InvalidRequest(f"the {name} is damaged: {first_sentence(error)}") from None


def _decode(file: bytes) -> PILImage:
    with _opened(file) as picture:
        return _in_rgb(picture)


def _in_rgb(picture: PILImage) -> PILImage:
    """A copy, turned as its EXIF says, on white where it is transparent."""
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)  # a copy
    if picture.mode.startswith("I;16"):
        grey = np.asarray(picture) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white
