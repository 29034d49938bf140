"""Explanations of misses in words: of chats, and of requests to an `LLM`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AddedToken

from radixcache import (
    LLM,
    InvalidRequest,
    PagePool,
    PinError,
    RadixCache,
    SamplingParams,
)
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine.explain import Explainer
from radixcache.runtime.explanation import Miss
from radixcache.runtime.request import Request
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.snapshot import Look
from tests.helpers.engines import finish
from tests.helpers.models import BYTES_PER_TOKEN
from tests.helpers.scripted import make_tokenizer

SEED = 20_261_120
GREEDY = SamplingParams(temperature=0, max_tokens=6)


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


def test_texts_that_part_later_do_not_hide_each_other(tokenizer: Tokenizer) -> None:
    explainer = Explainer(RadixCache(PagePool(256, 16)), marks=marks(tokenizer))

    def encode(system: str) -> list[int]:
        return tokenizer.encode(tokenizer.render_chat(chat(system, "Who?")), special=False)

    for system in (CLUB, HELPFUL, "You are a pirate."):  # the last is the newest
        explainer.remember(encode("It is 10:38. " + system))
    misses = explainer.explain(encode("It is 10:41. " + CLUB), 0)
    assert [miss.reason for miss in misses] == ["evicted", "diverged"]
    assert misses[1].repeated > 50


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


def test_the_time_of_day_at_the_top_is_named_as_the_place_where_prompts_part(tabletalk: LLM):
    prompt = f"It is {{}}. {SYSTEM}Question: how old is {{}}?"
    tabletalk.generate(prompt.format("10:38", "Clara Frost"), GREEDY)
    again, tokenizer = prompt.format("10:41", "Hugo Marsh"), tabletalk.tokenizer
    assert tokenizer is not None
    parting = len(tokenizer.encode("It is 10:"))
    same = len(tokenizer.encode(f". {SYSTEM}Question: how old is"))
    explanation = tabletalk.explain(again)
    (miss,) = explanation.misses
    assert (miss.reason, miss.start, miss.rejoin) == ("diverged", parting, parting + 2)
    assert abs(miss.repeated - same) <= 1
    told = str(explanation)
    assert "the prompt has 'It is 10:41. You" in told and "text 'It is 10:38. You" in told
    assert "move what changes to the end" in told
    assert "10:38" not in miss.redacted().describe(tokenizer.show)


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


def test_a_step_is_launched_before_its_prompts_are_compared_with_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But each prompt of a step is compared with those before it."""
    llm = LLM(path, page_size=4, kv_cache_memory_bytes="1MiB")
    run, seen = llm.engine.runner.run, list[list[Any]]()

    def launch(*step: Any) -> Any:
        seen.append([None if r.explanation is None else [*r.explanation] for r in requests])
        return run(*step)

    monkeypatch.setattr(llm.engine.runner, "run", launch)
    text = "a text that begins in two prompts"
    prompts = [llm.encode(text + end) for end in (" at once", " and then another end")]
    requests = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
    finish(llm.engine)
    new = [Miss("first_seen", 0, len(prompts[0]) - 1, len(prompts[0]))]
    assert requests[0].explanation == new == seen[0][0]
    assert requests[1].explanation is not None and requests[1].explanation[0].in_flight
    assert requests[1].explanation[:-1] == seen[0][1]


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
        line = llm.cache.pool.free.to_array().tolist()
        picture = llm.cache.outline().draw(Look())
        return repr((picture, llm.cache.stats, line, llm.explainer.missed_tokens))

    before = state()
    for text in texts:
        assert str(llm.explain(text)) == str(llm.explain(text))
        llm.explain(text, cache_salt="nobody's")
    assert state() == before, f"seed {SEED}"


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
