"""One request and its answer, whole or as server-sent events, for all APIs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from radixcache.errors import PinError
from radixcache.runtime.engine.named_prefixes import NamedPrefix
from radixcache.runtime.outputs import RequestOutput
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.server.http.errors import ApiError, as_api_error
from radixcache.runtime.server.jobs import Job
from radixcache.runtime.server.serving import ServingContext
from radixcache.runtime.tokens.history import TokenisedText
from radixcache.tokens import TokensLike

log = logging.getLogger(__name__)

JSON = dict[str, Any]

SILENCE = 10.0
"""Seconds after which a silent stream gives a heartbeat, since proxies give up on it."""


class MayStream(Protocol):
    stream: bool | None


B = TypeVar("B", bound=MayStream)

STREAM_RESPONSE: dict[int | str, JSON] = {200: {"content": {"text/event-stream": {}}}}
"""Tells the OpenAPI document that a route may also stream."""


async def find_prefix(context: ServingContext, name: str, cache_salt: str | None) -> NamedPrefix:
    """The salt's prefix of that name; 404 if there is none."""
    try:
        return await context.jobs.call(lambda: context.llm.prefixes.find(name, cache_salt))
    except PinError as error:
        raise ApiError(404, str(error), "prefix") from None


async def submit(
    context: ServingContext,
    prompts: Sequence[TokensLike | TokenisedText],
    params: SamplingParams,
    client: Hashable,
    cache_salt: str | None,
    stream: bool,
) -> Job:
    """Queue prompts; their reader must end the job."""
    if params.stop_strings:
        _ = context.tokenizer  # refuses
    structured = params.structured_outputs
    grammar = structured and await context.grammars.compile(structured, client)
    inputs = [context.llm.inputs.encode_one(prompt, params) for prompt in prompts]
    job = await context.jobs.submit(
        lambda: context.llm.add(inputs, cache_salt, client=client),
        len(prompts) * params.n,
        client=client,
        stream=stream,
        timeout=context.options.request_timeout,
    )
    del grammar  # held until here, so that the engine's thread finds it compiled
    return job


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
        form = self.job.requests[0].params.structured_outputs
        for name, parts in (("Tools", left_out), ("Schema", form.left_open if form else ())):
            if parts:
                response.headers[f"X-{name}-Left-Out"] = ", ".join(parts)
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

    def heartbeat(self) -> str:
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
                    yield text or self.heartbeat()
            last = [*self.last(self.job.outputs())]
            await self.settle()  # which may change the last events
            yield "".join(map(event, last))
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


def event(chunk: JSON) -> str:
    """One event; a type is repeated on a line of its own, as Anthropic's and Responses want it."""
    data = f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return f"event: {chunk['type']}\n{data}" if "type" in chunk else data
