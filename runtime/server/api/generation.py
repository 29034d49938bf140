"""Sends answers, for all APIs: as a whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from radixcache.runtime.explanation import Loaded, Miss
from radixcache.runtime.outputs import Delta, RequestOutput, find_repetition
from radixcache.runtime.server.http.errors import ApiError, as_api_error
from radixcache.runtime.server.jobs import Job, Prefilled, PromptDelta
from radixcache.runtime.server.protocol.openai import GenerationRequest
from radixcache.runtime.server.protocol.turn import Turn
from radixcache.runtime.server.serving import ServingContext

log = logging.getLogger(__name__)

JSON = dict[str, Any]

SILENCE = 10.0
"""Seconds after which a silent stream gives a sign of life, since proxies give up on it."""


class MayStream(Protocol):
    stream: bool | None


B = TypeVar("B", bound=MayStream)
R = TypeVar("R", bound=GenerationRequest)

STREAM_RESPONSE: dict[int | str, JSON] = {200: {"content": {"text/event-stream": {}}}}
"""Tells the OpenAPI document that a route may also stream."""


async def finish(job: Job, request: Request) -> list[RequestOutput]:
    """The outputs of a job; it is aborted if the client hangs up."""

    async def watch() -> None:
        await wait_for_disconnect(request.receive)
        job.end(ApiError(499, "the client has hung up"))

    watcher = asyncio.create_task(watch())
    try:
        return await job.finished()
    finally:
        watcher.cancel()
        job.end()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client hangs up; its request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Exchange(ABC, Generic[B]):
    """One request and its answer, in the format of an API.

    Attributes:
        head: the first fields of the answer, or of each chunk.
        end_mark: the text that ends a stream.
    """

    end_mark = ""

    def __init__(self, body: B, context: ServingContext, head: JSON, job: Job) -> None:
        self.body = body
        self.context = context
        self.head = head
        self.job = job

    async def answer(self, request: Request, left_out: Sequence[str] = ()) -> Response:
        """The response to the client, which may abort the job by hanging up.

        Args:
            left_out: kinds of tools that the model was not told of; a header names them.
        """
        if self.body.stream:
            response: Response = _EventStream(self)
        else:
            whole = self.whole(await finish(self.job, request))
            await self.settle()
            response = JSONResponse(whole)
        if left_out:
            response.headers["X-Tools-Left-Out"] = ", ".join(left_out)
        return response

    async def settle(self) -> None:
        """Wait for work that must be done before the client sees the end."""

    @abstractmethod
    def whole(self, outputs: list[RequestOutput]) -> JSON:
        """The answer that is not streamed."""

    @abstractmethod
    def events(self, news: Any) -> Iterator[JSON]:
        """The events for a delta, or for the prompts' progress."""

    @abstractmethod
    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        """The events of the end, before the end mark."""

    def fail(self, error: ApiError) -> Iterator[JSON]:
        """The events of an error, in place of `last`."""
        yield error.body

    def usage(self, outputs: Sequence[RequestOutput]) -> JSON:
        """The counts of tokens, in OpenAI's names."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        written = (prompt - cached) * self.context.llm.cache.caches
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        }

    def extension(self, wants: Turn | GenerationRequest) -> JSON:
        """The engine's facts about a finished job that OpenAI has no field for.

        ttft: seconds from the request's arrival to its first token.
        loaded_tokens: cached tokens that came up from a tier below the KV memory.
        drafted_tokens, accepted_tokens: tokens computed before they were drawn, and those of them
            that were drawn.
        explanation: what was loaded and what missed, prompt by prompt, if the request asks for it.
        repetitions: for each answer, how many tokens its end repeats over and over, or null; null
            as a whole if no answer does.
        """
        requests, explanation = self.job.requests, None
        if wants.explain:
            parts: list[Loaded | Miss] = []
            for request in requests:
                parts += [*request.sequences[0].loaded, *(request.explanation or ())]
            explanation = describe_misses(self.context, parts, wants.prefix)
        sequences = [sequence for request in requests for sequence in request.sequences]
        repetitions = [find_repetition(sequence.generated) for sequence in sequences]
        return {
            "ttft": requests[0].ttft,
            "loaded_tokens": sum(request.sequences[0].num_loaded for request in requests),
            "drafted_tokens": sum(s.num_drafted.total() for s in sequences),
            "accepted_tokens": sum(s.num_accepted.total() for s in sequences),
            "explanation": explanation,
            "repetitions": repetitions if any(repetitions) else None,
        }

    def sign_of_life(self) -> str:
        """The text that keeps a silent stream alive: a comment, which clients skip."""
        return ": still at work\n\n"

    async def stream(self) -> AsyncIterator[str]:
        """The text of the events."""
        try:
            sent = time.monotonic()
            async for batch in self.job.batches(SILENCE):
                text = "".join(event(chunk) for news in batch for chunk in self.events(news))
                if text or time.monotonic() - sent >= SILENCE:
                    sent = time.monotonic()
                    yield text or self.sign_of_life()
            last = "".join(map(event, self.last(self.job.outputs())))
            await self.settle()
            yield last
        except Exception as error:  # the status is sent already
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
            yield "".join(map(event, self.fail(as_api_error(error))))
        yield self.end_mark


class _EventStream(StreamingResponse):
    def __init__(self, exchange: Exchange[Any]) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(exchange.stream(), media_type="text/event-stream", headers=headers)
        self._job = exchange.job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.end()


def head_of(body: GenerationRequest, context: ServingContext, prefix: str, kind: str) -> JSON:
    """The first fields of a chat or a plain completion."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": context.check_model(body.model),
    }


class Chunks(Exchange[R]):
    """A chat or a plain completion, whose chunks have choices."""

    end_mark = "data: [DONE]\n\n"
    chunk_kind = "text_completion"

    def __init__(self, body: R, context: ServingContext, head: JSON, job: Job) -> None:
        super().__init__(body, context, head, job)
        self._usage: JSON = {"usage": None} if body.include_usage else {}
        self._completed = 0
        if body.include_progress:
            context.jobs.worker.follow(job)

    @abstractmethod
    def of(self, prompt: int, delta: Delta) -> Iterator[JSON]:
        """The chunks of a delta for the prompt with this index."""

    def chunk(self, *choices: JSON, **more: JSON) -> JSON:
        head = {**self.head, "object": self.chunk_kind}
        return {**head, "choices": choices, **self._usage, **more}

    def events(self, news: PromptDelta | Prefilled) -> Iterator[JSON]:
        if isinstance(news, PromptDelta):
            self._completed += len(news.delta.token_ids)
            options, completed = self.body.stream_options, self._completed
            if self._usage and options and options.continuous_usage_stats:
                prompt = self._num_prompt_tokens()
                counts = {"prompt_tokens": prompt, "completion_tokens": completed}
                self._usage["usage"] = {**counts, "total_tokens": prompt + completed}
            yield from self.of(*news)
        else:
            share = {"prompt_tokens": self._num_prompt_tokens(), "computed_tokens": news.tokens}
            yield self.chunk(radixcache=share)

    def _num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.job.requests)

    def last(self, outputs: list[RequestOutput]) -> Iterator[JSON]:
        """A chunk without choices, if the request asks for more than text."""
        more: JSON = {}
        if self.body.include_usage:
            more["usage"] = self.usage(outputs)
        if more or self.body.explain:
            more["radixcache"] = self.extension(self.body)
            yield self.chunk(**more)

    def token_name(self, token: int) -> str:
        """A token's name in logprobs: its text; its bytes, as in OpenAI's API, if they are no text;
        or its id if the request asks for that."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        data = self.context.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)

    def prompt_logprobs(self, output: RequestOutput) -> list[JSON | None] | None:
        """The log-probabilities of the prompt's tokens as vLLM has them, if they are asked for."""
        if self.body.prompt_logprobs is None:
            return None

        def describe(top: dict[int, float]) -> JSON:
            likeliest = sorted(top, key=lambda token: -top[token])[: self.body.prompt_logprobs]
            ranks = {token: rank for rank, token in enumerate(likeliest, 1)}
            return {
                str(token): {
                    "logprob": clamp(logprob),
                    "rank": ranks.get(token),
                    "decoded_token": text_of(token),
                }
                for token, logprob in top.items()
            }

        text_of = self.context.tokenizer.token_text
        return [None if top is None else describe(top) for top in output.prompt_logprobs or []]


def event(chunk: JSON) -> str:
    """One event; a type is repeated on a line of its own, as Anthropic's and Responses want it."""
    data = f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return f"event: {chunk['type']}\n{data}" if "type" in chunk else data


def describe_misses(
    context: ServingContext, misses: Sequence[Loaded | Miss], prefix: str | None
) -> list[JSON]:
    """Loads and misses as an answer shows them, for a client that named this prefix."""
    tokenizer = context.llm.tokenizer
    if context.options.hide_texts:
        misses = [miss.redacted(before=prefix is not None) for miss in misses]
    show = tokenizer.show if tokenizer else None
    return [
        {"reason": m.reason, "start": m.start, "end": m.end, "text": m.describe(show)}
        for m in misses
    ]


def clamp(logprob: float) -> float:
    """A log-probability without infinity, which JSON lacks."""
    return max(logprob, -9999.0)
