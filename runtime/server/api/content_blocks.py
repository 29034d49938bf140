"""Answers that consist of parts: reasoning, texts and calls, in the order in which they came.

Those of /v1/responses and /v1/messages do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from fastapi import Request

from radixcache.runtime.engine.outputs import RequestOutput
from radixcache.runtime.server.api.chat_turn import Answers
from radixcache.runtime.server.api.generation import JSON, EventStream, extension
from radixcache.runtime.server.api.response_store import (
    Change,
    ResponseStore,
    StoredResponse,
    compare,
)
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import PromptDelta
from radixcache.runtime.server.serving import Backend
from radixcache.runtime.tokens.tool_calls import ParsedDelta, ParsedMessage

B = TypeVar("B")


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


class Parts:
    """The parts of one message, which pieces are added to; at most the last one is open."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open = False

    @classmethod
    def of(cls, said: ParsedMessage) -> Parts:
        whole = cls()
        if said.reasoning:
            whole.parts.append(Part("reasoning", said.reasoning))
        if said.content:
            whole.parts.append(Part("content", said.content))
        whole.parts += [Part("call", call.arguments, call.name, call.id) for call in said.calls]
        return whole

    def add(self, pieces: Iterable[ParsedDelta]) -> Iterator[Step]:
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
        if self._open:
            self._open = False
            yield Step("close", len(self.parts) - 1, self.parts[-1])

    @property
    def has_calls(self) -> bool:
        return any(part.kind == "call" for part in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")


class Exchange(ABC, Generic[B]):
    """One request and the message that answers it, as a whole or in events."""

    def __init__(
        self, body: B, backend: Backend, store: ResponseStore, head: JSON, answers: Answers
    ) -> None:
        self.body = body
        self.backend = backend
        self.store = store
        self.head = head
        self.answers = answers
        self.parts = Parts()
        self._has_begun = False

    async def answer(self, request: Request) -> Any:
        """The response to the client: events if the turn is a stream, else what `finish` gives."""
        if self.answers.turn.stream:
            job = self.answers.job
            return EventStream(job, self._events_of, self._last_events, self.fail, end="")
        output = await self.answers.whole(request)
        self.parts = Parts.of(self.answers.said(0))
        return self.finish(output)

    @abstractmethod
    def finish(self, output: RequestOutput) -> JSON:
        """The whole message; to be called once."""

    @abstractmethod
    def begin(self, num_tokens: int) -> Iterator[JSON]:
        """The events before any other, of an answer that has so many tokens."""

    @abstractmethod
    def step(self, step: Step) -> Iterator[JSON]:
        """The events of a step."""

    @abstractmethod
    def end(self, whole: JSON) -> Iterator[JSON]:
        """The events at the end of the message that `finish` gave."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterator[JSON]:
        """The events in place of an end."""

    def extension(self) -> JSON:
        return extension(self.backend, self.answers.job, self.answers.turn)

    def compare(self, past: StoredResponse, cached: int) -> tuple[Change, int]:
        prompt, granularity = self.answers.prompt.tokens, self.backend.llm.cache.granularity
        return compare(past, self.answers.turn, prompt, cached, granularity)

    def begin_once(self, num_tokens: int = 0) -> Iterator[JSON]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin(num_tokens)

    def _events_of(self, news: PromptDelta) -> Iterator[JSON]:
        yield from self.begin_once(len(news.delta.token_ids))
        for step in self.parts.add(self.answers.pieces(news.delta)):
            yield from self.step(step)

    def _last_events(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        self.answers.remember(outputs[0])
        for step in self.parts.close():
            yield from self.step(step)
        yield from self.end(self.finish(outputs[0]))
