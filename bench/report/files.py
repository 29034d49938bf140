"""Writes files, and checks beforehand that they can be written."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from radixcache.errors import InvalidRequest, MissingDependency

NEEDED = "needs vl-convert: pip install '.[bench]' in a checkout"


def write(path: Path, content: str) -> None:
    """Write a file. Raises InvalidRequest if it cannot be written."""
    try:
        path.write_bytes(content.encode(errors="replace"))  # a file's name need not be text
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None


def check_page(path: Path) -> None:
    """Refuse a page that could not be written or drawn, before anything is measured."""
    if path.suffix != ".html":
        raise InvalidRequest(f"a report ends in .html, not {path.name!r}")
    if find_spec("vl_convert") is None:
        raise MissingDependency(f"a report {NEEDED}")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raises InvalidRequest where nothing could be written, and leaves the place as it is."""
    reason = None
    if path.is_dir():
        reason = "Is a directory"
    elif not path.parent.is_dir():
        reason = "No such file or directory"
    elif not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        reason = "Permission denied"
    if reason is not None:
        raise InvalidRequest(f"cannot write {path}: {reason}")
