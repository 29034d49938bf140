"""Explanations of misses in words: of chats, and of requests to an `LLM`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import AddedToken

from radixcache import (
    LLM,
    HashBlockCache,
    InvalidRequest,
    PagePool,
    PinError,
    RadixCache,
    SamplingParams,
)
from radixcache.runtime.engine.explain import REASONS, Explainer, Miss
from radixcache.runtime.engine.request import Request
from radixcache.runtime.files import BUNDLED_MODEL
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.tier import LoadCost
from tests.engines import finish
from tests.models import BYTES_PER_TOKEN, tiny_model
from tests.scripted import make_tokenizer

SEED = 20_261_120
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_each_reason_is_one_sentence() -> None:
    sentences = {
        Miss("first_seen", 40, 1379, 1380): "first seen: 1,339 tokens from token 40 on",
        Miss("evicted", 0, 1, 9): (
            "evicted: 1 token from token 0 on, computed before but no longer cached"
        ),
        Miss("page_not_finished", 16, 18, 30): (
            "page not finished: 2 tokens from token 16 on, computed before, but only whole pages "
            "are cached"
        ),
        Miss("page_not_finished", 16, 18, 30, in_flight=True): (
            "page not finished: 2 tokens from token 16 on, which another request computes in the "
            "same step"
        ),
        Miss("no_state", 0, 30, 32): (
            "no state: 30 tokens from token 0 on, whose KV is cached, but no recurrent state is "
            "kept of them"
        ),
        Miss("no_state", 8, 30, 32): (
            "no state: 22 tokens from token 8 on, whose KV is cached, but the last recurrent state "
            "is kept before them"
        ),
        Miss("on_host", 0, 4, 9): "in host memory: 4 tokens from token 0 on, which are loaded",
        Miss("on_disk", 0, 4, 9, computed=True): (
            "on disk: 4 tokens from token 0 on, which are not loaded"
        ),
        Miss("on_disk", 0, 4, 9, cost=LoadCost(0.02, 0.01)): (
            "on disk: 4 tokens from token 0 on, which are computed, in some 10.0 ms: loading them "
            "takes 20.0 ms"
        ),
        Miss("caching_off", 0, 4, 9): "caching is off: 4 tokens from token 0 on, computed before",
        Miss("diverged", 2, 5, 6, False, (1, 2), (3, 4, 5, 6), (7, 8), 3, 2): (
            "diverged at token 2 of 6: the prompt has [1, 2, 3, 4, 5, 6], an earlier text "
            "[1, 2, 7, 8]; 3 tokens not cached, although 2 of them, from token 3 on, are the same "
            "in both: move what changes to the end"
        ),
    }
    for miss, sentence in sentences.items():
        assert miss.describe() == sentence
    assert {miss.reason for miss in sentences} == set(REASONS)


def test_a_divergence_quotes_both_texts_and_marks_where_they_were_cut() -> None:
    ords = [ord(c) for c in "It is 10:41 now"]
    miss = Miss(
        "diverged",
        start=20,
        end=90,
        num_tokens=91,
        before=tuple(ords[:8]),
        prompt=tuple(ords[8:14]),
        cached=tuple(ord(c) for c in ":38 now\n"),
        rejoin=23,
        repeated=67,
    )
    assert miss.describe(lambda ids: "".join(map(chr, ids))) == (
        "diverged at token 20 of 91: the prompt has '…It is 10:41 no', an earlier text "
        "'…It is 10:38 now\\n…'; 70 tokens not cached, although 67 of them, from token 23 on, "
        "are the same in both: move what changes to the end"
    )
    redacted = miss.redacted()
    assert redacted.cached == () and "earlier" not in redacted.describe()
    assert redacted.describe().endswith("move what changes to the end")


# ---------------------------------------------------------------------- what is new in a chat

LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(scope="module", params=["bundled", "qwen", "llama"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The bundled one with its template, and with those of other families."""
    if request.param == "bundled":
        bundled = Tokenizer.load(str(BUNDLED_MODEL))
        assert bundled is not None
        return bundled
    fast = make_tokenizer()
    if request.param == "llama":
        fast.chat_template = LLAMA
        texts = re.findall(r"<\|\w+\|>", LLAMA)
        fast.add_tokens([AddedToken(text, normalized=False, special=True) for text in {*texts}])
    fast.add_tokens(["system", "user", "assistant"])  # one token each, as there
    return Tokenizer(fast)


def marks(tokenizer: Tokenizer) -> list[int]:
    return [index for index, text in tokenizer.added.items() if text.startswith("<")]


HELPFUL = "You are a helpful assistant."
CLUB = "You know all members of the club.\n" + "| 1 | Nora Lund | 30 | Oslo |\n" * 6
SHOTS = [f"Q: {q}?\nA: {a}\n" for q, a in [("Is the sky blue", "yes"), ("How many", "four")]]
SHOTS.append("Q: Who has written this line, and who will read it?\nA: nobody\n")


def chat(system: str, *texts: str) -> list[dict[str, str]]:
    told = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return told + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


TEA = ("Which tea is it?", "It is green tea.", "And what do the others drink?")


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (chat("", "Hello, who are you?"), chat("", "What is the capital of France?"), "new"),
        (chat("", "How old is Nora Lund?"), chat("", "How old is Hugo Marsh?"), "new"),
        (chat(CLUB, "How old is Nora Lund?"), chat(CLUB, "How old is Hugo Marsh?"), "new"),
        (chat(HELPFUL, *TEA), chat("You are a pirate.", "Tell me of a ship."), "new"),
        (chat(HELPFUL, *TEA), chat(HELPFUL, "Where is Rome?", "In Italy.", "And Oslo?"), "new"),
        (chat(HELPFUL, *TEA[:1]), chat(HELPFUL, *TEA), "new"),
        (chat(HELPFUL, *TEA), chat(HELPFUL, "Which coffee is it?", *TEA[1:]), "diverged"),
        (chat(HELPFUL, *TEA), chat(HELPFUL, TEA[0], "Black tea.", TEA[2]), "diverged"),
        (chat(HELPFUL, *TEA), chat(HELPFUL, "x" * 99 + TEA[0], *TEA[1:]), "diverged"),
        (chat("It is 10:38. " + HELPFUL, "Hi"), chat("It is 10:41. " + HELPFUL, "Hi"), "diverged"),
        (chat("10:38. " + CLUB, "Who?"), chat("10:41. " + CLUB, "How many are they?"), "diverged"),
        (chat(CLUB, "Who?"), chat(CLUB.replace("\n", "\r\n"), "Who?"), "diverged"),
        (chat(CLUB, "Who?"), chat(CLUB.replace("the club", "the  club"), "Who?"), "diverged"),
        (chat("".join(SHOTS), "Why?"), chat("".join(SHOTS[::-1]), "Why?"), "diverged"),
    ],
)
def test_a_prompt_has_diverged_if_it_goes_on_as_a_known_text_and_is_new_if_not(
    tokenizer: Tokenizer, before: Any, now: Any, reason: str
) -> None:
    explainer = Explainer(RadixCache(PagePool(256, 16)), marks=marks(tokenizer))

    def encode(messages: Any) -> list[int]:
        return tokenizer.encode(tokenizer.render_chat(messages), special=False)

    explainer.remember([*encode(before), *tokenizer.encode("I do not know.", special=False)])
    start = before[: before[0]["role"] == "system"]
    for number in range(5):  # others, who part at the same place
        other = {"role": "user", "content": f"{number} is a number, is it not?"}
        explainer.remember(encode([*start, other]))
    tokens = encode(now)
    (miss,) = [m for m in explainer.explain(tokens, 0) if m.reason != "evicted"]
    assert miss.reason == {"new": "first_seen", "diverged": "diverged"}[reason]
    assert miss.end == len(tokens) - 1
    told = miss.describe(tokenizer.show)
    assert "computed again" not in told and (reason == "new") == ("move what" not in told)


def test_a_quotation_shows_where_one_message_ends_and_the_next_begins(
    tokenizer: Tokenizer,
) -> None:
    explainer = Explainer(RadixCache(PagePool(256, 16)), marks=marks(tokenizer))
    texts = [
        tokenizer.render_chat(chat(HELPFUL, f"{first} tea is it?", *TEA[1:]))
        for first in ("Which", "What")
    ]
    for text in texts:
        tokens = tokenizer.encode(text, special=False)
        misses = explainer.explain(tokens, 0)
        explainer.remember(tokens)
    told = misses[-1].describe(tokenizer.show)
    quotes = [ast.literal_eval(quote) for quote in re.findall(r"'[^']*'", told)]
    assert len(quotes) == 2
    for quote, text in zip(quotes, reversed(texts), strict=True):
        assert quote.strip("…") in text, "as it stands in the prompt, its marks and all"
        assert "tant.W" not in quote and "?It" not in quote and re.search(r"<\|\w+\|>", quote)


# ----------------------------------------------------------------------------------- through LLM


@pytest.fixture(scope="module")
def tabletalk() -> LLM:
    return LLM(kv_cache_memory_bytes="32MiB")


def pages(count: int, page_size: int = 4) -> int:
    """Bytes for `count` KV pages of the random Llama."""
    return count * page_size * BYTES_PER_TOKEN


SYSTEM = (
    "You answer questions about a table of people, and you never guess what is not in it.\n" * 4
)


def test_the_time_of_day_at_the_top_is_named_as_the_place_where_prompts_part(
    tabletalk: LLM,
) -> None:
    prompt = f"It is {{}}. {SYSTEM}Question: how old is {{}}?"
    tabletalk.generate(prompt.format("10:38", "Clara Frost"), GREEDY)
    again = prompt.format("10:41", "Hugo Marsh")
    tokens = tabletalk.encode(again)
    assert isinstance(tokens, list) and tabletalk.tokenizer is not None
    parting = len(tabletalk.tokenizer.encode("It is 10:"))
    same = len(tabletalk.tokenizer.encode(f". {SYSTEM}Question: how old is"))

    explanation = tabletalk.explain(again)
    (miss,) = explanation.misses
    assert (miss.reason, miss.start, miss.end) == ("diverged", parting, len(tokens) - 1)
    assert miss.prompt[:2] == tuple(tabletalk.tokenizer.encode("41"))
    assert miss.cached[:2] == tuple(tabletalk.tokenizer.encode("38"))
    assert miss.rejoin == parting + 2 and abs(miss.repeated - same) <= 1
    lines = str(explanation).splitlines()
    assert lines[0] == f"{parting} of {len(tokens)} tokens cached" and len(lines) == 3
    assert lines[1].startswith(
        f"- diverged at token {parting} of {len(tokens)}: the prompt has 'It is 10:41. You"
    )
    assert "an earlier text 'It is 10:38. You" in lines[1]
    assert lines[2] == "- the last token is computed for its logits"
    assert lines[1].endswith("are the same in both: move what changes to the end")

    # Even as the very first token, and in place of a text of another length.
    (miss,) = tabletalk.explain(again.removeprefix("It is ")).misses
    assert (miss.reason, miss.start) == ("diverged", 0) and miss.repeated >= same - 1


def test_a_served_request_carries_its_explanation_and_is_counted_once(path: Path) -> None:
    llm = LLM(path, page_size=4, kv_cache_memory_bytes="1MiB")
    engine = llm.engine
    stem = llm.encode("The stem that all of them share. ")
    assert isinstance(stem, list)
    requests = []
    for end in ("and its end", "and another end", "and another end that goes on"):
        request = engine.add_request([*stem, *llm.encode(end)], GREEDY)
        assert request.explanation is None
        finish(engine)
        requests.append(request)
    first, second, third = (request.explanation for request in requests)
    assert first == [Miss("first_seen", 0, len(stem) + 10, len(stem) + 11)]
    assert second is not None and [m.reason for m in second] == ["first_seen"]
    assert second[0].start == len(stem) + 4 == requests[1].sequences[0].cached_tokens
    assert third is not None and [m.reason for m in third] in (["diverged"], ["first_seen"])
    counted = Counter({miss.reason: 0 for miss in [*first, *second, *third]})
    for miss in [*first, *second, *third]:
        counted[miss.reason] += len(miss)
    assert +Counter(llm.explainer.missed_tokens) == +counted
    stats = llm.cache.stats
    missed = sum(llm.explainer.missed_tokens.values())
    assert stats.hit_tokens + missed + stats.requests == stats.query_tokens


def test_a_request_preempted_or_whose_step_fails_is_explained_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(path, page_size=4, kv_cache_memory_bytes=pages(14))
    engine = llm.engine
    forward, calls = engine.model.forward, 0

    def fail_twice(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RuntimeError("no luck")
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward", fail_twice)
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [engine.add_request(list(range(i, i + 18)), long) for i in (1, 101)]
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            assert calls <= 2
        engine.cache.check()
    assert sum(s.preemptions for r in requests for s in r.sequences) > 0
    for request in requests:
        assert request.explanation == [Miss("first_seen", 0, 17, 18)]
    assert llm.explainer.missed_tokens["first_seen"] == 34


def test_a_burst_whose_stem_ends_in_mid_page_waits_for_that_page_only(path: Path) -> None:
    llm = LLM(path, page_size=16, kv_cache_memory_bytes="1MiB", schedule_policy="fcfs")
    stem = [7] * 20
    requests = [llm.engine.add_request(stem + 6 * [end], GREEDY) for end in (1, 2)]
    llm.engine.step()
    explanation = requests[1].explanation
    assert explanation is not None
    assert explanation[0] == Miss("page_not_finished", 16, 20, 26, in_flight=True)
    assert [m.reason for m in explanation] == ["page_not_finished", "first_seen"]
    finish(llm.engine)


def test_generated_tokens_are_remembered_like_prompts(path: Path) -> None:
    llm = LLM(path, page_size=4, kv_cache_memory_bytes="1MiB")
    (output,) = llm.generate("some text", GREEDY)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    llm.reset_prefix_cache()
    (evicted, _) = llm.explain({"prompt_token_ids": [*tokens, 1, 2]}).misses
    assert (evicted.reason, evicted.end) == ("evicted", len(tokens) - 1)  # the last has no KV


def test_what_another_salt_has_sent_changes_neither_explanation_nor_counters(path: Path) -> None:
    llm = LLM(path, page_size=4, kv_cache_memory_bytes="1MiB")
    prompt = "a text that two tenants send"
    length = len(prompt)
    unseen = Miss("first_seen", 0, length - 1, length)
    llm.generate(prompt, GREEDY)  # before any salt is in use
    for number, salt in enumerate(("a", "b"), 1):
        assert llm.explain(prompt, cache_salt=salt).misses == [unseen]

        def serve(salt: str = salt) -> Request:
            request = llm.engine.add_request(llm.encode(prompt), GREEDY, namespace=salt)
            finish(llm.engine)
            return request

        assert llm.call(serve).explanation == [unseen]
        counted = {k: v for k, v in llm.explainer.missed_tokens.items() if v}
        assert counted == {"first_seen": (1 + number) * (length - 1)}
    assert llm.explain(prompt, cache_salt="a").misses == []


@pytest.mark.parametrize("cache", ["radix", "hash-block", "none"])
def test_explaining_changes_nothing(path: Path, cache: Any) -> None:
    llm = LLM(path, cache=cache, page_size=4, kv_cache_memory_bytes=pages(24))
    rng = Random(SEED)
    texts = ["".join(rng.choice("ab") for _ in range(rng.randint(5, 60))) for _ in range(12)]
    for text in texts[:8]:
        llm.generate(text, GREEDY)

    def state() -> object:
        index = llm.cache
        order: object = None
        if isinstance(index, RadixCache):
            order = [(leaf.serial, leaf.last_use) for leaf in index._order]
        elif isinstance(index, HashBlockCache):
            order = index.queue
        known = llm.explainer._known
        return (
            repr(index.stats),
            order,
            index.pool.num_free,
            dict(llm.explainer.missed_tokens),
            [(leaf.serial, leaf.last_use, leaf.end) for leaf in known._order],
            llm.engine.has_work,
        )

    before = state()
    for text in texts:
        assert str(llm.explain(text)) == str(llm.explain(text))
        llm.explain(text, cache_salt="nobody's")
    assert state() == before, f"seed {SEED}"
    llm.cache.check()
    llm.explainer.check()


def test_a_prompt_after_a_pinned_prefix_is_explained_as_a_whole(path: Path) -> None:
    llm = LLM(path, page_size=4, kv_cache_memory_bytes="1MiB")
    llm.pin_prefix("system", "You are careful. ")
    explanation = llm.explain("Hello", prefix="system")
    assert explanation.num_cached_tokens == len("You are careful. ")
    assert explanation.num_tokens == len("You are careful. Hello")
    with pytest.raises(PinError, match="no prefix named 'sytem'"):
        llm.explain("Hello", prefix="sytem")
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        llm.explain("")


def test_without_a_tokenizer_texts_are_shown_as_ids(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama", tmp_path, tokenizer=False), kv_cache_memory_bytes="1MiB")
    llm.generate({"prompt_token_ids": [1, 2, 3, *range(20, 29)]}, GREEDY)
    prompt = np.array([1, 2, 9, *range(20, 29), 9], np.int32)
    explained = str(llm.explain({"prompt_token_ids": prompt}))
    assert "diverged at token 2 of 13: the prompt has [1, 2, 9, 20, 21, 22, 23" in explained
    assert "an earlier text [1, 2, 3, 20, 21, 22, 23" in explained
