"""Past turns: who finds them, and what is forgotten when they are too many."""

from __future__ import annotations

import tracemalloc
import uuid

import numpy as np

from radixcache import SamplingParams
from radixcache.runtime.server.api.chat_turn import Turn
from radixcache.runtime.server.api.response_store import ResponseStore, StoredResponse, compare
from radixcache.runtime.tokens.tool_calls import Tool


def make(*texts: str, salt: str | None = None, prompt: str = "", **more: object) -> StoredResponse:
    messages = [{"role": "user", "content": text} for text in texts]
    turn = Turn(messages, SamplingParams(), cache_salt=salt, **more)  # type: ignore[arg-type]
    return StoredResponse(turn, np.frombuffer(prompt.encode(), np.uint8).astype(np.int32))


def test_who_has_most_loses_the_oldest():
    pasts = ResponseStore(max_bytes=50_000)
    pasts.keep("small", make("x" * 500, salt="a"))
    for i in range(20):
        pasts.keep(f"{i}", make("y" * 1000, salt="b"))
        assert pasts.num_bytes <= 50_000
    found = [i for i in range(20) if pasts.find(f"{i}", "b")]
    assert pasts.find("small", "a") and found == [*range(20 - len(found), 20)] and len(found) > 5
    for salt in (None, "a", "c"):
        assert pasts.find("19", salt) is None
    pasts.drop("small", "a")
    for i in found:
        pasts.drop(f"{i}", "b")
    assert pasts.num_bytes == 0 and not pasts._pasts and not pasts._num_bytes
    pasts.keep("large", make("z" * 60_000))
    assert pasts.find("large", None) is None and pasts.num_bytes == 0


def test_short_turns_are_counted_with_all_that_they_take():
    pasts = ResponseStore()
    tracemalloc.start()
    try:
        for i in range(300):
            params = SamplingParams(max_tokens=1000 + i)
            turn = Turn([{"role": "user", "content": f"{i}"}], params, cache_salt=f"{i}" * 100)
            pasts.keep(uuid.uuid4().hex, StoredResponse(turn, np.arange(8, dtype=np.int32)))
        assert tracemalloc.get_traced_memory()[0] < pasts.num_bytes
    finally:
        tracemalloc.stop()


def test_what_a_client_changed_counts_only_if_it_cost_something():
    old = make("a", "b", prompt="[a][b]")
    for new, cached, told in (
        (make("a", "b", "c", prompt="[a][b][c]"), 6, ("nothing", 6)),
        (make("a", "b", "c", prompt="[a][b][c]"), 5, ("nothing", 6)),  # the last one is computed
        (make("a", "b", "c", prompt="[a][b][c]"), 3, ("unknown", 6)),  # evicted
        (make("a", "c", prompt="[a][c]"), 4, ("messages", 4)),
        (make("a", "c", prompt="[a][c]"), 6, ("nothing", 6)),  # somebody sent that before
        (make("a", prompt="[a]"), 3, ("nothing", 3)),
        (make("a", "b", prompt="T[a][b]", tools=(Tool("f"),)), 0, ("tools", 0)),
        (make("a", "b", prompt="[a][b]<>", template_kwargs={"t": 1}), 5, ("nothing", 6)),
        (make("a", "b", prompt="[A][B]<>", template_kwargs={"t": 1}), 1, ("settings", 1)),
    ):
        assert compare(old, new.turn, new.prompt, cached, granularity=1) == told
    blocks = make("a", "b", "c", prompt="[a][b][c]")
    assert compare(old, blocks.turn, blocks.prompt, 4, granularity=4)[0] == "nothing"
    assert compare(old, blocks.turn, blocks.prompt, 0, granularity=0)[0] == "unknown"
