"""What the clients of one salt learn of another: nothing that an answer says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from radixcache import LLM
from radixcache.runtime.server.admin import cache as cache_routes
from tests.runtime.server.live import SYSTEM, LiveServer, assert_error, live

COMPLETIONS, CHAT, PREFIXES = "/v1/completions", "/v1/chat/completions", "/v1/prefixes"
EXPLAIN = "/v1/explain"
VOLATILE = {"id", "created", "ttft", "expires_in"}
KEYS = {name: {"authorization": f"Bearer {name}"} for name in ("user", "boss")}
TEXT = {"prompt": "y"}
SAID: dict[str, dict[str, Any]] = {
    COMPLETIONS: TEXT, EXPLAIN: TEXT, CHAT: {"messages": [{"role": "user", "content": "y"}]}
}  # fmt: skip
ADA, BEN = "salt of Ada", "salt of Bèn"


@pytest.fixture(scope="module", params=["radix", "hash-block"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A server with keys."""
    llm = LLM(cache=request.param, kv_cache_memory_bytes="12MiB")
    with live(llm, hide_texts=True, api_key="user", admin_key="boss") as server:
        yield server


@pytest.fixture
def user(fresh: LiveServer) -> Iterator[httpx.Client]:
    """A client; which salt it is of, each request says."""
    with httpx.Client(base_url=fresh.url, headers=KEYS["user"], timeout=60, verify=False) as user:
        yield user


@pytest.fixture
def boss(user: httpx.Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=user.base_url, headers=KEYS["boss"], verify=False) as boss:
        yield boss


def lasting(answer: Any) -> Any:
    """An answer without what differs from one request to the next anyhow."""
    if isinstance(answer, dict):
        return {name: lasting(value) for name, value in answer.items() if name not in VOLATILE}
    return [*map(lasting, answer)] if isinstance(answer, list) else answer


def of(salt: str | None) -> dict[bytes, bytes]:
    return {} if salt is None else {b"cache-salt": salt.encode()}


def test_a_number_cannot_be_found_digit_by_digit(
    server: LiveServer, user: httpx.Client, boss: httpx.Client
):
    """Ada's prompt ends in two digits. Ben tries all, each with a salt of its own, and looks."""
    stem = "| 1 | Nora Lund | 30 | Pilot | The number of Ada is "

    def send(text: str, salt: str) -> dict[str, Any]:
        body = {"prompt": stem + text, "max_tokens": 1, "explain": True, "cache_salt": salt}
        response = user.post(COMPLETIONS, json=body)
        assert response.status_code == 200
        answer: dict[str, Any] = response.json()
        return answer

    send("48.", ADA)
    seen, counted = {}, {}
    for digits in [f"{first}{second}" for first in "345" for second in "78"]:
        before = missed(boss)
        answer = send(f"{digits}.", f"guess {digits}")
        seen[digits] = lasting([answer["usage"], answer["radixcache"]])
        counted[digits] = {reason: count - before[reason] for reason, count in missed(boss).items()}
        for path in ("/metrics", "/v1/cache"):
            assert_error(user.get(path), 401, "the server's admin key is needed")
    assert [*seen.values()] == [seen["48"]] * len(seen)
    assert [*counted.values()] == [counted["48"]] * len(counted), "not even the sums may tell"
    own = send("48.", ADA)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert own > 0, "and Ada herself has her hit"


def missed(boss: httpx.Client) -> dict[str, float]:
    """The counters by reason, as the server's administrator reads them."""
    rows = [line.rsplit(" ", 1) for line in boss.get("/metrics").text.splitlines()]
    return {name: float(count) for name, count in rows if "missed_tokens_total{" in name}


def test_answers_are_as_if_others_had_sent_nothing(user: httpx.Client):
    """Tokens, hits, scores and reasons, of text, chat and scored prompts; names and quotas."""
    text = SYSTEM["content"]
    short = [{"role": "system", "content": text[:300]}, {"role": "user", "content": "How old?"}]
    requests: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": text[:200], "max_tokens": 4, "explain": True}),
        (COMPLETIONS, {"prompt": text[:99], "max_tokens": 0, "logprobs": 1, "echo": True}),
        (EXPLAIN, {"messages": short}),
        (CHAT, {"messages": short, "max_tokens": 4, "explain": True}),
        (EXPLAIN, {"messages": short}),
        (PREFIXES, {"name": "system", "prompt": text[:300]}),
        (COMPLETIONS, {"prefix": "system", "prompt": "x", "max_tokens": 1, "explain": True}),
        (PREFIXES, {"name": "system", "prompt": "taken"}),
        (PREFIXES, {"name": "large", "prompt": text}),
    ]

    def answers(salt: str) -> list[Any]:
        got = [user.post(path, json={**body, "cache_salt": salt}) for path, body in requests]
        paths = (PREFIXES, f"{PREFIXES}/system", f"{PREFIXES}/other", "/health")
        got += [user.get(path, headers=of(salt)) for path in paths]
        return [(response.status_code, lasting(response.json())) for response in got]

    first = answers(ADA)
    assert [status for status, _ in first] == [200] * 7 + [409, 409, 200, 200, 404, 200]
    assert answers(BEN) == first
    assert answers("a third salt") == first


def test_the_prefixes_of_a_salt_are_not_there_for_another(
    user: httpx.Client, boss: httpx.Client, server: LiveServer
):
    made = user.post(PREFIXES, json={"name": "mine", "prompt": "x " * 40, "cache_salt": ADA})
    assert made.status_code == 200 and made.json()["salted"]
    assert user.get(f"{PREFIXES}/mine", headers=of(ADA)).json() == made.json()
    ours = {"prefix": "mine", "cache_salt": ADA}
    told = user.post(EXPLAIN, json={**ours, **SAID[EXPLAIN]}).json()
    assert told["prompt_tokens"] > told["cached_tokens"] >= made.json()["num_tokens"] - 16
    assert_error(user.post(CHAT, json={**ours, **SAID[CHAT]}), 400, "was pinned as text")
    for salt in (BEN, None):
        empty = user.get(PREFIXES, headers=of(salt)).json()
        assert empty["data"] == [] and empty["pinned_pages"] == 0
        for method in ("GET", "DELETE"):
            theirs, nobodys = (
                user.request(method, f"{PREFIXES}/{name}", headers=of(salt))
                for name in ("mine", "nope")
            )
            assert_error(theirs, 404, "no prefix named 'mine' is pinned")
            assert theirs.text.replace("mine", "nope") == nobodys.text
        for path, kind in (*zip(SAID, SAID, strict=True), (EXPLAIN, CHAT)):
            asked = {"prefix": "mine", "cache_salt": salt, **SAID[kind]}
            assert_error(user.post(path, json=asked), 404, "no prefix named 'mine' is pinned")
        again = {"name": "mine", "prompt": "y " * 40, "cache_salt": salt}
        assert user.post(PREFIXES, json=again).status_code == 200
        assert user.delete(f"{PREFIXES}/mine", headers=of(salt)).status_code == 200
    (mine,) = user.get(PREFIXES, headers=of(ADA)).json()["data"]
    assert mine == made.json()
    assert user.delete(f"{PREFIXES}/mine", headers=of(ADA)).status_code == 200
    assert server.call(lambda: {**server.engine.cache.pins}) == {}


def test_a_salt_has_its_share_of_the_pages_to_pin(user: httpx.Client, server: LiveServer):
    share = server.engine.cache.pins.share
    tokens = [*range(100, 150)] * 20  # more than a share
    whole = share * server.engine.cache.page_size
    for salt in (ADA, BEN):
        body = {"prompt": tokens, "cache_salt": salt}
        large = user.post(PREFIXES, json={**body, "name": "large"})
        assert_error(large, 409, f"pinned pages, the share is {share}")
        fits = user.post(PREFIXES, json={**body, "name": "fits", "prompt": tokens[:whole]})
        assert fits.status_code == 200
        more = user.post(PREFIXES, json={**body, "name": "more", "prompt": [*range(200, 240)]})
        assert_error(more, 409, f"pinned pages, the share is {share}")
        listed = user.get(PREFIXES, headers=of(salt)).json()
        assert (listed["pinned_pages"], listed["budget_pages"]) == (share, share)
        assert [prefix["name"] for prefix in listed["data"]] == ["fits"]
    third = user.post(PREFIXES, json={"name": "late", "prompt": [*range(200, 240)]})
    assert_error(third, 409, "takes more pages than all pins together have left")


def test_a_salt_that_no_text_is_is_refused(user: httpx.Client):
    assert_error(user.get(PREFIXES, headers={b"cache-salt": b"\xff"}), 400, "not UTF-8")
    assert_error(user.get(PREFIXES, headers={b"cache-salt": b""}), 400, "cache-salt")
    assert_error(user.get(PREFIXES, headers={b"cache-salt": b"x" * 513}), 400, "cache-salt")


def test_the_administrator_sees_and_ends_the_prefixes_of_all(
    user: httpx.Client, boss: httpx.Client
):
    for salt in (ADA, BEN):
        body = {"name": "system", "prompt": "x " * 40, "cache_salt": salt}
        assert user.post(PREFIXES, json=body).status_code == 200
    listed = boss.get("/v1/cache/prefixes").json()
    shown = [tree["namespace"] for tree in boss.get("/v1/cache").json()["namespaces"]]
    ada, ben = listed["data"]
    assert ada["name"] == ben["name"] == "system"
    assert {*shown} == {ada["namespace"], ben["namespace"]}
    path = f"/v1/cache/prefixes/{ada['namespace']}/system"
    assert boss.delete(path).status_code == 200
    assert_error(boss.delete(path), 404, "no prefix named 'system' is pinned in")
    assert user.get(f"{PREFIXES}/system", headers=of(ADA)).status_code == 404
    assert user.get(f"{PREFIXES}/system", headers=of(BEN)).status_code == 200
    assert boss.get("/v1/cache/prefixes").json()["data"] == [ben]


def test_digests_are_of_this_process_only(
    user: httpx.Client, boss: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
):
    """Who sees one cannot find the salt, or the text, by hashing what they may be."""
    body = {"prompt": "secret " * 20, "max_tokens": 1, "cache_salt": ADA}
    assert user.post(COMPLETIONS, json=body).status_code == 200

    def look() -> tuple[str, str, str]:
        response = boss.get("/v1/cache")
        (namespace,) = response.json()["namespaces"]
        (node,) = namespace["tree"]["children"][:1]
        return namespace["namespace"], node["id"], response.headers["etag"]

    first, again = look(), look()
    assert first == again
    plain = {hashlib.new(name, ADA.encode()).hexdigest() for name in ("sha256", "blake2b", "md5")}
    assert not any(digest.startswith(first[0]) for digest in plain)
    inner = {node.id for node in server.call(lambda: server.engine.cache.outline().spell())}
    assert first[1] not in inner
    monkeypatch.setattr(cache_routes, "_KEY", b"as another process draws it")
    assert not {*first} & {*look()}
