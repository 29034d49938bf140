"""Finds stop strings in text that comes piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An automaton (Aho and Corasick, 1975): a character costs the same for any number and length
    of stop strings. O(characters of all strings) to make.

    A state is the longest end of the text that begins some stop string; 0 is the empty one.

    Args:
        strings: none empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[tuple[str, ...]] = [()]
        """The stop strings that end each state's text, longest first."""
        for string in strings:
            state = 0
            for character in string:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(())
                state = self._next[state][character]
            self._found[state] = (string,)
        self._shorter = [0] * len(self._next)
        """The state of the longest proper end of each state's text."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, longer in self._next[state].items():
                self._shorter[longer] = self._step(self._shorter[state], character)
                self._found[longer] += self._found[self._shorter[longer]]
                states.append(longer)

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state] and state:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def read(self, state: int, text: str) -> tuple[int, tuple[int, str] | None]:
        """The state after `text`, and the stop string that begins first, with its place.

        The place counts from the start of `text`, and may be negative. Of strings that begin at the
        same place, the least is returned. O(len(text)).
        """
        first: tuple[int, str] | None = None
        if not self:
            return 0, first
        for end, character in enumerate(text, start=1):
            state = self._step(state, character)
            for string in self._found[state]:
                hit = (end - len(string), string)
                first = hit if first is None else min(first, hit)
        return state, first

    def held_back(self, state: int) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return self._depth[state]
