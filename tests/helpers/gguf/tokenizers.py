"""Metadata of GGUF files with small tokenizers."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = "abcdehlorst\u2581T.12"

WORDS = "th he the _the er her other _other at cat _cat cats __ ___ ll ab ba aba".replace(
    "_", "\u2581"
)


def metadata_of(rows: list[tuple[str, int]], **keys: Any) -> dict[str, Any]:
    """The metadata of a vocabulary of (token, type); None takes a key away."""
    tokens, types = map(list, zip(*rows, strict=True))
    keys = {"tokens": tokens, "token_type": types, **keys}
    told = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": "llama", **told}


def byte_level_metadata(backend: Backend, *tokens: str, **keys: Any) -> dict[str, Any]:
    """Of a byte-level BPE, with `tokens`, three added ones that are no text and one that is."""
    model = json.loads(backend.to_str())["model"]
    vocabulary = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *tokens]
    rows = [(token, NORMAL) for token in vocabulary]
    rows += [(token, CONTROL) for token in ("<|im_start|>", "<|im_end|>", "<｜pad｜>")]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    size = len(vocabulary)
    special = {"bos_token_id": size, "eos_token_id": size + 1, "padding_token_id": size + 2}
    keys = {"model": "gpt2", "pre": "gpt-2", "merges": merges, **special, **keys}
    return metadata_of([*rows, ("<think>", USER_DEFINED)], **keys)


def sentencepiece_metadata(**keys: Any) -> dict[str, Any]:
    bytes_of = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    rows = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *bytes_of]
    words = [(token, NORMAL) for token in [*WORDS.split(" "), *LETTERS]]
    scores = [*[0.0] * len(rows), *(-float(rank) for rank in range(len(words))), -1000.0]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    keys = {"model": "llama", "scores": scores, **special, **keys}
    return metadata_of([*rows, *words, ("[INST]", USER_DEFINED)], **keys)
