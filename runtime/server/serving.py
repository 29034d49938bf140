"""What the routes share: the model, its tokenizer and the jobs that it is given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from radixcache.base import TokensLike
from radixcache.errors import PinError
from radixcache.runtime.engine.input_processor import EngineInput
from radixcache.runtime.engine.named_prefixes import NamedPrefix
from radixcache.runtime.sampling.grammar_compiler import MAX_COMPILERS
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.jobs import Job, RequestTracker
from radixcache.runtime.server.observe.metrics import Metrics
from radixcache.runtime.server.protocol.openai import GenerationRequest
from radixcache.runtime.server.protocol.tools import ChatMessage
from radixcache.runtime.tokens.history import TokenisedText
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer
from radixcache.runtime.tokens.tool_calls import ParsedMessage

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.llm import LLM
    from radixcache.runtime.sampling.grammar import CompiledGrammar
    from radixcache.runtime.server.observe.tracing import Tracing

T = TypeVar("T")

TOKENIZER_THREADS = 4
"""Clients whose texts are tokenised at the same time."""

MAX_COMPILING = 32
"""Structures that are compiled or wait for it; half of them may be of one client."""


class Backend:
    """The model behind the routes of one app."""

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
        self.max_model_len: int = llm.engine.max_model_len
        # A plain completion has OpenAI's 16 tokens if the model does not say, an answer no limit.
        limit = getattr(llm.engine.model.generation_config, "max_new_tokens", None)
        self.completion_defaults = replace(llm.default_params, **options.sampling)
        chat_defaults = replace(llm.default_params, max_tokens=limit)
        self.chat_defaults = replace(chat_defaults, **options.sampling)
        # Not on the event loop, because a long text takes a while; nor one client on all threads.
        self._tokenizing = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")
        self._compiling = ThreadPoolExecutor(MAX_COMPILERS, "compiler")
        self._grammars: dict[tuple[str, str], tuple[Hashable, asyncio.Future[CompiledGrammar]]] = {}
        """What is compiled or waits for it, and for whom, by kind and value."""
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._remembering: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        await self.jobs.close()
        for pool in (self._tokenizing, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)
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
        """For whoever starts the server: whose layers run where, and who may listen."""
        sampling = self.completion_defaults.describe()
        notes = [*self.llm.notes, f"answers by {sampling}, where a request says nothing else"]
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
    def caches(self) -> bool:
        """Whether what is computed stays for others."""
        return self.llm.cache.caches

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; 400 if it has none."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: only token ids can be completed")
        return self.llm.tokenizer

    async def tokenize(self, function: Callable[[Tokenizer], T], client: Hashable = None) -> T:
        """What `function` makes of the tokenizer, on a thread; one after the other of a client."""
        return await self._in_turn(client, self._tokenizing, function, self.tokenizer)

    async def _in_turn(
        self, key: Hashable, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any
    ) -> T:
        """What `function` gives, on a thread; one after the other of a key."""
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(key, asyncio.Lock()):
            return await loop.run_in_executor(pool, function, *args)

    def token_text(self, token: int) -> str:
        """The text of one token, as logprobs show it."""
        return self.tokenizer.token_bytes(token).decode(errors="replace")

    def token_name(self, token: int, body: GenerationRequest) -> str:
        """What logprobs call a token: its text or, as in OpenAI's API, the bytes that are none; or
        its id if that was asked for."""
        if body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        try:
            return self.tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in self.tokenizer.token_bytes(token))

    async def encode_chat(
        self, messages: list[Message], cache_salt: str | None, client: Hashable, **how: Any
    ) -> TokenisedText:
        """The prompt that asks for the answer to `messages`, in tokens as stable as can be."""
        if self._remembering:
            await asyncio.wait([*self._remembering])
        return await self.tokenize(
            lambda _: self.llm.turns.encode(messages, cache_salt, **how), client
        )

    def remember(self, prompt: TokenisedText, generated: list[int], message: ParsedMessage) -> None:
        """Let conversations go on from an answer, before any other is tokenised."""
        loop, remember = asyncio.get_running_loop(), self.llm.turns.remember
        done = loop.run_in_executor(self._tokenizing, remember, prompt, generated, message)
        self._remembering.add(done)
        done.add_done_callback(self._remembering.discard)

    async def find_prefix(self, name: str, cache_salt: str | None) -> NamedPrefix:
        """The salt's prefix of that name; 404 if there is none."""
        try:
            return await self.jobs.call(lambda: self.llm.prefixes.find(name, cache_salt))
        except PinError as error:
            raise ApiError(404, str(error), "prefix") from None

    async def submit(
        self,
        prompts: Sequence[TokensLike],
        params: SamplingParams,
        client: Hashable,
        cache_salt: str | None,
        stream: bool,
    ) -> Job:
        """Queue prompts."""
        if params.stop_strings:
            _ = self.tokenizer  # refuses
        grammar = params.structured_outputs and await self.compile(
            params.structured_outputs, client
        )
        inputs = [EngineInput(None, tokens, params) for tokens in prompts]
        job = await self.jobs.submit(
            lambda: self.llm.add(inputs, cache_salt, client=client),
            len(prompts) * params.n,
            client=client,
            stream=stream,
            timeout=self.options.request_timeout,
        )
        del grammar  # held until here, the engine's thread had not to compile it
        return job

    async def compile(
        self, structured: StructuredOutputsParams, client: Hashable
    ) -> CompiledGrammar:
        """The grammar of a structure, compiled on a thread if it is new; one by one of a client."""
        grammar_backend, key = self.llm.grammar_backend, (structured.kind, structured.value)
        if (found := grammar_backend.find(structured)) is not None:
            return found
        if key not in self._grammars:
            clients = [client for client, _ in self._grammars.values()]
            if len(clients) >= MAX_COMPILING or clients.count(client) >= MAX_COMPILING // 2:
                raise ApiError(503, "too many new structures are to be compiled: try again")
            compiling = self._in_turn(
                ("grammar", client), self._compiling, grammar_backend.compile, structured
            )
            task = asyncio.ensure_future(compiling)
            self._grammars[key] = client, task
            task.add_done_callback(lambda _: self._grammars.pop(key))
        return await asyncio.shield(self._grammars[key][1])


def client_of(request: Request, cache_salt: str | None = None) -> Hashable:
    """Whose request it is when clients share the server: its salt's, else its address's."""
    if cache_salt is not None:
        return "salt", cache_salt
    return "address", request.client and request.client.host


def plain_messages(messages: list[ChatMessage]) -> list[Message]:
    return [message.plain() for message in messages]


def backend_of(request: Request) -> Backend:
    return cast(Backend, request.app.state.backend)


BackendDep = Annotated[Backend, Depends(backend_of)]
"""The backend of the app that a route belongs to."""
