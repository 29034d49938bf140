"""Threads for work that would hold up the event loop; no client takes all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from radixcache.runtime.engine.input_processor import InputProcessor
from radixcache.runtime.multimodal.image import ImageSource
from radixcache.runtime.multimodal.image_input import (
    MAX_BYTES,
    GivenImage,
    check_number,
    check_total,
    image_of_url,
    image_source,
)
from radixcache.runtime.sampling.grammar_compiler import MAX_COMPILERS
from radixcache.runtime.sampling.structured_outputs import StructuredOutputsParams
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.http.fetch import fetch
from radixcache.runtime.tokens.history import TokenisedText
from radixcache.runtime.tokens.tokenizer import Message, Tokenizer
from radixcache.runtime.tokens.tool_calls import ParsedMessage, image_parts

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.multimodal.images import Images
    from radixcache.runtime.sampling.grammar import CompiledGrammar, GrammarBackend

T = TypeVar("T")

TOKENIZER_THREADS = 4
"""Clients whose texts are tokenised at the same time."""

IMAGE_THREADS, FETCH_SECONDS = 4, 10.0
"""Clients whose images are read at the same time; how long all URLs of a prompt may take."""

MAX_FETCHED = 256_000_000
"""Bytes of fetched images that all requests together hold; those within bodies have their bound."""

MAX_COMPILING = 32
"""Structures that are compiled or wait for it; half of them may be of one client."""


class _Pool:
    """Threads on which each client has one piece of work at a time."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def _run(self, client: Hashable, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        async with self._turns.setdefault(client, asyncio.Lock()):
            return await loop.run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class TokenizerPool(_Pool):
    """Tokenises texts and conversations."""

    def __init__(self, inputs: InputProcessor) -> None:
        super().__init__(TOKENIZER_THREADS, "tokenizer")
        self._inputs = inputs
        self._remembering: set[asyncio.Future[None]] = set()

    async def run(self, function: Callable[[Tokenizer], T], client: Hashable = None) -> T:
        """The result of `function`, which is given the model's tokenizer."""
        return await self._run(client, function, self._inputs.tokenizer)

    async def call(self, function: Callable[[], T], client: Hashable) -> T:
        """The result of `function`, which tokenises as much as it needs."""
        return await self._run(client, function)

    async def encode_chat(
        self, messages: list[Message], cache_salt: str | None, client: Hashable, **how: Any
    ) -> TokenisedText:
        """The prompt that asks for the answer to `messages`, with the tokens of earlier turns."""
        if self._remembering:
            await asyncio.wait([*self._remembering])
        turns = self._inputs.turns
        return await self._run(client, lambda: turns.encode(messages, cache_salt, **how))

    def remember(self, prompt: TokenisedText, generated: list[int], message: ParsedMessage) -> None:
        """Let conversations go on from an answer, before any other is tokenised."""
        loop, remember = asyncio.get_running_loop(), self._inputs.turns.remember
        done = loop.run_in_executor(self._threads, remember, prompt, generated, message)
        self._remembering.add(done)
        done.add_done_callback(self._remembering.discard)


class ImagePool(_Pool):
    """Reads the images of conversations: decodes base64, and fetches URLs.

    Args:
        domains: the hosts from which images are fetched.
        images: of the model, which may take none.
    """

    def __init__(self, domains: Iterable[str], images: Images) -> None:
        super().__init__(IMAGE_THREADS, "images")
        self._images = images
        self._domains = frozenset(domain.lower() for domain in domains)
        self._fetched, self._lock = WeakSet[GivenImage](), Lock()

    async def read(self, messages: list[Message], client: Hashable) -> list[Message]:
        """The messages with an `ImageSource` for each image's URL; `InvalidRequest` if one is
        unusable, or the images exceed a prompt's bounds."""
        check_number(count := len(image_parts(messages)))
        if not count:
            return messages
        self._images.prepare(())  # else a model that takes none refuses, before any is read
        return await self._run(client, self._read, messages)

    def _read(self, messages: list[Message]) -> list[Message]:
        deadline, images = time.monotonic() + FETCH_SECONDS, list[ImageSource]()

        def read(part: dict[str, Any]) -> dict[str, Any]:
            if not _is_url(part):
                return part
            url = part["image_url"]["url"]
            if url[:5].lower() == "data:":
                images.append(image_of_url(url))
            else:
                images.append(self._fetch(url, deadline))
            check_total(images)  # before more is read
            return {"type": "image", "image": images[-1]}

        return [
            {**message, "content": content if isinstance(content, str) else [*map(read, content)]}
            for message in messages
            for content in [message["content"]]
        ]

    def _fetch(self, url: str, deadline: float) -> GivenImage:
        image = image_source(fetch(url, self._domains, MAX_BYTES, deadline))
        with self._lock:
            self._fetched.add(image)
            num_bytes = sum(other.num_bytes for other in self._fetched)
        if num_bytes > MAX_FETCHED:
            raise ApiError(503, "too many images from URLs are being answered: try again")
        return image


def _is_url(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "image_url")


class GrammarPool(_Pool):
    """Compiles grammars."""

    def __init__(self, backend: GrammarBackend) -> None:
        super().__init__(MAX_COMPILERS, "compiler")
        self._backend = backend
        self._compiling: dict[Any, tuple[Hashable, asyncio.Future[CompiledGrammar]]] = {}
        """The client and the result of each structure that compiles or waits, by kind and value."""

    async def compile(
        self, structured: StructuredOutputsParams, client: Hashable
    ) -> CompiledGrammar:
        """The grammar of a structure, compiled if it is new; 503 if too many others wait."""
        if (found := self._backend.find(structured)) is not None:
            return found
        key = structured.kind, structured.value
        if key not in self._compiling:
            clients = [client for client, _ in self._compiling.values()]
            if len(clients) >= MAX_COMPILING or clients.count(client) >= MAX_COMPILING // 2:
                raise ApiError(503, "too many new structures are to be compiled: try again")
            compiling = self._run(client, self._backend.compile, structured)
            task = asyncio.ensure_future(compiling)
            self._compiling[key] = client, task
            task.add_done_callback(lambda _: self._compiling.pop(key))
        return await asyncio.shield(self._compiling[key][1])
