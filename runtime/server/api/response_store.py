"""Keeps finished responses, so that clients can go on from one."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import Depends, Request

from radixcache.errors import Busy
from radixcache.runtime.kv_offload.notes import RESPONSE, ResponseNote
from radixcache.runtime.tokens.tokenizer import Message

if TYPE_CHECKING:  # imports xxhash and sqlite3
    from radixcache.runtime.kv_offload.disk import DiskStore

_OBJECTS = 4096
"""Bytes, about, that a response takes besides its texts."""


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """A finished response.

    Attributes:
        conversation: the messages and the answer, without instructions that only this turn had.
        response: the answer's body, and its `input`.
    """

    conversation: list[Message]
    response: dict[str, Any]
    cache_salt: str | None = None


class ResponseStore:
    """The last responses, by salt and id; a request finds only those of its own salt.

    If they take too many bytes, the salt that has most loses its oldest response.

    Args:
        disk: also keeps the responses without a salt.
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
        """Remember a response under an id that cannot be guessed. O(its text).

        Returns:
            A future that is done once the response is on disk; None if it stays in memory. It has
            failed for a response that has no room even alone.
        """
        text, saved = json.dumps(ResponseNote(entry.conversation, entry.response)), None
        if len(text) + _OBJECTS > self.max_bytes:  # its images stand in messages and in items
            failed: Future[object] = Future()
            failed.set_exception(Busy("a response of so many bytes is not kept"))
            return failed
        if self._disk is not None and entry.cache_salt is None:
            saved = self._disk.note(f"{RESPONSE}{name}", text)
        self._put(name, entry, text)
        return saved

    def _put(self, name: str, entry: StoredResponse, text: str) -> None:
        salt = entry.cache_salt
        size = len(salt or "") + len(text) + _OBJECTS
        self._stored[salt][name] = entry, size
        self._num_bytes[salt] += size
        while self.num_bytes > self.max_bytes:
            ((most, _),) = self._num_bytes.most_common(1)
            self.erase(oldest := next(iter(self._stored[most])), most)
            self.drop(oldest, most)

    def find(self, name: str, salt: str | None) -> StoredResponse | None:
        """The salt's response with this id, if it is remembered."""
        kept = self._stored[salt].get(name) if salt in self._stored else None
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
            entry = StoredResponse(*ResponseNote(*json.loads(note)))
            self._put(name.removeprefix(RESPONSE), entry, note)

    def erase(self, name: str, salt: str | None) -> Future[object] | None:
        """Forget a response on disk; `drop` it once this is done. None without a disk."""
        return self._disk.drop_note(f"{RESPONSE}{name}") if self._disk and salt is None else None

    def drop(self, name: str, salt: str | None) -> None:
        """Forget a response in memory."""
        _, size = self._stored[salt].pop(name)
        self._num_bytes[salt] -= size
        if not self._stored[salt]:
            del self._stored[salt], self._num_bytes[salt]


def _store_of(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.responses)


StoreDep = Annotated[ResponseStore, Depends(_store_of)]
"""The store of the app that a route belongs to."""
