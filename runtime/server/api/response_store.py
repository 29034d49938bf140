"""What clients asked before: to go on from it, and to say what has changed since."""

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
"""Bytes, about, that a turn takes however short its texts are."""


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """A turn that is over.

    Attributes:
        prompt: [n] its tokens.
        conversation: its messages but for instructions that only it had, and the answer.
        response: what the client was given, if it may ask for it again.
    """

    turn: Turn
    prompt: Tokens
    conversation: list[Message] = field(default_factory=list)
    response: dict[str, Any] | None = None


class ResponseStore:
    """The last turns, by salt and id: nobody finds those of another salt.

    If there are too many, the oldest of the salt that has most is forgotten first.

    Args:
        disk: where those without a salt are, too, that clients may ask for again.
    """

    def __init__(self, max_bytes: int = 64 << 20, disk: DiskStore | None = None) -> None:
        self.max_bytes, self._disk = max_bytes, disk
        self._stored: defaultdict[str | None, OrderedDict[str, tuple[StoredResponse, int]]]
        self._stored = defaultdict(OrderedDict)
        self._num_bytes: Counter[str | None] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def keep(
        self, name: str, entry: StoredResponse, *, is_saved: bool = False
    ) -> Future[object] | None:
        """Remember a turn under an id that cannot be guessed. O(its text).

        Args:
            is_saved: it came from the disk.

        Returns:
            What is done once it is on disk; None if it does not get there.
        """
        salt, text = entry.turn.cache_salt, _spell(entry)
        size = entry.prompt.nbytes + len(salt or "") + len(text) + _OBJECTS
        self._stored[salt][name] = entry, size
        self._num_bytes[salt] += size
        saved = None if is_saved else self._save(name, entry, text)
        while self.num_bytes > self.max_bytes:
            ((most, _),) = self._num_bytes.most_common(1)
            self.drop(next(iter(self._stored[most])), most)
        return saved

    def find(self, name: str | None, salt: str | None) -> StoredResponse | None:
        """The salt's turn with this id, if it is remembered."""
        kept = self._stored[salt].get(name or "") if salt in self._stored else None
        return kept and kept[0]

    def load(self) -> None:
        """Take in what the disk has from before; nothing if it takes no more, as what is deleted
        now would be found again."""
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
            self.keep(name.removeprefix(RESPONSE), entry, is_saved=True)

    def _save(self, name: str, entry: StoredResponse, text: str) -> Future[object] | None:
        if self._disk is not None and entry.turn.cache_salt is None and entry.response is not None:
            return self._disk.note(f"{RESPONSE}{name}", text)
        return None

    def drop(self, name: str, salt: str | None) -> Future[object] | None:
        """Forget it; what is returned is done once it is gone from the disk, None if it was never
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
"""The turns that the app of a route remembers."""


def compare(
    earlier: StoredResponse, turn: Turn, prompt: Tokens, cached: int, granularity: int
) -> tuple[Change, int]:
    """What a client changed since an earlier turn, so that less of its prompt was cached.

    "nothing": all of the earlier prompt was cached, or as far as this one goes on from it.
    "unknown": it is not for the client's changes that it was not; see the explanation.

    Args:
        cached: leading tokens of `prompt` that were, in a cache that hits in multiples of
            `granularity`.

    Returns:
        The change, and how many leading tokens of the earlier prompt were of use.
    """
    length = min(len(earlier.prompt), len(prompt))
    shared = common_length(earlier.prompt[:length], prompt[:length])
    change = _change(earlier.turn, turn) if shared < len(earlier.prompt) else None
    reused = min(max(shared, cached), len(earlier.prompt))
    # The last token of a prompt is computed in any case.
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
