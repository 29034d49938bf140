"""The cache from outside: its tree, flushing it, named prefixes and salts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
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

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE = "| 1 | Nora Lund | 30 | Pilot | Norway |" * 3  # some pages


@pytest.fixture(scope="module")
def llms() -> dict[str, LLM]:
    return {
        cache: LLM(cache=cache, kv_cache_memory_bytes="32MiB")
        for cache in ("radix", "hash-block", "none")
    }


@pytest.fixture(params=["radix", "hash-block"])
def fresh(request: pytest.FixtureRequest, llms: dict[str, LLM]) -> Iterator[LiveServer]:
    """A server whose cache is empty."""
    llm = llms[request.param]
    llm.reset_prefix_cache()
    with live(llm) as server:
        yield server
        server.assert_idle()

        def unpin_all() -> None:
            for prefix in llm.prefixes.list():
                llm.prefixes.unpin(prefix.name, prefix.cache_salt)

        server.call(unpin_all)


def cached(response: Any) -> int:
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree["children"]:
        assert child["start"] == tree["start"] + tree["num_tokens"]
        yield from nodes(child)


# The tree.


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_comes_in_the_order_of_the_tree(seed: int):
    class Letters:
        def decode(self, tokens: list[int], special: bool) -> str:
            return "".join(chr(token) for token in tokens)

    draw = random.Random(seed)
    parents = [-1] * draw.randint(1, 4)
    for at in range(200):  # level by level
        if at < len(parents):
            parents += [at] * draw.randint(1, 3)
    nodes = [
        Spelled(str(at), parent, np.array([draw.choice(b"ab") for _ in range(2)], np.int32))
        for at, parent in enumerate(parents)
    ]
    paths, texts = list[list[int]](), list[str]()
    for at, (_, parent, tokens) in enumerate(nodes):
        paths.append([*(paths[parent] if parent >= 0 else []), at])
        texts.append((texts[parent] if parent >= 0 else "") + bytes(tokens.tolist()).decode())
    ends = [
        path
        for path, text, node in zip(paths, texts, nodes, strict=True)
        if "aba" in text[-len(node.tokens) - 2 :]
    ]
    found, total = search(nodes, "ABA", cast(Tokenizer, Letters()))
    assert total == len(ends) > 0
    assert found == [[str(at) for at in path] for path in sorted(ends)[:100]]


def test_the_tree_shows_what_prompts_share(fresh: LiveServer):
    for question in ("How old is Nora Holm?", "How old is Nora Lund?"):
        fresh.post(CHAT, {"messages": ask(question)})
    view = fresh.get("/v1/cache").json()
    (namespace,) = view["namespaces"]
    assert namespace["namespace"] is None
    shared = namespace["tree"]["children"][0]
    assert shared["text"].startswith("<|system|>You answer") and len(shared["children"]) == 2
    assert {node["leases"] for node in nodes(namespace["tree"])} == {0}
    assert view["stats"]["requests"] == 2 and 0 < view["stats"]["hit_rate"] < 1
    used = view["stats"]["pages"] - view["stats"]["free_pages"]
    assert used > 0 or view["kind"] == "HashBlockCache"  # there, what is cached counts as free


def test_a_node_keeps_its_id(fresh: LiveServer):
    fresh.post(CHAT, {"messages": ask("How old is Nora Holm?")})
    (before,) = fresh.get("/v1/cache").json()["namespaces"]
    fresh.post(CHAT, {"messages": ask("And the country of Nora Holm?"), "cache_salt": "x"})
    after = fresh.get("/v1/cache").json()["namespaces"]
    assert [n["namespace"] is None for n in after] == [True, False]
    assert before["tree"]["children"][0]["id"] == after[0]["tree"]["children"][0]["id"]


def test_the_tree_is_bounded(fresh: LiveServer):
    for number in range(5):
        fresh.post(COMPLETIONS, {"prompt": f"{number} " * 20, "max_tokens": 1})
    view = fresh.get("/v1/cache?rows=3").json()
    tree = view["namespaces"][0]["tree"]
    assert len(tree["children"]) == 2
    assert (tree["more"]["branches"], tree["more"]["nodes"]) == (3, 3)
    assert view["stats"]["cached_nodes"] == 5
    shown = sum(child["num_tokens"] for child in tree["children"])
    assert view["stats"]["cached_tokens"] == shown + tree["more"]["tokens"]
    assert_error(fresh.get("/v1/cache?rows=0"), 400, "rows")
    assert fresh.get("/v1/cache?rows=0").json()["error"]["param"] == "rows"  # not `query.rows`


def test_a_branch_is_shown_by_itself_until_it_has_gone(fresh: LiveServer):
    for question in ("How old is Nora Holm?", "How old is Nora Lund?"):
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
    fresh.post("/v1/cache/flush")
    assert_error(fresh.get(f"/v1/cache?under={leaf['id']}"), 404, "is cached")
    assert fresh.get(f"/v1/cache?reveal={leaf['id']}").status_code == 200


def test_a_node_goes_by_no_name_but_the_one_that_was_told(fresh: LiveServer):
    """Else one learns, of a hash that can be computed, whether somebody has sent its text."""
    fresh.post(COMPLETIONS, {"prompt": LINE, "max_tokens": 1})
    (told,) = (
        child["id"] for child in fresh.get("/v1/cache").json()["namespaces"][0]["tree"]["children"]
    )
    (within,) = fresh.call(lambda: [node.id for node in fresh.engine.cache.outline().spell()])
    assert fresh.get(f"/v1/cache?under={told}").status_code == 200
    assert_error(fresh.get(f"/v1/cache?under={within}"), 404, "is cached")


def test_text_is_found_wherever_a_path_has_it(fresh: LiveServer):
    for question in ("How old is Nora Holm?", "How old is Nora Lund?"):
        fresh.post(CHAT, {"messages": ask(question), "cache_salt": "x"})
    view = fresh.get("/v1/cache").json()
    (stem,) = view["namespaces"][0]["tree"]["children"]
    one, other = (child["id"] for child in stem["children"])

    def search(text: str) -> list[list[str]]:
        found = fresh.get("/v1/cache/search", params={"text": text}).json()
        assert found["total"] == len(found["data"])
        return [hit["path"] for hit in found["data"]]

    assert search("the members of a SAILING club") == [[stem["id"]]]
    assert search("How old is Nora lund") == [[stem["id"], other]]  # which begins in the stem
    assert sorted(search("the age of Nora")) == sorted([[stem["id"], one], [stem["id"], other]])
    assert search("nobody says this") == []
    assert_error(fresh.get("/v1/cache/search?text="), 400, "text")


def test_who_looks_in_a_loop_takes_a_fifth_of_the_engine_at_most(
    fresh: LiveServer, monkeypatch: pytest.MonkeyPatch
):
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


def test_a_flush_forgets_everything(fresh: LiveServer):
    body = {"prompt": LINE, "max_tokens": 1}
    fresh.post(COMPLETIONS, body)
    assert cached(fresh.post(COMPLETIONS, body)) > 0
    assert fresh.post("/v1/cache/flush").json() == {"flushed": True}
    assert cached(fresh.post(COMPLETIONS, body)) == 0


def test_a_flush_is_refused_while_a_prefix_is_pinned(fresh: LiveServer):
    fresh.post("/v1/prefixes", {"name": "p", "prompt": "x " * 40})
    assert_error(fresh.post("/v1/cache/flush"), 409, "or prefixes are pinned")


# Named prefixes and salts.


def test_a_completion_goes_on_from_a_named_prefix(fresh: LiveServer):
    text = SYSTEM["content"]
    pinned = fresh.post("/v1/prefixes", {"name": "table", "prompt": text}).json()
    assert pinned["name"] == "table" and not pinned["salted"] and pinned["expires_in"] is None
    assert fresh.get("/v1/prefixes/table").json() == pinned
    question = "Question: How old is Nora Lund? Your answer:"
    named = fresh.post(COMPLETIONS, {"prefix": "table", "prompt": question, "stop": "\n"})
    assert named.json()["choices"][0]["text"] == " The age of Nora Lund is 30."
    page = fresh.engine.cache.page_size
    assert cached(named) >= pinned["num_tokens"] // page * page
    listed = fresh.get("/v1/prefixes").json()
    assert listed["data"] == [pinned] and 0 < listed["pinned_pages"] <= listed["budget_pages"]
    tree = fresh.get("/v1/cache").json()["namespaces"][0]["tree"]
    assert [node["pins"] for node in nodes(tree) if node["pins"]] == [["table"]]
    deleted = fresh.delete("/v1/prefixes/table")
    assert deleted.json() == {"name": "table", "object": "prefix", "deleted": True}
    assert_error(fresh.delete("/v1/prefixes/table"), 404, "no prefix named 'table'")
    assert_error(fresh.post(COMPLETIONS, {"prefix": "table", "prompt": "x"}), 404, "'table'")


def test_a_chat_goes_on_from_messages_by_name(fresh: LiveServer):
    fresh.post("/v1/prefixes", {"name": "club", "messages": [SYSTEM]})
    question = {"role": "user", "content": "How old is Nora Holm?"}
    named = fresh.post(CHAT, {"prefix": "club", "messages": [question]})
    whole = fresh.post(CHAT, {"messages": [SYSTEM, question]})
    answer = "The age of Nora Holm is 57."
    for response in (named, whole):
        assert response.json()["choices"][0]["message"]["content"] == answer
    assert named.json()["usage"]["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
    page = fresh.engine.cache.page_size
    tokens = fresh.get("/v1/prefixes/club").json()["num_tokens"]
    assert cached(named) >= tokens // page * page
    fresh.post("/v1/prefixes", {"name": "text", "prompt": "x " * 40})
    wrong = fresh.post(CHAT, {"prefix": "text", "messages": [question]})
    assert_error(wrong, 400, "was pinned as text")


def test_a_prefix_ends_with_its_lifetime(fresh: LiveServer):
    made = fresh.post("/v1/prefixes", {"name": "short", "prompt": "x " * 40, "lifetime": 0.3})
    assert 0 < made.json()["expires_in"] <= 0.3
    time.sleep(0.35)
    fresh.call(lambda: None)  # whatever the engine's thread is asked, it looks at the time after
    assert fresh.call(lambda: fresh.engine.cache.pins) == {}
    assert_error(fresh.get("/v1/prefixes/short"), 404, "no prefix named 'short'")


def test_a_prefix_whose_time_is_over_stands_in_nobody_s_way(fresh: LiveServer):
    """Also where nothing has woken the engine's thread since."""
    fresh.post("/v1/prefixes", {"name": "short", "prompt": "x " * 40, "lifetime": 0.2})
    time.sleep(0.25)
    assert fresh.post("/v1/cache/flush").json() == {"flushed": True}


def test_a_name_that_is_taken_and_a_budget_that_is_spent_are_conflicts(fresh: LiveServer):
    assert fresh.post("/v1/prefixes", {"name": "p", "prompt": "x " * 40}).status_code == 200
    again = fresh.post("/v1/prefixes", {"name": "p", "prompt": "y"})
    assert_error(again, 409, "a prefix named 'p' is pinned already")
    fresh.engine.cache.pin_budget = 3
    try:
        large = fresh.post("/v1/prefixes", {"name": "q", "prompt": "y z " * 100})
        assert_error(large, 409, "pinned pages, the share is 2")
    finally:
        fresh.engine.cache.pin_budget = fresh.engine.cache.pool.num_pages // 2


def test_requests_of_others_go_on_while_a_prefix_is_pinned(fresh: LiveServer):
    """What the prefix's steps compute for them is delivered, not swallowed."""
    body = {"prompt": "| 1 | Nora", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fresh.post, COMPLETIONS, body)
        fresh.wait_until(lambda: bool(fresh.engine.scheduler.running))
        assert fresh.post("/v1/prefixes", {"name": "p", "prompt": "x " * 40}).status_code == 200
        assert other.result().json()["usage"]["completion_tokens"] == 200


def test_salts_do_not_share_neither_tokens_nor_prefixes(fresh: LiveServer):
    body = {"prompt": LINE, "max_tokens": 1}
    hits = [
        cached(fresh.post(COMPLETIONS, {**body, **salt})) > 0
        for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})
    ]
    assert hits == [False, False, True, False]
    fresh.post("/v1/prefixes", {"name": "mine", "prompt": "x " * 40, "cache_salt": "a"})
    own = {"prefix": "mine", "prompt": "y", "max_tokens": 1}
    assert cached(fresh.post(COMPLETIONS, {**own, "cache_salt": "a"})) > 0
    for salt in ({}, {"cache_salt": "b"}):
        assert_error(fresh.post(COMPLETIONS, {**own, **salt}), 404, "no prefix named 'mine'")


def test_without_a_cache_there_is_no_tree_and_nothing_to_pin(llms: dict[str, LLM]):
    with live(llms["none"]) as server:
        assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200
        view = server.get("/v1/cache").json()
        assert view["namespaces"] == [] and view["stats"]["requests"] == 1
        pinned = server.post("/v1/prefixes", {"name": "p", "prompt": "x"})
        assert_error(pinned, 409, "runs without a prefix cache")


# Tokens.


def test_texts_become_tokens_and_back(server: LiveServer):
    text = "| 1 | Nora Lund | Ünïcode 🙂 |"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": ask("Who?")}).json()["tokens"]
    rendered = server.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert rendered.startswith("<|system|>") and rendered.endswith(
        "<|user|>Who?<|end|><|assistant|>"
    )


def test_a_query_parameter_that_would_be_ignored_is_refused(fresh: LiveServer):
    assert_error(fresh.get("/v1/cache?row=3"), 400, "row")
    assert_error(fresh.post("/v1/cache/flush?replica=a", {}), 400, "replica")
    assert_error(fresh.get("/v1/models?limit=1"), 400, "limit")
    body = {"messages": ask("Hello"), "max_tokens": 1, "model": "tabletalk"}
    assert fresh.post("/v1/messages?beta=true", body).status_code == 200  # as Anthropic's does
