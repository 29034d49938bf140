"""Reads what an image's file says of itself before anything of it is decoded."""

from __future__ import annotations

import struct
from struct import unpack_from
from typing import NamedTuple

from radixcache.errors import InvalidRequest

MAX_BLOCKS = 10_000
"""Blocks of a file that may stand before its size is said."""

MAX_SCANS = 100
"""Scans of a JPEG; each takes as long as the picture is large, however few its bytes are."""

_OTHERS: dict[str, tuple[int, tuple[bytes, ...]]] = {
    "a PDF": (0, (b"%PDF",)),
    "a BMP": (0, (b"BM",)),
    "a TIFF": (0, (b"II*\0", b"MM\0*")),
    "a HEIC or AVIF": (4, (b"ftyphei", b"ftypmif1", b"ftypavif")),
    "a video": (4, (b"ftyp",)),
    "a sound": (0, (b"ID3", b"OggS", b"fLaC", b"\xff\xfb")),
    "a video or a sound": (0, (b"RIFF", b"\x1aE\xdf\xa3")),
}
"""Where the marks of other formats stand, and what they are."""

_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers in a JPEG that its size follows."""


class Header(NamedTuple):
    """What an image's file is: "PNG", "JPEG", "GIF" or "WebP"."""

    format: str
    width: int
    height: int


def read_header(file: bytes) -> Header:
    """Format and size, by the content alone.

    Raises:
        InvalidRequest: it is no PNG, JPEG, WebP or GIF, or does not say its size.
    """
    if file.startswith(b"\x89PNG\r\n\x1a\n"):
        name, find = "PNG", _png
    elif file.startswith(b"\xff\xd8\xff"):
        name, find = "JPEG", _jpeg
    elif file.startswith((b"GIF87a", b"GIF89a")):
        name, find = "GIF", _gif
    elif file.startswith(b"RIFF") and file[8:12] == b"WEBP":
        name, find = "WebP", _webp
    else:
        raise InvalidRequest(f"an image is a PNG, JPEG, WebP or GIF, and this is {_name(file)}")
    try:
        size = find(file)
    except (struct.error, IndexError):
        size = None
    if size is None:
        raise InvalidRequest(f"the {name} is damaged: its header does not say its size")
    return Header(name, *size)


def _name(file: bytes) -> str:
    """What a file of another format is."""
    start = file[:1000].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<svg", b"<?xml", b"<!")) and b"<svg" in start:
        return "an SVG"
    found = (name for name, (at, marks) in _OTHERS.items() if file.startswith(marks, at))
    return next(found, "something else" if file else "empty")


def _png(file: bytes) -> tuple[int, int] | None:
    width, height = unpack_from(">II", file, 16)
    return (width, height) if file[12:16] == b"IHDR" else None


def _gif(file: bytes) -> tuple[int, int] | None:
    """The screen, with the first frame, which may be larger."""
    width, height, flags = unpack_from("<HHB", file, 6)
    at, in_extension = 13 + (flags >> 7) * (3 << (flags & 7) + 1), False
    for _ in range(MAX_BLOCKS):
        if in_extension:
            in_extension = file[at] > 0
            at += file[at] + 1
        elif file[at] == ord("!"):
            at, in_extension = at + 2, True
        elif file[at] == ord(","):
            left, top, w, h = unpack_from("<4H", file, at + 1)
            return max(width, left + w), max(height, top + h)
        else:
            break
    return None


def _webp(file: bytes) -> tuple[int, int] | None:
    match file[12:16]:
        case b"VP8 ":
            width, height = unpack_from("<HH", file, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = unpack_from("<I", file, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            low, high = unpack_from("<IH", file, 24)
            return (low & 0xFFFFFF) + 1, (low >> 24 | high << 8) + 1
    return None


def _jpeg(file: bytes) -> tuple[int, int] | None:
    if file.count(b"\xff\xda") > MAX_SCANS:
        raise InvalidRequest(f"a JPEG has at most {MAX_SCANS} scans here")
    at = 2
    for _ in range(MAX_BLOCKS):
        marker = file[at + 1]
        if file[at] != 0xFF:
            break
        if marker in _FRAMES:
            height, width = unpack_from(">HH", file, at + 5)
            return width, height
        if marker == 0xFF:
            at += 1  # a fill byte
        elif marker == 1 or 0xD0 <= marker <= 0xD9:
            at += 2
        else:
            at += 2 + unpack_from(">H", file, at + 2)[0]
    return None
