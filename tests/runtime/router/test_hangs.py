"""Replicas that hang: they say so by saying nothing, and hold up only what waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Scope

from radixcache import LLM
from radixcache.runtime.router import replica as replica_module
from radixcache.runtime.router.replica import END
from tests.runtime.router.simulated_ray import world as make_world

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_replica_without_a_word_to_say_shows_that_it_lives(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "HEARTBEAT", 0.06)
    replica: Any = replica_module.Replica.__new__(replica_module.Replica)
    monkeypatch.setattr(replica_module.Replica, "__del__", lambda self: None)

    async def think(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0.4)
        await send({"type": "http.response.body", "body": b"b"})

    replica._name, replica._app = "a", think
    batches = [batch async for batch in replica.answer("a", {}, b"")]
    assert batches.count([]) >= 3 and batches[-1][-1]["type"] == END
    spoken = [message["body"] for batch in batches for message in batch if "body" in message]
    assert b"".join(spoken) == (b"ab" if has_begun else b"b")


async def test_who_goes_on_from_a_response_does_not_wait_for_a_replica_that_hangs() -> None:
    llms = {name: LLM(kv_cache_memory_bytes="8MiB") for name in "abc"}
    async with make_world(llms) as world:
        body: dict[str, Any] = {"input": "x", "max_output_tokens": 1}
        first = await world.ask("/v1/responses", body)
        hanging = {*llms} - {first.replica}

        async def hang(name: str, scope: Scope) -> None:
            if name in hanging and scope["path"].startswith("/v1/responses/"):
                await asyncio.Event().wait()

        world.before = hang
        more = {**body, "previous_response_id": first.json()["id"]}
        answer = await asyncio.wait_for(world.ask("/v1/responses", more), 10)
        assert answer.status == 200 and answer.replica == first.replica
        assert not world.ingress._tasks, "who hangs is still asked"
    for llm in llms.values():
        llm.close()
