"""`ServingContext`: the state that the routes of one app share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from radixcache.errors import InvalidRequest
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import RequestTracker
from radixcache.runtime.server.observe.metrics import Metrics
from radixcache.runtime.server.pools import GrammarPool, ImagePool, TokenizerPool
from radixcache.runtime.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.llm import LLM
    from radixcache.runtime.server.observe.tracing import Tracing


class ServingContext:
    """The model, its jobs and its threads.

    Attributes:
        names: under which the model is served.
        created: when, in seconds since 1970.
        tokenizing, images, grammars: threads, since large texts, images and schemas take a while.
        completion_defaults, chat_defaults: parameters of requests that do not say otherwise.
    """

    def __init__(self, llm: LLM, options: ServerArgs) -> None:
        self.llm = llm
        self.options = options
        self.names = list(options.served_model_name) or [llm.model_name]
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0])
        self.tracing: Tracing | None = None
        if options.traces:
            from radixcache.runtime.server.observe.tracing import Tracing

            self.tracing = Tracing(options.otlp_endpoint, self.names[0])
        slots, queue = llm.engine.scheduler.max_num_seqs, options.max_queued_requests
        capacity, share = slots + queue, slots + (queue + 1) // 2
        self.jobs = RequestTracker(llm.worker, self.metrics, self.tracing, capacity, share)
        self.tokenizing = TokenizerPool(llm.inputs)
        self.images = ImagePool(options.allowed_media_domains, llm.images)
        self.grammars = GrammarPool(llm.grammar_backend)
        self.max_model_len: int = llm.engine.max_model_len
        # A plain completion has OpenAI's 16 tokens if the model does not say, an answer no limit.
        limit = getattr(llm.engine.model.generation_config, "max_new_tokens", None)
        self.completion_defaults = replace(llm.default_params, **options.sampling)
        chat_defaults = replace(llm.default_params, max_tokens=limit)
        self.chat_defaults = replace(chat_defaults, **options.sampling)

    async def close(self) -> None:
        await self.jobs.close()
        self.tokenizing.close()
        self.images.close()
        self.grammars.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def check_model(self, name: str | None) -> str:
        """The name under which to answer; 404 for a model that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here, but {self.names[0]!r} is",
                "model",
                "model_not_found",
            )
        return name or self.names[0]

    @property
    def notes(self) -> list[str]:
        """Lines to print at the start: where layers run, how answers are sampled, whether there are
        chats, KV events."""
        sampling = self.completion_defaults.describe()
        notes = [*self.llm.notes, f"answers by {sampling}, where a request says nothing else"]
        try:
            self.tokenizer.chat_template()
        except InvalidRequest as reason:
            notes.append(str(reason))
        if (events := self.llm.kv_events) is not None:
            places = " and ".join(
                filter(None, ("" if events.connects else events.endpoint, events.replay_endpoint))
            )
            if events.connects:
                notes.append(f"KV events go to {events.endpoint}, where a subscriber must listen")
            if places:
                notes.append(f"KV events at {places}: whoever connects reads all tokens and salts")
        return notes

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `InvalidRequest` if it has none."""
        return self.llm.inputs.tokenizer


def client_of(request: Request, cache_salt: str | None = None) -> Hashable:
    """The client of a request, for fair shares: its salt, else its address."""
    if cache_salt is not None:
        return "salt", cache_salt
    return "address", request.client and request.client.host


def _context_of(request: Request) -> ServingContext:
    return cast(ServingContext, request.app.state.context)


ContextDep = Annotated[ServingContext, Depends(_context_of)]
"""The context of the app that a route belongs to."""
