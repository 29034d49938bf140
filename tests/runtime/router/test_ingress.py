"""What the ingress does when replicas die, join and refuse, and when clients mean no good."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from starlette.types import Scope

from radixcache import LLM
from radixcache.runtime.router import app as app_module
from radixcache.runtime.router import ingress as ingress_module
from radixcache.runtime.router.ingress import TRIES
from radixcache.runtime.router.members import MEMBERS
from radixcache.runtime.router.prompts import Prompts
from radixcache.runtime.router.replica import Description
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.pools import GrammarPool
from tests.helpers.pictures import data_url, file_of, picture
from tests.runtime.router.simulated_ray import Answer, World
from tests.runtime.router.simulated_ray import world as make_world

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b c", "max_tokens": 40},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 40},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "a b"}],
        "max_tokens": 40,
        "model": "tabletalk",
    },
    "/v1/responses": {"input": "a b c", "max_output_tokens": 40},
}


pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, LLM]]:
    made = {name: LLM(kv_cache_memory_bytes="8MiB") for name in ("a", "b", "c")}
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(llms: dict[str, LLM], anyio_backend: str) -> AsyncIterator[World]:
    """An ingress of two replicas."""
    async with make_world({name: llms[name] for name in "ab"}) as made:
        yield made


@pytest.fixture
async def three(llms: dict[str, LLM], anyio_backend: str) -> AsyncIterator[World]:
    async with make_world(llms) as made:
        yield made


async def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.01)


def pinned(world: World) -> dict[str, list[str]]:
    """The names of prefixes on each replica."""
    return {
        name: sorted(prefix.name for prefix in replica._llm.prefixes.list())
        for name, replica in world.replicas.items()
    }


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_got_nothing_is_answered_by_another(
    world: World, path: str, stream: bool
) -> None:
    expected = await world.ask(path, {**STREAMS[path], "temperature": 0})

    async def die(name: str, scope: Scope) -> None:
        world.before = None
        world.kill(name)

    world.before = die
    answer = await world.ask(path, {**STREAMS[path], "temperature": 0, "stream": stream})
    assert answer.status == 200 and answer.is_whole and b"died" not in answer.body
    if not stream:
        assert _text(answer) == _text(expected)
    first, second = [name for name, *_ in world.calls[-2:]]
    assert first != second == answer.replica
    assert [*world.ingress.replicas] == [second]


def _text(answer: Answer) -> Any:
    found = answer.json()
    for key in ("id", "created", "created_at", "usage", "completed_at", "radixcache"):
        found.pop(key, None)
    for item in found.get("output", ()):
        item.pop("id")
    return found


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_is_cut_ends_as_its_api_says(world: World, path: str) -> None:
    def heard(answer: Answer) -> None:
        if b"died" not in answer.body:
            world.kill(answer.replica)

    body = {**STREAMS[path], "stream": True}
    answer = await world.ask(path, body, heard=heard)
    *_, event = [line for line in answer.body.decode().split("\n") if "died" in line]
    told = json.loads(event.removeprefix("data: "))
    if path == "/v1/messages":
        assert told["type"] == "error" and told["error"]["type"] == "overloaded_error"
        assert b"event: error" in answer.body
    elif path == "/v1/responses":
        assert (told["type"], told["code"]) == ("error", "server_error")
    else:
        assert told["error"]["type"] == "server_error"
    assert answer.body.endswith(b"data: [DONE]\n\n") == path.endswith("completions")
    assert len(world.calls) == 1


async def test_a_replica_that_refuses_for_now_is_not_forgotten(
    three: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who sends too many new structures makes the router forget what is cached."""
    full = AsyncMock(side_effect=ApiError(503, "too many new structures"))
    monkeypatch.setattr(GrammarPool, "compile", full)
    body = {"prompt": "the same words again and again " * 9, "max_tokens": 1}
    first = await three.ask("/v1/completions", body)
    structured = {**body, "response_format": {"type": "json_object"}}
    refused = await three.ask("/v1/completions", structured)
    assert refused.status == 503 and b"too many new structures" in refused.body
    assert (await three.ask("/v1/completions", body)).replica == first.replica
    assert len(three.calls) == 3
    assert max(standing.cached_tokens for standing in three.ingress.decisions[-1].standings) > 30


async def test_a_request_that_kills_replicas_does_not_get_them_all(
    three: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ingress_module, "TRIES", 2)
    assert TRIES == 3

    async def die(name: str, scope: Scope) -> None:
        three.kill(name)

    three.before = die
    answer = await three.ask("/v1/completions", {"prompt": "poison"})
    assert answer.status == 503 and "2 replicas have died" in answer.json()["error"]["message"]
    assert len(three.calls) == 2 and caplog.text.count(" has died") == 2
    three.before = None
    assert (await three.ask("/v1/completions", {"prompt": "x"})).status == 200


async def test_a_replica_whose_engine_has_stopped_gets_nothing_more(llms: dict[str, LLM]):
    broken = LLM(kv_cache_memory_bytes="8MiB")

    async with make_world({"a": llms["a"], "broken": broken}) as world:
        broken.close()
        await asyncio.sleep(0.01)
        for number in range(4):  # it would seem to have the shortest queue
            answer = await world.ask("/v1/completions", {"prompt": f"{number}", "max_tokens": 1})
            assert answer.status == 200 and answer.replica == "a"
        assert [*world.ingress.replicas] == ["a"]
        assert len([name for name, *_ in world.calls if name == "broken"]) == 1


@pytest.mark.parametrize("seed", range(2))
async def test_after_any_mix_of_deaths_and_hang_ups_nothing_is_booked(
    three: World, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def one(number: int) -> None:
        path = rng.choice([*STREAMS])
        body = {**STREAMS[path], "stream": rng.random() < 0.5, "cache_salt": rng.choice("xy")}
        if path.endswith("completions"):
            body["n"] = rng.choice([1, 3])
        hang_up = asyncio.Event()
        if rng.random() < 0.4:
            asyncio.get_running_loop().call_later(rng.random() / 20, hang_up.set)
        answer = await three.ask(path, body, hang_up=hang_up)
        assert answer.status in (0, 200) or hang_up.is_set(), answer

    async def kill() -> None:
        await asyncio.sleep(rng.random() / 10)
        three.kill(rng.choice("ab"))

    await asyncio.gather(kill(), *map(one, range(12)))
    three.check()


PREFIX = {"name": "rules", "prompt": "Be kind. " * 20}


async def test_a_prefix_is_pinned_on_all_or_on_none(world: World, llms: dict[str, LLM]) -> None:
    there = llms["b"].pin_prefix("rules", "another prefix of that name, on one of them " * 4)
    refused = await world.ask("/v1/prefixes", PREFIX)
    assert refused.status == 409 and refused.replica == "b"
    assert pinned(world) == {"a": [], "b": ["rules"]}
    assert llms["b"].prefixes.list() == [there]


async def test_who_hangs_up_while_a_prefix_is_pinned_leaves_it_on_all(world: World) -> None:
    hang_up, go_on = asyncio.Event(), asyncio.Event()

    async def wait(name: str, scope: Scope) -> None:
        if name == "b":
            hang_up.set()
            await go_on.wait()

    world.before = wait
    answer = await world.ask("/v1/prefixes", PREFIX, hang_up=hang_up)
    assert answer.status == 0
    go_on.set()
    await until(lambda: pinned(world) == {"a": ["rules"], "b": ["rules"]})


@pytest.mark.parametrize("deleted", [False, True])
async def test_who_joins_meanwhile_has_pinned_what_the_others_have(
    world: World, llms: dict[str, LLM], deleted: bool
) -> None:
    """Whether the prefix is pinned or deleted while the third one joins."""
    if deleted:
        assert (await world.ask("/v1/prefixes", PREFIX)).status == 200
    joined = asyncio.Event()

    async def join(name: str, scope: Scope) -> None:
        world.before = slow
        await world.start("c", llms["c"])
        if not deleted:  # it is in before the others have pinned
            await until(lambda: "c" in world.ingress.replicas)

    async def slow(name: str, scope: Scope) -> None:
        if name == "c" and scope["method"] == "POST" and deleted:
            await joined.wait()

    world.before = join
    method, path = ("DELETE", "/v1/prefixes/rules") if deleted else ("POST", "/v1/prefixes")
    answer = await world.ask(path, b"" if deleted else PREFIX, method)
    assert answer.status == 200
    joined.set()
    await until(lambda: "c" in world.ingress.replicas)
    expected = [] if deleted else ["rules"]
    assert pinned(world) == dict.fromkeys("abc", expected)


@pytest.mark.parametrize("salt", [None, "plain", "Zürich 日本"])
@pytest.mark.parametrize("by", ["client", "administrator"])
async def test_who_joins_is_not_taught_what_was_deleted(
    world: World, llms: dict[str, LLM], salt: Any, by: str
) -> None:
    assert (await world.ask("/v1/prefixes", {**PREFIX, "cache_salt": salt})).status == 200
    path, headers = "/v1/prefixes/rules", {}
    if by == "administrator" and salt is not None:
        (listed,) = (await world.ask("/v1/cache/prefixes", method="GET")).json()["data"]
        path = f"/v1/cache/prefixes/{listed['namespace']}/rules"
    elif salt is not None:
        headers = {"cache-salt": salt.encode()}
    assert (await world.ask(path, method="DELETE", headers=headers)).status == 200
    await world.start("c", llms["c"])
    await until(lambda: "c" in world.ingress.replicas)
    assert pinned(world) == {"a": [], "b": [], "c": []}


async def test_one_that_hangs_as_it_joins_holds_up_no_other(
    llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch
):
    async with make_world({"a": llms["a"]}) as world:
        answers, describe = asyncio.Event(), world.describe

        async def hang(name: str) -> Description | None:
            if name == "b":
                await answers.wait()
            return await describe(name)

        monkeypatch.setattr(world, "describe", hang)
        await world.start("b", llms["b"])
        await world.start("c", llms["c"])
        await until(lambda: "c" in world.ingress.replicas)
        MEMBERS.change(MEMBERS.names - {"b"})  # Serve has given it up
        answers.set()
        await until(lambda: not world.ingress._tasks)
        assert [*world.ingress.replicas] == ["a", "c"]


async def test_a_lifetime_goes_on_where_a_replica_joins_and_may_be_written_as_text(
    world: World, llms: dict[str, LLM]
) -> None:
    answer = await world.ask("/v1/prefixes", {**PREFIX, "lifetime": "50"})
    assert answer.status == 200
    short = await world.ask("/v1/prefixes", {**PREFIX, "name": "short", "lifetime": 0.05})
    assert short.status == 200
    await asyncio.sleep(0.2)
    await world.start("c", llms["c"])
    await until(lambda: "c" in world.ingress.replicas)
    (prefix,) = llms["c"].prefixes.list()
    left = (prefix.expires or 0.0) - time.monotonic()
    assert prefix.name == "rules" and 30 < left < 49.9
    assert [*world.ingress._pins.live()] == [(None, "rules")]


async def test_who_hangs_up_amid_a_body_is_let_go_without_a_word(world: World) -> None:
    hang_up = asyncio.Event()
    hang_up.set()
    answer = await world.ask("/v1/completions", b"{", hang_up=hang_up, is_half=True)
    assert answer.status == 0 and not world.calls


async def test_shutting_down_does_not_wait_for_bodies(world: World) -> None:
    hang_up = asyncio.Event()
    half = world.ask("/v1/completions", b"{", hang_up=hang_up, is_half=True)
    task = asyncio.ensure_future(half)
    await asyncio.sleep(0.01)
    await asyncio.wait_for(world.ingress.drain(10), 1)
    assert (await world.ask("/v1/completions", {"prompt": "x"})).status == 503
    hang_up.set()
    await task


async def test_a_client_cannot_choose_a_replica(world: World) -> None:
    for name in ("a", "b", "nobody"):
        body = {"prompt": "the same", "max_tokens": 1}
        pinned = {"name": "same", "prompt": "the same"}
        paths = {"/v1/completions": body, "/v1/cache/flush": body, "/v1/prefixes": pinned}
        for path, sent in paths.items():
            answer = await world.ask(f"{path}?replica={name}", sent)
            assert answer.status == 400 and answer.json()["error"]["param"] == "replica"
    for path in ("/v1/replicas", "/metrics", "/health"):
        assert (await world.ask(f"{path}?replica=a", method="GET")).status == 400
    view = await world.ask("/v1/cache?replica=b&rows=3", method="GET")
    assert view.status == 200 and view.replica == "b"
    assert (await world.ask("/v1/cache?replica=nobody", method="GET")).status == 404
    assert (await world.ask("/v1/cache?replica=b&row=3", method="GET")).status == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/prefixes"])
async def test_a_salt_that_is_no_text_is_refused(world: World, path: str) -> None:
    body = {"name": "x", "input": "x", "prompt": "x", "previous_response_id": "resp_x"}
    content = json.dumps({**body, "cache_salt": "\ud800"}).encode()
    assert (await world.ask(path, content)).status == 400


async def test_a_response_is_found_where_it_is_kept_by_its_salt_only(world: World) -> None:
    body = {"input": "x", "max_output_tokens": 1, "cache_salt": "Zürich"}
    salt = {"cache-salt": "Zürich".encode()}
    for _ in range(4):  # the replicas take turns
        first = await world.ask("/v1/responses", body)
        name = first.json()["id"]
        more = {**body, "previous_response_id": name}
        assert (await world.ask("/v1/responses", more)).replica == first.replica
        other = await world.ask("/v1/responses", {**more, "cache_salt": "other"})
        assert other.status == 404
        path = f"/v1/responses/{name}"
        assert (await world.ask(path, method="GET")).status == 404
        assert (await world.ask(path, method="GET", headers=salt)).json()["id"] == name
        assert (await world.ask(path, method="DELETE", headers=salt)).json()["deleted"]
        assert (await world.ask(path, method="GET", headers=salt)).status == 404


async def test_explain_asks_the_replica_that_the_prompt_would_go_to(world: World) -> None:
    for salt in ("a", "b"):
        body, replicas = {"prompt": "one two three " * 9, "cache_salt": salt}, set[Any]()
        for _ in range(2):
            answer = await world.ask("/v1/completions", {**body, "max_tokens": 1})
            told = await world.ask("/v1/explain", body)
            assert told.json()["cached_tokens"] > 0
            replicas |= {answer.replica, told.replica}
        assert len(replicas) == 1
    assert (await world.ask("/tokenize", {"prompt": "x"})).status == 200


async def test_images_are_for_a_replica_to_read(world: World) -> None:
    shown = {"type": "image_url", "image_url": {"url": data_url(file_of(picture()))}}
    content = [{"type": "text", "text": "What is it?"}, shown]
    body = {"messages": [{"role": "user", "content": content}]}
    answer = await world.ask("/v1/chat/completions", body)
    assert answer.status == 400 and "image" in answer.json()["error"]["message"]
    assert [path for *_, path in world.calls if path == "/v1/chat/completions"]


async def test_keys_and_bounds_are_those_of_one_server(llms: dict[str, LLM]) -> None:
    options: dict[str, Any] = {"api_key": "user", "admin_key": "boss", "max_body_size": 1 << 20}
    async with make_world({"a": llms["a"]}, **options) as world:
        key = {"authorization": b"Bearer user"}
        for path in ("/v1/completions", "/v1/cache/flush", "/v1/prefixes"):
            assert (await world.ask(path, {"prompt": "x"})).status == 401
        assert (await world.ask("/v1/cache/flush", headers=key)).status == 401
        for path in ("/v1/replicas", "/metrics", "/v1/cache"):
            assert (await world.ask(path, method="GET", headers=key)).status == 401, path
        assert (await world.ask("/health", method="GET")).status == 200
        for body, status in ((b"{", 400), (b"{}", 400), (b" " * (2 << 20), 413)):
            assert (await world.ask("/v1/chat/completions", body, headers=key)).status == status
        assert (await world.ask("/nowhere", method="GET", headers=key)).status == 404
        assert len([path for *_, path in world.calls if path == "/v1/chat/completions"]) == 2
        assert llms["a"].cache.stats.requests == 0


async def test_a_text_that_no_context_holds_is_not_tokenised(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = world.ingress._prompts._tokenizer
    encode = Mock(side_effect=tokenizer._tokenizer.encode)
    monkeypatch.setattr(tokenizer._tokenizer, "encode", encode)
    text = "many words " * 200_000
    assert (await world.ask("/v1/completions", {"prompt": text})).status == 400
    chat = {"messages": [{"role": "user", "content": text}]}
    assert (await world.ask("/v1/chat/completions", chat)).status == 400
    assert all(len(call.args[0]) < 1000 for call in encode.call_args_list)


async def test_texts_of_one_client_are_tokenised_one_after_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: dict[Any, int] = {"x": 0, "y": 0}
    most: list[int] = []
    lock, real = threading.Lock(), Prompts.read

    def read(self: Prompts, path: str, body: Any, prefix: Any = None) -> Any:
        salt = body["cache_salt"]
        with lock:
            at_once[salt] += 1
            most.append(at_once[salt])
        time.sleep(0.005)
        with lock:
            at_once[salt] -= 1
        return real(self, path, body, prefix)

    monkeypatch.setattr(Prompts, "read", read)
    body = {"prompt": "x", "max_tokens": 1}
    await asyncio.gather(
        *(world.ask("/v1/completions", {**body, "cache_salt": "xy"[n % 2]}) for n in range(8))
    )
    assert max(most) == 1 and len(most) == 8


async def test_it_tells_of_the_replicas_and_of_decisions(
    world: World, llms: dict[str, LLM]
) -> None:
    await world.ask("/v1/completions", {"prompt": "a b c d e f", "max_tokens": 1})
    found = (await world.ask("/v1/replicas", method="GET")).json()
    kv_tokens = llms["a"].cache.pool.num_pages * llms["a"].cache.page_size
    assert [r["replica"] for r in found["replicas"]] == ["a", "b"]
    assert {r["kv_tokens"] for r in found["replicas"]} == {kv_tokens}
    (route,) = found["recent"]
    assert route["path"] == "/v1/completions" and route["replica"] == "a"
    assert [s["cost"] for s in route["standings"]] == [route["prompt_tokens"]] * 2
    told = (await world.ask("/metrics", method="GET")).body.decode()
    for name in "ab":
        assert f'radixcache_router_requests{{replica="{name}"}} 0.0' in told


async def test_the_metrics_of_others_come_though_a_replica_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "PATIENCE", 0.2)

    async def before(name: str, scope: Scope) -> None:
        if name == "b":
            await asyncio.Event().wait()

    world.before = before
    told = await world.ask("/metrics", method="GET")
    lines = [line for line in told.body.decode().splitlines() if "radixcache_pages" in line]
    assert told.status == 200
    assert any('replica="a"' in line for line in lines)
    assert not any('replica="b"' in line for line in lines)
    world.before = None
