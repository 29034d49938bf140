"""The parts of an answer, in the order in which they were written: reasoning, texts, calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from radixcache.runtime.server.api.chat_turn import Reply
from radixcache.runtime.tokens.tool_calls import ParsedDelta


@dataclass
class Part:
    """Reasoning, text, or a call of a function, whose `text` is its arguments."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    name: str = ""
    call_id: str = ""


class Step(NamedTuple):
    """A part begins, gains `text`, or ends."""

    kind: Literal["open", "more", "close"]
    place: int
    part: Part
    text: str = ""


class Parts:
    """The parts of one message, which pieces are added to; at most the last one is open."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open = False

    @classmethod
    def of(cls, reply: Reply) -> Parts:
        """Those of a message that is there as a whole."""
        whole = cls()
        for kind, text in (("reasoning", reply.reasoning), ("content", reply.content)):
            if text:
                whole.parts.append(Part(kind, text))  # type: ignore[arg-type]
        whole.parts += [Part("call", call.arguments, call.name, call.id) for call in reply.calls]
        return whole

    def add(self, pieces: Iterable[ParsedDelta]) -> Iterator[Step]:
        """What changes by these pieces."""
        for piece in pieces:
            kind = "call" if piece.kind == "arguments" else piece.kind
            if not self._open or kind != self.parts[-1].kind or piece.kind == "call":
                yield from self.close()
                name = piece.text if kind == "call" else ""
                self.parts.append(Part(kind, "", name, piece.call_id))
                self._open = True
                yield Step("open", len(self.parts) - 1, self.parts[-1])
            if piece.kind != "call" and piece.text:
                self.parts[-1].text += piece.text
                yield Step("more", len(self.parts) - 1, self.parts[-1], piece.text)

    def close(self) -> Iterator[Step]:
        """No more pieces come, or another part begins."""
        if self._open:
            self._open = False
            yield Step("close", len(self.parts) - 1, self.parts[-1])

    @property
    def has_calls(self) -> bool:
        """Whether a function is called."""
        return any(part.kind == "call" for part in self.parts)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(part.text for part in self.parts if part.kind == "reasoning")
