"""Answers in parts, as /v1/responses and /v1/messages have them: reasoning, texts and calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers
from radixcache.runtime.server.api.exchange import JSON, B, Exchange
from radixcache.runtime.server.jobs import PromptDelta
from radixcache.runtime.server.serving import ServingContext
from radixcache.runtime.tokens.tool_calls import ParsedDelta, ParsedMessage


@dataclass
class Part:
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


def parts_of(message: ParsedMessage) -> list[Part]:
    parts = [Part("reasoning", message.reasoning), Part("content", message.content)]
    calls = [Part("call", call.arguments, call.name, call.id) for call in message.calls]
    return [part for part in parts if part.text] + calls


class BlockExchange(Exchange[B]):
    """A request and its answer in parts, of which the last may be open.

    `finish` makes the whole message; `begin`, `step` and `end` make the events of its stream.
    """

    def __init__(self, body: B, context: ServingContext, head: JSON, answers: Answers) -> None:
        super().__init__(body, context, head, answers.job)
        self.answers = answers
        self.parts: list[Part] = []
        self.is_cut = self._is_open = self._has_begun = False

    @abstractmethod
    def finish(self, output: RequestOutput) -> JSON:
        """The whole message; call it once."""

    @abstractmethod
    def begin(self, num_tokens: int) -> Iterator[JSON]:
        """The first events, of an answer that has `num_tokens` so far."""

    @abstractmethod
    def step(self, step: Step) -> Iterator[JSON]: ...
    @abstractmethod
    def end(self, whole: JSON) -> Iterator[JSON]: ...

    def whole(self, outputs: list[RequestOutput]) -> JSON:
        self.parts = parts_of(self.answers.read(outputs[0]).message(0))
        return self.finish(outputs[0])

    def events(self, news: PromptDelta) -> Iterator[JSON]:
        yield from self.begin_once(len(news.delta.token_ids))
        for step in self._add(self.answers.pieces(news.delta)):
            yield from self.step(step)

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        self.answers.remember(outputs[0])
        self.is_cut = outputs[0].outputs[0].finish_reason == "length"
        for step in self._close():
            yield from self.step(step)
        yield from self.end(self.finish(outputs[0]))

    def begin_once(self, num_tokens: int = 0) -> Iterator[JSON]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin(num_tokens)

    def _add(self, pieces: Iterable[ParsedDelta]) -> Iterator[Step]:
        for piece in pieces:
            kind = "call" if piece.kind == "arguments" else piece.kind
            if not self._is_open or kind != self.parts[-1].kind or piece.kind == "call":
                yield from self._close()
                name = piece.text if kind == "call" else ""
                self.parts.append(Part(kind, "", name, piece.call_id))
                self._is_open = True
                yield Step("open", len(self.parts) - 1, self.parts[-1])
            if piece.kind != "call" and piece.text:
                self.parts[-1].text += piece.text
                yield Step("more", len(self.parts) - 1, self.parts[-1], piece.text)

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("close", len(self.parts) - 1, self.parts[-1])
