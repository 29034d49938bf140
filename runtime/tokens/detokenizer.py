"""Turns tokens into text as they come, and finds stop strings in the text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import NamedTuple

from radixcache.runtime.tokens.stops import StopStrings
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.runtime.tokens.tool_formats import THINK, THOUGHT


class _Progress(NamedTuple):
    """How far the tokens are decoded; one object, so that it changes as a whole."""

    window: int = 0
    read: int = 0
    text: str = ""
    stopped_by: str | None = None
    stop_state: int = 0
    answer_start: float | None = None
    """The character at which the answer begins, after thoughts: infinity within them, None while
    the text may still open them."""


class Detokenizer:
    """The text of one completion.

    A token's text depends on its neighbours (spaces, bytes of one character), so new tokens are
    decoded after a short window, and the window alone; the difference is kept. Text that ends
    within a character waits for the rest. Without stop strings, tokens are decoded only when the
    text is read.

    Args:
        decode: token ids to text, special tokens skipped.
        stop_strings: the text ends before the first of them.
        min_tokens: stop strings that end within so many tokens are ignored.
        include_stop: the text ends after the stop string.
        opening: the mark with which the prompt opened thoughts; stop strings count after them.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop_strings: StopStrings,
        min_tokens: int = 0,
        include_stop: bool = False,
        opening: str = "",
    ) -> None:
        self._decode = decode
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._progress = _Progress(answer_start=inf if opening else None)
        self._emitted = 0
        self._unreadable = False

    @property
    def text(self) -> str:
        """The text so far, up to a stop string."""
        return self._progress.text

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._progress.stopped_by

    def append(self, token: int, index: int) -> None:
        """Add the token at `index`, and look for a stop string (`stopped_by`).

        Idempotent, so that a call that failed can be repeated.
        """
        self._ids[index:] = [token]
        if self._stop_strings or self._unreadable:
            self._catch_up()

    def finish(self) -> None:
        """Decode the rest after the last token, even if it ends within a character."""
        if self.stopped_by is None:
            self._catch_up(to_the_end=True)

    def _catch_up(self, *, to_the_end: bool = False) -> None:
        """Decode new tokens, up to the last whole character or to the end."""
        self._unreadable = True  # if `decode` raises
        window, read, before, stopped_by, state, answer = self._progress
        known = self._decode(self._ids[window:read])
        new = self._decode(self._ids[window:])
        self._unreadable = False
        if to_the_end or (len(new) > len(known) and not new.endswith("\ufffd")):
            text, start = before + new[len(known) :], len(before)
            if answer is None or answer == inf:
                answer = _find_answer(text, answer, to_the_end)
                start = int(answer) if answer is not None and answer < inf else len(text)
            state, hit = self._stop_strings.read(state, text[start:])
            if hit is not None and len(self._ids) > self._min_tokens:
                at, stopped_by = hit
                end = at + len(stopped_by) if self._include_stop else at
                text = text[: start + end]
            self._progress = _Progress(read, len(self._ids), text, stopped_by, state, answer)

    @property
    def shown(self) -> str:
        """The text that `take` has returned so far."""
        return self.text[: self._emitted]

    def take(self, finished: bool) -> str:
        """The text since the last call, without a tail that may begin a stop string.

        If `decode` raises, there is no more text, and the next `append` or `finish` raises.
        """
        if (
            self._progress.read < len(self._ids)
            and self.stopped_by is None
            and not self._unreadable
        ):
            with suppress(Exception):
                self._catch_up()
        end = len(self.text)
        if not finished and self.stopped_by is None:
            undecided = self._stop_strings and self._progress.answer_start is None
            end = 0 if undecided else end - self._stop_strings.held_back(self._progress.stop_state)
        new, self._emitted = self.text[self._emitted : end], max(end, self._emitted)
        return new


class TextOffsets:
    """Finds where tokens begin in their text; the tokens of one character all begin where it does.

    Args:
        start: characters of text before the tokens.
        shown: special tokens are part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, start: int, shown: bool) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self._end, self._at_start = start, True
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> int:
        """The character at which the next token begins."""
        start = self._end
        if self._shown or token not in self._tokenizer.hidden:
            new = self._tokenizer.token_bytes(token)
            if self._at_start and new[:1] == b" ":  # some tokenizers leave out a text's first space
                new = new[not self._tokenizer.decode([token]).startswith(" ") :]
            self._at_start = False
            self._end += len(self._decoder.decode(new))
        return start


def _find_answer(text: str, answer: float | None, ended: bool) -> float | None:
    """Where the answer begins in a text; `answer` is the result so far, see `_Progress`."""
    if answer is None:
        begun = text.lstrip()
        if not begun.startswith(THINK):
            return None if THINK.startswith(begun) and not ended else 0
    at = text.find(THOUGHT)
    rest = text[at + len(THOUGHT) :].lstrip() if at >= 0 else ""
    return len(text) - len(rest) if rest else inf
