"""Keeps conversations over a restart, so that they go on with the same tokens.

When an engine is closed, the tokens of texts, turns with tool calls, and named prefixes become
notes of the disk store. Those with a `cache_salt` are left out, as is their KV. A process that is
killed leaves its KV pages but not these notes: a text that the model spelled otherwise than its
tokenizer would is then tokenised and computed anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from radixcache.errors import RadixCacheError
from radixcache.runtime.kv_offload.notes import (
    PREFIXES,
    TEXTS,
    PrefixNote,
    TextNote,
    TextsNote,
    read_prefixes,
    read_texts,
)
from radixcache.runtime.tokens.conversation import Conversations
from radixcache.runtime.tokens.history import TokenisedText
from radixcache.runtime.tokens.tool_calls import Call, ParsedMessage

if TYPE_CHECKING:  # imports xxhash and sqlite3
    from radixcache.runtime.kv_offload.disk import DiskStore

_log = logging.getLogger("radixcache")


def save(store: DiskStore, turns: Conversations | None, prefixes: Iterable[PrefixNote]) -> None:
    """Write the notes for the next process."""
    store.note(PREFIXES, json.dumps([*prefixes]))
    if turns is not None:
        texts = [
            TextNote(text.text, text.tokens.tolist(), text.cuts.tolist(), text.num_generated)
            for text in turns.history.texts()
        ]
        store.note(TEXTS, json.dumps(TextsNote(_digest(turns), texts, turns.kept())))


def restore(store: DiskStore, turns: Conversations | None, pin: Callable[..., object]) -> None:
    """Read the notes of the last process.

    Args:
        pin: `LLM.pin_prefix`, which also takes `messages`.
    """
    notes = store.notes()
    known = read_texts(notes)
    if turns is not None and known.tokenizer and known.tokenizer == _digest(turns):
        for text, tokens, cuts, num_generated in known.texts:
            ids, places = np.array(tokens, np.int32), np.array(cuts, np.int64).reshape(-1, 2)
            turns.history.add(TokenisedText(text, ids, places, num_generated))
        for raw, (content, reasoning, calls) in known.turns:
            message = ParsedMessage(content, reasoning, tuple(Call(*call) for call in calls))
            turns.keep(message, raw)
    for prefix in read_prefixes(notes):
        left = None if prefix.expires is None else prefix.expires - time.time()
        if left is None or left > 0:
            try:
                pin(prefix.name, prefix.tokens, lifetime=left, messages=prefix.messages)
            except RadixCacheError as error:
                _log.warning("the prefix %r is not pinned again: %s", prefix.name, error)


def _digest(turns: Conversations) -> str:
    """Names the tokenizer: with another one, texts have other tokens."""
    serialised = turns.history.tokenizer.serialised
    return "" if serialised is None else blake2b(serialised.encode()).hexdigest()
