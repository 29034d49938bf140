"""Finds the tokens that end an answer, in three places of a GGUF file.

A file's `eos_token_id` is often the base model's, which a chat model never generates: its answers
would run on through the next turns.
"""

from __future__ import annotations

import logging
from typing import Any

from radixcache.runtime.checkpoints.chat_template import render
from radixcache.runtime.checkpoints.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_KNOWN = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<|end_of_turn|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>",
    "<|call|>", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "[EOS]", "<|EOT|>", "<eom>",
    "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>",
})  # fmt: skip
"""Texts of control tokens that always mean an end."""

_log = logging.getLogger("radixcache")


def end_tokens(file: GGUFFile) -> list[int]:
    """The tokens that the file names eos, eot or eom, whose texts are known ends, or that its chat
    template writes after an assistant's message."""
    named = (file.get(f"tokenizer.ggml.{key}_token_id", int, -1) for key in ("eos", "eot", "eom"))
    found = list(dict.fromkeys(token for token in named if token >= 0))
    if not {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"} <= file.metadata.keys():
        return found
    tokens = file.array("tokenizer.ggml.tokens", str)
    types = file.array("tokenizer.ggml.token_type", int)
    ids = {
        text: token
        for token, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and text
    }
    ends = [token for text, token in ids.items() if text in _KNOWN and types[token] == _CONTROL]
    behind = _behind_an_answer(file, tokens)
    ends += [ids[max(starts, key=len)]] if (starts := [*filter(behind.startswith, ids)]) else []
    if added := [token for token in dict.fromkeys(ends) if token not in found]:
        texts = ", ".join(tokens[token] for token in added)
        _log.info("answers end with %s, too, which the GGUF file does not name as an end", texts)
    return found + added


def _behind_an_answer(file: GGUFFile, tokens: list[str]) -> str:
    """The text that the chat template writes after an assistant's message; "" if unknown."""
    if not isinstance(template := file.metadata.get("tokenizer.chat_template"), str):
        return ""
    special: dict[str, Any] = {}
    for name in ("bos", "eos"):
        token = file.get(f"tokenizer.ggml.{name}_token_id", int, -1)
        special[f"{name}_token"] = tokens[token] if 0 <= token < len(tokens) else ""
    said = "What the assistant says."
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    try:
        rendered = render(template, messages, values=special)
    except Exception:  # a template may raise anything; requests report it
        return ""
    _, found, behind = rendered.rpartition(said)
    return behind.lstrip() if found else ""
