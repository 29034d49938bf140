"""Reads files of requests: text, packed or not, and the JSON records in it.

Every complaint names the file and the line, or the record, that is malformed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from radixcache.errors import InvalidRequest


def name_of(path: Path) -> str:
    """A file's name for a report, without characters that cannot be shown."""
    return "".join(char if char.isprintable() else "\ufffd" for char in path.name)


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it is called .gz."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest(f"cannot read {path}: it is not UTF-8 text") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise InvalidRequest(f"cannot read {path}: it is no whole gzip file") from None
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None


def read_records(path: Path, limit: int | None = None) -> Iterator[tuple[str, Any]]:
    """Each record's place and content, from lines of JSON or from one document.

    A document is an array of records, or one record, however many lines it takes.
    """
    text = read_text(path)
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    document = is_json(text) and (len(lines) > 1 or text.lstrip()[0] == "[")
    if document or (lines and lines[0][1].strip() in ("[", "{", "[{")):
        whole = parse(str(path), text)
        records = whole if isinstance(whole, list) else [whole]
        yield from ((f"{path}: record {n}", record) for n, record in enumerate(records[:limit]))
        return
    for number, line in islice(lines, limit):
        yield f"{path}:{number}", parse(f"{path}:{number}", line)


def is_json(text: str) -> bool:
    """Whether it is an array or an object, as a whole."""
    try:
        return isinstance(json.loads(text), list | dict)
    except (RecursionError, ValueError):
        return False


def parse(where: str, text: str) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from None  # says line and column
    except (RecursionError, ValueError):
        raise InvalidRequest(f"{where}: JSON that is too deep, or has too long a number") from None
