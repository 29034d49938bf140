"""Replicas in this process: the app and all of `Replica`, with a simulated Ray between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Scope

from radixcache import LLM
from radixcache.runtime.router.app import create_app
from radixcache.runtime.router.ingress import Gone, Ingress
from radixcache.runtime.router.members import MEMBERS
from radixcache.runtime.router.prompts import Prompts
from radixcache.runtime.router.replica import Description, Replica
from radixcache.runtime.server.app import create_app as create_replica
from radixcache.runtime.server.args import ServerArgs
from tests.runtime.server.live import empty


@dataclass
class Answer:
    """What a client has got."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    @property
    def replica(self) -> str:
        return self.headers["x-radixcache-replica"]

    def json(self) -> Any:
        return json.loads(self.body)


class _Replica(Replica):
    def __del__(self) -> None:  # type: ignore[override]
        """Nobody awaits it here."""


@dataclass
class World:
    """An ingress and its replicas.

    Attributes:
        calls: (replica, method, path) in their order.
        before: awaited before a call; may kill replicas.
    """

    options: ServerArgs
    ingress: Ingress = field(init=False)
    app: Any = field(init=False)
    replicas: dict[str, Replica] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    before: Callable[[str, Scope], Awaitable[None]] | None = None
    _ends: dict[str, asyncio.Event] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    # -- Ray's part ----------------------------------------------------------------------------

    async def start(self, name: str, llm: LLM) -> None:
        """A replica begins to run, and the ingress hears of it."""
        empty(llm)
        replica: Any = _Replica.__new__(_Replica)
        replica._name, replica._llm, replica._kv_dir = name, llm, None
        replica._app = create_replica(llm, self.options)
        await self._stack.enter_async_context(replica._app.router.lifespan_context(replica._app))
        self.replicas[name], self._ends[name] = replica, asyncio.Event()
        MEMBERS.change(MEMBERS.names | {name})

    def kill(self, name: str) -> None:
        """A replica dies; nobody is told but who waits for it, or asks it."""
        self._ends[name].set()

    async def describe(self, name: str) -> Description | None:
        if name not in self.replicas:
            return None
        await asyncio.sleep([*self.replicas].index(name) / 1000)
        if self._ends[name].is_set():
            raise Gone(name, has_died=True)
        return self.replicas[name].describe(name)

    async def answer(self, name: str, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
        self.calls.append((name, scope["method"], scope["path"]))
        if self.before is not None:
            await self.before(name, scope)
        stream: Any = self.replicas[name].answer(name, scope, body)
        end = asyncio.ensure_future(self._ends[name].wait())
        batch: asyncio.Future[Any] = end
        message: Message = {"type": ""}
        try:
            while True:
                batch = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait({end, batch}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    raise Gone(name, has_died=True)
                for message in (found := batch.result()) or ():
                    yield message
                if found is None:
                    break
        finally:
            end.cancel()
            batch.cancel()
            await asyncio.wait({batch})
            await stream.aclose()
        if message["type"] != "radixcache.end":
            raise Gone(name)

    # -- a client's ----------------------------------------------------------------------------

    async def ask(
        self,
        path: str,
        body: Any = b"",
        method: str = "POST",
        headers: Mapping[str, bytes] | None = None,
        *,
        heard: Callable[[Answer], None] | None = None,
        hang_up: asyncio.Event | None = None,
        is_half: bool = False,
    ) -> Answer:
        """An answer; `heard` is called at each part of it. `is_half` of a body, if so."""
        path, _, query = path.partition("?")
        given = {"host": b"localhost", "content-type": b"application/json", **(headers or {})}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": query.encode(), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
            "headers": [(name.encode(), value) for name, value in given.items()],
        }  # fmt: skip
        parts = [{"type": "http.request", "body": content, "more_body": is_half}]
        answer = Answer(0, {}, b"", False)

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await (hang_up or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                pairs = message["headers"]
                answer.headers = {name.decode(): value.decode() for name, value in pairs}
                return
            answer.body += message.get("body", b"")
            answer.is_whole = not message.get("more_body", False)
            if heard is not None:
                heard(answer)

        await self.app(scope, receive, send)
        return answer

    def check(self) -> None:
        """Nothing is booked, and the router's books agree."""
        self.ingress.router.check()
        for standing in self.ingress.router.standings([]):
            assert (standing.queued_tokens, standing.requests) == (0, 0), standing


@asynccontextmanager
async def world(llms: Mapping[str, LLM], **options: Any) -> AsyncIterator[World]:
    """An ingress in front of these models, each with an empty cache."""
    made = World(ServerArgs(**options))
    tokenizer = next(iter(llms.values())).tokenizer
    made.ingress = Ingress(made, made.options, Prompts(tokenizer))
    made.app = create_app(made.ingress)
    MEMBERS.change(frozenset())
    async with made._stack:
        for name, llm in llms.items():
            await made.start(name, llm)
        async with made.ingress.running():
            assert made.ingress.replicas.keys() == llms.keys()
            yield made
            made.check()
