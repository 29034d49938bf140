"""One replica: the app of `radixcache serve`, called within the process, not by HTTP."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Message, Scope

from radixcache.errors import EngineStopped
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.router.scaling import LOAD, QUEUED_TOKENS
from radixcache.runtime.server.args import ServerArgs
from radixcache.tokens import Tokens

if TYPE_CHECKING:  # imports torch
    from radixcache.runtime.server.jobs import Job

POLL_SECONDS = 0.05
"""How late the router may learn that a prompt is computed, if its answer is not streamed."""

HEARTBEAT = 5.0
"""Seconds after which a replica without a message to send sends an empty batch."""

STARTED = "radixcache.started"
"""A message among the app's: the prompt is computed."""

END = "radixcache.end"
"""The last message; its `computed` is a list of `Computed` that are cached now."""


Computed = tuple[Tokens, Hashable, list[Tokens]]
"""A prompt, its salt, and its answers."""


@dataclass(frozen=True)
class Description:
    """The facts about a replica that the ingress needs.

    Attributes:
        kv_tokens, lower_tokens: tokens that fit its KV memory, and the tier below.
        max_context: tokens that the model takes.
        max_num_seqs: sequences that run at the same time.
        placement: where the model's layers run.
        node: name of the machine on which it is process `pid`.
        kv_dir: its folder there, if it has one.
    """

    replica: str
    kv_tokens: int
    lower_tokens: int
    max_context: int
    max_num_seqs: int
    placement: str
    node: str
    pid: int
    kv_dir: str | None


class Replica:
    """A deployment class of Ray Serve.

    Args:
        key: keys the names of salts, the same in all replicas.
    """

    async def __init__(self, engine: EngineArgs, options: ServerArgs, key: bytes) -> None:  # type: ignore[misc]
        from ray import serve

        from radixcache import LLM
        from radixcache.runtime.server.admin import cache
        from radixcache.runtime.server.app import create_app

        cache.share_key(key)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        if engine.kv_dir is not None:
            from radixcache.runtime.kv_offload.files import free_folder

            engine = replace(engine, kv_dir=free_folder(Path(engine.kv_dir)))
        self._kv_dir = engine.kv_dir
        self._llm = LLM(**vars(engine))
        self._app = create_app(self._llm, options)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        """Called by Serve once no request runs, or the time for that is over."""
        await self._lifespan.__aexit__(None, None, None)
        await asyncio.to_thread(self._llm.close)  # which writes what is cached to its kv_dir

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if not self._llm.worker.alive:
            raise EngineStopped("the engine has stopped")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: how many replicas its work would keep busy, for `scaling.py`."""
        scheduler = self._llm.engine.scheduler
        queued = sum(len(sequence.tokens) for sequence in [*scheduler.waiting])
        running = len(scheduler.running) / scheduler.max_num_seqs
        return {LOAD: running + queued / QUEUED_TOKENS}

    def _takes_requests(self) -> bool:
        """Whether a refusal is about the request, not this replica."""
        return self._llm.worker.alive and not self._app.state.context.jobs.draining

    def describe(self, name: str) -> Description | None:
        """Its description; None if another replica was meant, or the engine has stopped."""
        if name != self._name or not self._llm.worker.alive:
            return None
        cache, model = self._llm.cache, self._llm.engine.model
        tiers = () if cache.lower is None else cache.lower.chain()
        return Description(
            replica=self._name,
            kv_tokens=cache.pool.num_pages * cache.page_size,
            lower_tokens=sum(tier.num_slots * tier.page_size for tier in tiers),
            max_context=model.max_context,
            max_num_seqs=self._llm.engine.scheduler.max_num_seqs,
            placement=model.placement,
            node=platform.node(),
            pid=os.getpid(),
            kv_dir=None if self._kv_dir is None else str(Path(self._kv_dir).absolute()),
        )

    async def answer(self, name: str, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """The app's messages, in batches as they come; an empty one each `HEARTBEAT` seconds.

        There are none for another replica's name, or if the engine has stopped; another replica is
        asked then. A caller that stops listening aborts the request, like a client that hangs up.
        """
        if name != self._name:
            return
        jobs: list[Job] = []
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return parts.pop() if parts else await asyncio.Future()

        app = self._app({**scope, "radixcache.jobs": jobs}, receive, messages.put)
        task = asyncio.ensure_future(app)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        has_started, last = False, time.monotonic()
        try:
            while True:
                batch: list[Message | None] = []
                with suppress(asyncio.TimeoutError):
                    wait = HEARTBEAT if has_started else POLL_SECONDS
                    batch.append(await asyncio.wait_for(messages.get(), wait))
                while not messages.empty():
                    batch.append(messages.get_nowait())
                refused = batch and batch[0] is not None and batch[0].get("status") == 503
                if refused and not self._takes_requests():
                    return
                if jobs and not has_started and all(_is_computed(job) for job in jobs):
                    has_started = True
                    batch.insert(0, {"type": STARTED})
                if batch and batch[-1] is None:
                    yield [*filter(None, batch), {"type": END, "computed": _computed(jobs)}]
                    return
                if batch or time.monotonic() - last >= HEARTBEAT:
                    yield [*filter(None, batch)]
                    last = time.monotonic()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _is_computed(job: Job) -> bool:
    return bool(job.requests) and all(request.ttft is not None for request in job.requests)


def _computed(jobs: list[Job]) -> list[Computed]:
    requests = [request for job in jobs for request in job.requests if request.ttft is not None]
    return [
        (r.prompt_token_ids, r.namespace, [sequence.generated.copy() for sequence in r.sequences])
        for r in requests
    ]
