"""How tokenizers of the tokenizers library spell the bytes of their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PLAIN}))
}
"""How tokenizers spell bytes since GPT-2: bytes that are not printable as Latin-1 from 256 on."""


def spelling_of(backend: Any) -> Callable[[str], bytes] | None:
    """The bytes of a token by its name; None if the decoder is neither byte-level nor has a byte
    fallback, so that they do not follow from it alone."""
    found = (
        {"type": None} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    )
    steps = found.get("decoders", [found])
    kinds = {step["type"] for step in steps}
    if "ByteFallback" in kinds:
        replaced = [step for step in steps if step["type"] == "Replace"]
        spaces = [one["pattern"].get("String") for one in replaced if one["content"] == " "]
        return partial(_character_bytes, spaces[0] or " " if spaces else " ")
    return _byte_level_bytes if "ByteLevel" in kinds else None


def without_prefix(backend: Any, added: list[Any]) -> Any:
    """A copy of a tokenizer, with the same vocabulary, that puts no space before a text.

    Args:
        added: its added tokens, by their ids.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    parts = (backend.normalizer, backend.pre_tokenizer)
    steps = [None if part is None else json.loads(part.__getstate__()) for part in parts]
    plain = [_without_prefix(step) for step in steps]
    if plain == steps:
        return backend
    empty = json.loads(Backend(BPE()).to_str())
    empty |= {"normalizer": plain[0], "pre_tokenizer": plain[1]}
    twin = Backend.from_str(json.dumps(empty))
    twin.model = backend.model
    twin.add_tokens(added)
    return twin


def _character_bytes(space: str, name: str) -> bytes:
    """The bytes of a SentencePiece token, which writes a space as `space`."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
    return bytes.fromhex(byte[1]) if byte else name.replace(space, " ").encode()


def _byte_level_bytes(name: str) -> bytes:
    """The bytes of a byte-level token."""
    try:
        return bytes([_BYTES[character] for character in name])
    except KeyError:  # an added token
        return name.encode()


def _without_prefix(step: Any) -> Any:
    """A normaliser or pre-tokenizer, as JSON, that puts no space before a text; None is none."""
    if not isinstance(step, dict) or step["type"] == "Prepend":
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    changed = {key: value for key, value in never.items() if key in step}
    for key in step.keys() & {"normalizers", "pretokenizers"}:
        parts = map(_without_prefix, step[key])
        changed[key] = [part for part in parts if part is not None]
    return step | changed
