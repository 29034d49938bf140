"""Keeps finished turns, so that clients can go on from one or learn what has changed since."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from fastapi import Depends, Request

from radixcache.base import Tokens
from radixcache.nodes import common_length
from radixcache.runtime.kv_offload.notes import RESPONSE, ResponseNote
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.protocol.responses import split_system
from radixcache.runtime.server.protocol.turn import Turn
from radixcache.runtime.tokens.tokenizer import Message
from radixcache.runtime.tokens.tool_calls import Tool

if TYPE_CHECKING:  # imports xxhash and sqlite3
    from radixcache.runtime.kv_offload.disk import DiskStore

Change = Literal["tools", "settings", "system", "messages", "nothing", "unknown"]

_OBJECTS = 4096
"""Bytes, about, that a turn takes besides its texts."""


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """A finished turn.

    Attributes:
        prompt: [n] token ids.
        conversation: the messages and the answer, without instructions that only this turn had.
        response: the answer's body, if the client may ask for it again.
    """

    turn: Turn
    prompt: Tokens
    conversation: list[Message] = field(default_factory=list)
    response: dict[str, Any] | None = None


class ResponseStore:
    """The last turns, by salt and id; a request finds only turns of its own salt.

    If they take too many bytes, the salt that has most loses its oldest turn.

    Args:
        disk: also keeps the responses without a salt that clients may ask for again.
    """

    def __init__(self, max_bytes: int = 64 << 20, disk: DiskStore | None = None) -> None:
        self.max_bytes, self._disk = max_bytes, disk
        self._stored: defaultdict[str | None, OrderedDict[str, tuple[StoredResponse, int]]]
        self._stored = defaultdict(OrderedDict)
        self._num_bytes: Counter[str | None] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def keep(self, name: str, entry: StoredResponse) -> Future[object] | None:
        """Remember a turn under an id that cannot be guessed. O(its text).

        Returns:
            A future that is done once the turn is on disk; None if it stays in memory.
        """
        text, saved = _spell(entry), None
        if self._disk is not None and entry.turn.cache_salt is None and entry.response is not None:
            saved = self._disk.note(f"{RESPONSE}{name}", text)
        self._put(name, entry, text)
        return saved

    def _put(self, name: str, entry: StoredResponse, text: str) -> None:
        salt = entry.turn.cache_salt
        size = entry.prompt.nbytes + len(salt or "") + len(text) + _OBJECTS
        self._stored[salt][name] = entry, size
        self._num_bytes[salt] += size
        while self.num_bytes > self.max_bytes:
            ((most, _),) = self._num_bytes.most_common(1)
            self.drop(next(iter(self._stored[most])), most)

    def find(self, name: str | None, salt: str | None) -> StoredResponse | None:
        """The salt's turn with this id, if it is remembered."""
        kept = self._stored[salt].get(name or "") if salt in self._stored else None
        return kept and kept[0]

    def load(self) -> None:
        """Take in the responses on disk, unless it takes no more notes: what is deleted then would
        come back."""
        if self._disk is None:
            return
        self._disk.note("serving", str(now := time.time()))
        notes = self._disk.notes()
        for name, note in notes.items() if notes.get("serving") == str(now) else ():
            if not name.startswith(RESPONSE):
                continue
            kept = ResponseNote(*json.loads(note))
            tools = tuple(Tool(**tool) for tool in kept.tools)
            turn = Turn(
                kept.messages, SamplingParams(), tools, template_kwargs=kept.template_kwargs
            )
            tokens = np.array(kept.prompt, np.int32)
            entry = StoredResponse(turn, tokens, kept.conversation, kept.response)
            self._put(name.removeprefix(RESPONSE), entry, note)

    def drop(self, name: str, salt: str | None) -> Future[object] | None:
        """Forget a turn; the future is done once the disk has forgotten it, None if it was not
        there."""
        gone = None
        if self._disk is not None and salt is None:
            gone = self._disk.drop_note(f"{RESPONSE}{name}")
        _, size = self._stored[salt].pop(name)
        self._num_bytes[salt] -= size
        if not self._stored[salt]:
            del self._stored[salt], self._num_bytes[salt]
        return gone


def _spell(entry: StoredResponse) -> str:
    """The entry's `ResponseNote`."""
    turn, prompt = entry.turn, entry.prompt.tolist()
    tools, settings = [vars(tool) for tool in turn.tools], {**turn.template_kwargs}
    return json.dumps(
        ResponseNote(turn.messages, tools, settings, prompt, entry.conversation, entry.response)
    )


def _store_of(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.responses)


StoreDep = Annotated[ResponseStore, Depends(_store_of)]
"""The store of the app that a route belongs to."""


def compare(
    earlier: StoredResponse, turn: Turn, prompt: Tokens, cached: int, granularity: int
) -> tuple[Change, int]:
    """Find what a client changed since an earlier turn, so that less of its prompt was cached.

    "nothing": the earlier prompt was cached, as far as this one goes on from it.
    "unknown": the client's changes are not the reason; see the explanation.

    Args:
        cached: leading tokens of `prompt` that were cached.
        granularity: the cache hits in multiples of this.

    Returns:
        The change, and how many leading tokens of the earlier prompt could be reused.
    """
    length = min(len(earlier.prompt), len(prompt))
    shared = common_length(earlier.prompt[:length], prompt[:length])
    change = _change(earlier.turn, turn) if shared < len(earlier.prompt) else None
    reused = min(max(shared, cached), len(earlier.prompt))
    # The last token of a prompt is always computed.
    if cached >= (length if change else shared) - max(1, granularity):
        return "nothing", reused
    return change or "unknown", reused


def _change(old: Turn, new: Turn) -> Change | None:
    before, now = split_system(old.messages), split_system(new.messages)
    if old.tools != new.tools:
        return "tools"
    if old.template_kwargs != new.template_kwargs:
        return "settings"
    if before[0] != now[0]:
        return "system"
    return None if now[1][: len(before[1])] == before[1] else "messages"
