"""Pictures as files of each format, and files that lie."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from io import BytesIO
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from radixcache.runtime.multimodal.image import Image as KnownImage
from radixcache.runtime.multimodal.image import ImageSource

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Random colours in fields of 5 x 5, so that no two rows or columns of fields are alike."""
    rng = np.random.default_rng(seed)
    fields = rng.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    return Image.fromarray(fields.repeat(5, 0).repeat(5, 1)[:height, :width])


def file_of(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(file).decode()}"


def png_of(width: int, height: int, rows: bytes, *headers: tuple[int, int]) -> bytes:
    """A PNG in grey whose header says a size that its `rows` need not have; more `headers` may
    follow."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    sizes = [struct.pack(">IIBBBBB", w, h, 8, 0, 0, 0, 0) for w, h in ((width, height), *headers)]
    head = b"".join(chunk(b"IHDR", size) for size in sizes)
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def undecoded() -> NoReturn:
    raise AssertionError("nobody looks at it")


def image(number: int, num_rows: int = 2) -> KnownImage:
    """An image of which nothing is known but its digest."""
    source = ImageSource(b"", undecoded)
    return KnownImage(source, number.to_bytes(32, "big"), "..", 0, num_rows)
