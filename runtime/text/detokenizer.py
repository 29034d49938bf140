"""Turns tokens into text as they come, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress


class Detokenizer:
    """The text of one completion.

    A token's text depends on its neighbours (spaces, bytes of one character), so what is new is
    decoded with a short window before it, and the window without it; the difference is kept. Text
    that ends inside a character waits for the rest. Without stop strings nothing is decoded before
    somebody asks for the text.

    Args:
        decode: token ids to text, special tokens skipped.
        stop_strings: the text ends before the first of them.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: list[str]) -> None:
        self._decode = decode
        self._stop_strings = stop_strings
        self._ids: list[int] = []
        self._window = 0
        self._read = 0
        self._emitted = 0
        self._unreadable = False
        self.text = ""
        self.stopped_by: str | None = None

    def append(self, token: int) -> None:
        """Add a token; sets `stopped_by` when the text now holds a stop string."""
        self._ids.append(token)
        if self._stop_strings or self._unreadable:
            self._catch_up()

    def finish(self) -> None:
        """The last token has come: text that waited for more is taken as it is."""
        if self.stopped_by is None:
            self._catch_up(to_the_end=True)

    def _catch_up(self, *, to_the_end: bool = False) -> None:
        """Decode what is new, up to the last whole character or to the end."""
        self._unreadable = True  # if `decode` raises
        known = self._decode(self._ids[self._window : self._read])
        text = self._decode(self._ids[self._window :])
        self._unreadable = False
        if to_the_end or (len(text) > len(known) and not text.endswith("\ufffd")):
            self._window, self._read = self._read, len(self._ids)
            self._add(text[len(known) :])

    def _add(self, text: str) -> None:
        old = len(self.text)
        self.text += text
        hits = []
        for stop in self._stop_strings:
            at = self.text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0:
                hits.append((at, stop))
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self.text[:at]

    @property
    def shown(self) -> str:
        """The text that `take` has given so far."""
        return self.text[: self._emitted]

    def take(self, finished: bool) -> str:
        """The text since the last call, less a tail that may be the start of a stop string.

        Where `decode` raises, there is no more text; the next `append` or `finish` raises then.
        """
        if self._read < len(self._ids) and self.stopped_by is None and not self._unreadable:
            with suppress(Exception):
                self._catch_up()
        end = len(self.text)
        if not finished:
            end -= self._held_back()
        new, self._emitted = self.text[self._emitted : end], max(end, self._emitted)
        return new

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop_strings:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
