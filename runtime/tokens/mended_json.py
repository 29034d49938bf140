"""Repairs the JSON of small models as it comes."""

from __future__ import annotations

import json

from radixcache.runtime.tokens.tool_calls import MAX_DEPTH


class MendedJson:
    """Repairs one object: escapes control characters in strings, and adds missing brackets.

    Attributes:
        done: the object has ended.

    Args:
        mark: text that ends the object if it comes outside of a string; "" for none.
    """

    def __init__(self, mark: str = "") -> None:
        self.done = False
        self._mark = mark
        self._missing: list[str] = []
        """The closing brackets that are missing, the innermost last."""
        self._quoted = self._escaped = False

    def feed(self, text: str, ended: bool) -> tuple[str, int]:
        """The JSON of `text`, and how many characters were used; feed the rest again. If the text
        has `ended` outside of a string, the object is closed."""
        found, at = "", 0
        while at < len(text) and not self.done:
            sign = text[at]
            if self._quoted:
                found += self._within(sign)
            elif sign == "<" and self._mark and self._mark.startswith(text[at:][: len(self._mark)]):
                if len(text) - at < len(self._mark) and not ended:
                    return found, at
                return found + self._close(), at
            else:
                found += self._outside(sign)
            at += 1
        if ended and not self.done and not self._quoted:
            found += self._close()
        return found, at

    def _within(self, sign: str) -> str:
        escaped, self._escaped = self._escaped, sign == "\\" and not self._escaped
        self._quoted = sign != '"' or escaped
        if sign < " ":
            sign = json.dumps(sign)[1 + escaped : -1]
        return sign

    def _outside(self, sign: str) -> str:
        self._quoted = sign == '"'
        before = ""
        if sign in "{[":
            self._missing.append("}" if sign == "{" else "]")
        elif sign in "]}" and sign in self._missing[-MAX_DEPTH:]:  # deeper, none is read
            while (last := self._missing.pop()) != sign:
                before += last
            self.done = not self._missing
        return before + sign

    def _close(self) -> str:
        self.done = True
        return "".join(reversed(self._missing))
