"""The cache from outside: its tree, search, flushing it, named prefixes and salts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from radixcache import LLM
from radixcache.runtime.server.admin.search import search
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.snapshot import Spelled
from tests.runtime.server.live import SYSTEM, LiveServer, ask, assert_error, live

COMPLETIONS, CHAT, PREFIXES = "/v1/completions", "/v1/chat/completions", "/v1/prefixes"
LINE = {"prompt": "| 1 | Nora Lund | 30 | Pilot | Norway |" * 3, "max_tokens": 1}  # some pages
TWO = ("How old is Nora Holm?", "How old is Nora Lund?")


@pytest.fixture(scope="module", params=["radix", "hash-block"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with live(LLM(cache=request.param, kv_cache_memory_bytes="32MiB")) as server:
        yield server


def cached(response: Any) -> int:
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_the_tree_shows_what_prompts_share(fresh: LiveServer):
    usages = [fresh.post(CHAT, {"messages": ask(text)}).json()["usage"] for text in TWO]
    view = fresh.get("/v1/cache").json()
    (namespace,) = view["namespaces"]
    assert namespace["namespace"] is None
    (stem,) = namespace["tree"]["children"]
    assert stem["text"].startswith("<|system|>You answer") and len(stem["children"]) == 2
    assert all(child["start"] == stem["start"] + stem["num_tokens"] for child in stem["children"])
    assert view["stats"]["requests"] == 2 and 0 < view["stats"]["hit_rate"] < 1
    used = view["stats"]["pages"] - view["stats"]["free_pages"]
    assert used > 0 or view["kind"] == "HashBlockCache"  # there, what is cached counts as free
    for usage, request in zip(usages, view["recent"][-2:], strict=True):
        assert request["prompt_tokens"] == usage["prompt_tokens"] and 0 < request["ttft"] < 60
        assert request["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    fresh.post(CHAT, {"messages": ask("And the country?"), "cache_salt": "x"})
    after = fresh.get("/v1/cache").json()["namespaces"]
    assert [n["namespace"] is None for n in after] == [True, False]
    assert after[0]["tree"]["children"][0]["id"] == stem["id"]  # a node keeps its id


def test_a_branch_is_shown_by_itself_until_it_has_gone(fresh: LiveServer):
    for question in TWO:
        fresh.post(CHAT, {"messages": ask(question)})
    whole = fresh.get("/v1/cache").json()
    (stem,) = whole["namespaces"][0]["tree"]["children"]
    leaf = stem["children"][1]
    branch = fresh.get(f"/v1/cache?under={leaf['id']}")
    view = branch.json()
    assert view["namespaces"][0]["tree"]["children"] == [leaf]
    assert view["above"] == [{**stem, "children": []}] and view["stats"] == whole["stats"]
    again = {"If-None-Match": branch.headers["etag"]}
    assert fresh.get(f"/v1/cache?under={leaf['id']}", headers=again).status_code == 304
    assert fresh.get("/v1/cache", headers=again).status_code == 200
    # A node goes by no other name: else one learns, of a hash that can be computed, whether
    # somebody has sent its text.
    for inner in fresh.call(lambda: [node.id for node in fresh.engine.cache.outline().spell()]):
        assert_error(fresh.get(f"/v1/cache?under={inner}"), 404, "is cached")
    fresh.post("/v1/cache/flush")
    assert_error(fresh.get(f"/v1/cache?under={leaf['id']}"), 404, "is cached")
    assert fresh.get(f"/v1/cache?reveal={leaf['id']}").status_code == 200


def test_an_unchanged_cache_is_not_sent_again(fresh: LiveServer):
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: fresh.post(COMPLETIONS, LINE),
        lambda: fresh.post(COMPLETIONS, LINE),
        lambda: fresh.post(PREFIXES, {"name": "p", "prompt": "x " * 40}),
        lambda: fresh.delete(f"{PREFIXES}/p"),
        lambda: fresh.post("/v1/cache/flush"),
    ]
    tags = set()
    for change in changes:
        change()
        tag = fresh.get("/v1/cache").headers["etag"]
        again = fresh.get("/v1/cache", headers={"If-None-Match": tag})
        assert (again.status_code, again.text, again.headers["etag"]) == (304, "", tag)
        tags.add(tag)
    assert len(tags) == len(changes)


def test_text_is_found_wherever_a_path_has_it(fresh: LiveServer):
    for question in TWO:
        fresh.post(CHAT, {"messages": ask(question), "cache_salt": "x"})
    (stem,) = fresh.get("/v1/cache").json()["namespaces"][0]["tree"]["children"]
    one, other = (child["id"] for child in stem["children"])

    def search(text: str) -> list[list[str]]:
        found = fresh.get("/v1/cache/search", params={"text": text}).json()
        assert found["total"] == len(found["data"])
        return [hit["path"] for hit in found["data"]]

    assert search("the members of a SAILING club") == [[stem["id"]]]
    assert search("How old is Nora lund") == [[stem["id"], other]]  # which begins in the stem
    assert sorted(search("the age of Nora")) == sorted([[stem["id"], one], [stem["id"], other]])
    assert search("nobody says this") == []


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_comes_in_the_order_of_the_tree(seed: int):
    class Letters:
        def show(self, tokens: list[int]) -> str:
            return "".join(chr(token) for token in tokens)

    draw, nodes = random.Random(seed), list[Spelled]()
    paths, texts = list[list[int]](), list[str]()
    for at in range(800):
        parent = draw.randrange(-1, at)
        tokens = np.array([draw.choice(b"ab") for _ in range(2)], np.int32)
        nodes.append(Spelled(str(at), parent, tokens))
        paths.append([*(paths[parent] if parent >= 0 else []), at])
        texts.append((texts[parent] if parent >= 0 else "") + bytes(tokens.tolist()).decode())
    # "aba" ends in a node's two letters, or one before them.
    ends = [path for path, text in zip(paths, texts, strict=True) if "aba" in text[-4:]]
    found, total = search(nodes, "ABA", cast(Tokenizer, Letters()))
    assert total == len(ends) > 100
    assert found == [[str(at) for at in path] for path in sorted(ends)[:100]]


def test_who_looks_in_a_loop_takes_a_fifth_of_the_engine_at_most(fresh: LiveServer, monkeypatch):
    times: list[tuple[float, float]] = []
    outline = fresh.engine.cache.outline

    def slow() -> Any:
        start = time.perf_counter()
        time.sleep(0.01)
        times.append((start, time.perf_counter()))
        return outline()

    monkeypatch.setattr(fresh.engine.cache, "outline", slow)
    paths = [f"/v1/cache?rows={rows}" for rows in range(1, 8)] + ["/v1/cache/search?text=a"]
    with ThreadPoolExecutor(len(paths)) as threads:
        assert all(answer.status_code == 200 for answer in threads.map(fresh.get, paths))
    assert len(times) == len(paths)
    for (start, end), (following, _) in pairwise(times):
        assert following - start > 4.5 * (end - start)


def test_a_flush_forgets_everything_but_what_is_pinned_forbids_it(fresh: LiveServer):
    fresh.post(COMPLETIONS, LINE)
    assert cached(fresh.post(COMPLETIONS, LINE)) > 0
    assert fresh.post("/v1/cache/flush").json() == {"flushed": True}
    assert cached(fresh.post(COMPLETIONS, LINE)) == 0
    fresh.post(PREFIXES, {"name": "p", "prompt": "x " * 40})
    assert_error(fresh.post("/v1/cache/flush"), 409, "or prefixes are pinned")


def test_a_completion_goes_on_from_a_named_prefix(fresh: LiveServer):
    pinned = fresh.post(PREFIXES, {"name": "table", "prompt": SYSTEM["content"]}).json()
    assert pinned["name"] == "table" and not pinned["salted"] and pinned["expires_in"] is None
    question = "Question: How old is Nora Lund? Your answer:"
    named = fresh.post(COMPLETIONS, {"prefix": "table", "prompt": question, "stop": "\n"})
    assert named.json()["choices"][0]["text"] == " The age of Nora Lund is 30."
    page = fresh.engine.cache.page_size
    assert cached(named) >= pinned["num_tokens"] // page * page
    listed = fresh.get(PREFIXES).json()
    assert listed["data"] == [pinned] and 0 < listed["pinned_pages"] <= listed["budget_pages"]
    assert fresh.get("/v1/cache").text.count('"pins":["table"]') == 1
    assert fresh.delete(f"{PREFIXES}/table").json()["deleted"]
    assert_error(fresh.delete(f"{PREFIXES}/table"), 404, "no prefix named 'table'")


def test_a_chat_goes_on_from_messages_by_name_and_from_no_text(fresh: LiveServer):
    fresh.post(PREFIXES, {"name": "club", "messages": [SYSTEM]})
    named = fresh.post(CHAT, {"prefix": "club", "messages": ask(TWO[0])[1:]}).json()
    whole = fresh.post(CHAT, {"messages": ask(TWO[0])}).json()
    assert named["choices"][0]["message"] == whole["choices"][0]["message"]
    assert named["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    fresh.post(PREFIXES, {"name": "text", "prompt": "x " * 40})
    wrong = fresh.post(CHAT, {"prefix": "text", "messages": ask(TWO[0])[1:]})
    assert_error(wrong, 400, "was pinned as text")


def test_a_prefix_ends_with_its_lifetime(fresh: LiveServer):
    """Also where nothing has woken the engine's thread since."""
    short = {"name": "short", "prompt": "x " * 40, "lifetime": 0.1}
    for look in (lambda: fresh.get(PREFIXES).json()["pinned_pages"], lambda: None):
        assert 0 < fresh.post(PREFIXES, short).json()["expires_in"] <= 0.1
        time.sleep(0.12)
        assert not look()
        assert fresh.post("/v1/cache/flush").json() == {"flushed": True}


def test_requests_of_others_go_on_while_a_prefix_is_pinned(fresh: LiveServer):
    """What the prefix's steps compute for them is delivered, not swallowed."""
    body = {"prompt": "| 1 | Nora", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fresh.post, COMPLETIONS, body)
        fresh.wait_until(lambda: bool(fresh.engine.scheduler.running))
        assert fresh.post(PREFIXES, {"name": "p", "prompt": "x " * 40}).status_code == 200
        assert other.result().json()["usage"]["completion_tokens"] == 200


def test_without_a_cache_there_is_no_tree_and_nothing_to_pin():
    with live(LLM(cache="none", kv_cache_memory_bytes="32MiB")) as server:
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200
        view = server.get("/v1/cache").json()
        assert view["namespaces"] == [] and view["stats"]["requests"] == 1
        pinned = server.post(PREFIXES, {"name": "p", "prompt": "x"})
        assert_error(pinned, 409, "runs without a prefix cache")
