"""Hybrid models: a hit goes on from a recurrent state, and no token differs from no cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging import version

from radixcache import LLM, InvalidRequest, ModelError, PagePool, SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.request import Request
from radixcache.runtime.engine.scheduler import Scheduler
from radixcache.runtime.engine.state_planner import StatePlanner
from radixcache.runtime.model import transformers_model
from radixcache.states import StateIndex
from tests.cover import seeds
from tests.engines import CACHES, assert_no_page_is_lost, is_greedy, make_engine, plain_greedy
from tests.hash_model import VOCAB, HashPool, RecurrentHashModel, greedy
from tests.models import HYBRIDS, tiny_model

EVERY_RUN = ("qwen3_5_text", "granitemoehybrid", "lfm2")
TIES = {"nemotron_h": 2e-2}
"""Transformers bounds its time steps in a prefill alone: one of a single token is another one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    if version.parse(transformers.__version__) < version.parse("5.23"):
        pytest.skip("transformers before 5.23 keeps states otherwise")
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


def hash_engine(
    num_states: int, cache: str = "radix", num_pages: int = 200, page_size: int = 4,
    budget: int = 64, running: int = 8,
) -> Engine:  # fmt: skip
    model: Any = RecurrentHashModel()
    pool: Any = HashPool(num_pages, page_size, num_states)
    pages = CACHES[cache](PagePool(num_pages, page_size))
    states = StatePlanner(StateIndex(num_states), cache != "none")
    return Engine(model, pool, pages, Scheduler(pages, budget, running, states=states))


def play(
    engine: Engine,
    rng: random.Random,
    num_requests: int,
    is_right: Callable[[list[int], list[int], int], bool],
    vocab: int,
    ignore_eos: bool = True,
) -> Counter[str]:
    """Random requests, aborts and steps that fail; each answer is to be right."""
    live: list[tuple[Request, list[int], int]] = []
    texts: list[list[int]] = []
    seen: Counter[str] = Counter()
    while seen["asked"] < num_requests or live:
        for _ in range(rng.choice([1, 1, 5])):
            if seen["asked"] >= num_requests or (live and rng.random() < 0.6):
                continue
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
            if texts and rng.random() < 0.8:
                base = rng.choice(texts)
                cut = len(base) if rng.random() < 0.5 else rng.randint(1, len(base))
                prompt = (base[:cut] + prompt[: rng.randint(0 if cut > 1 else 1, 20)])[:120]
            count = rng.choice([rng.randint(1, 12), 30])
            params = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=ignore_eos, n=rng.choice([1, 1, 3])
            )
            live.append((engine.add_request(prompt, params), prompt, count))
            seen["asked"] += 1
        for _ in range(rng.randint(1, 3)):
            engine.step()
            engine.check()
        if live and rng.random() < 0.06:
            engine.abort(live.pop(rng.randrange(len(live)))[0])
        if live and rng.random() < 0.06:
            fail_a_step(engine)
        if not live and rng.random() < 0.1:
            engine.reset_cache()
        for item in [item for item in live if item[0].finished]:
            live.remove(item)
            request, prompt, count = item
            assert request.error is None, request.error
            for sequence in request.sequences:
                tokens = sequence.generated.tolist()
                assert is_right(prompt, tokens, count), (prompt, tokens, sequence.cached_tokens)
                seen["answers"] += 1
                seen["hits"] += sequence.cached_tokens > 0
            texts = [*texts, prompt + request.sequences[0].generated.tolist()][-12:]
    assert engine.scheduler.states is not None
    seen["evicted"] = engine.scheduler.states.index.num_evicted
    seen["preempted"] = engine.scheduler.num_preemptions
    assert_no_page_is_lost(engine)
    return seen


def fail_a_step(engine: Engine) -> None:
    """The model raises when it has run, so that states and KV are written."""
    forward = engine.model.forward

    def broken(*args: Any) -> Any:
        forward(*args)
        raise RuntimeError("broken on purpose")

    engine.model.forward = broken  # type: ignore[method-assign, assignment]
    try:
        engine.step()
    except RuntimeError:
        pass
    finally:
        engine.model.forward = forward  # type: ignore[method-assign]
    engine.check()


@seeds(20_261_125, 40)
def test_random_requests_get_the_tokens_of_their_own_texts(seed: int) -> None:
    """A model of checksums, whose states tell any token too many or too few."""
    rng, total = random.Random(seed), Counter[str]()

    def is_right(prompt: list[int], tokens: list[int], count: int) -> bool:
        return tokens == greedy(prompt, count)

    for turn in range(4):
        running, page_size = rng.choice([1, 2, 4, 8]), rng.choice([1, 3, 4, 16])
        tokens = rng.choice([170, 190, 250, 4000])
        if not turn:  # somebody is put back
            running, tokens = 8, 170
        engine = hash_engine(
            running + rng.choice([1, 1, 2, 4, 40]),
            rng.choice(["radix", "radix", "hash-block", "none"]),
            max(10, -(-tokens // page_size)) + 2,
            page_size,
            rng.choice([7, 30, 64, 500]),
            running,
        )
        total += play(engine, rng, 45, is_right, VOCAB, ignore_eos=False)
        model: Any = engine.model
        assert not model.wrong_states
        assert not model.unwritten
    print(f"seed {seed}: {dict(total)}")
    assert total["hits"] > total["answers"] / 5
    assert total["evicted"] > 100
    assert total["preempted"] > 0


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in EVERY_RUN else pytest.mark.exhaustive)
        for family in HYBRIDS
    ],
)
@seeds(7, 9)
def test_random_requests_get_the_tokens_of_transformers(
    folder: Callable[[str], Path], family: str, seed: int
) -> None:
    rng, path = random.Random(seed), folder(family)
    running, page_size = rng.choice([2, 4]), rng.choice([1, 3, 4, 16])
    engine = make_engine(
        path,
        page_size=page_size,
        num_pages=-(-rng.choice([250, 500]) // page_size) + 2,
        max_num_batched_tokens=rng.choice([7, 30, 64, 500]),
        max_num_seqs=running,
        num_states=running + rng.choice([1, 4, 40]),
    )

    def is_right(prompt: list[int], tokens: list[int], count: int) -> bool:
        wanted = plain_greedy(path, prompt, count, ignore_eos=True)
        return tokens == wanted or is_greedy(path, prompt, tokens, TIES.get(family, 1e-4))

    seen = play(engine, rng, 12, is_right, 250)
    assert seen["hits"]


def test_a_second_prompt_that_parts_anywhere_leaves_a_state_there_for_the_third() -> None:
    rng = random.Random(3)
    for cut in range(1, 41):
        engine, stem = hash_engine(30), [rng.randrange(VOCAB) for _ in range(40)]

        def ask(prompt: list[int], engine: Engine = engine) -> int:
            request = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1))
            while engine.has_work:
                engine.step()
                engine.check()
            assert request.sequences[0].generated.tolist() == greedy(prompt, 1)
            return request.sequences[0].cached_tokens

        assert ask(stem) == 0
        other = (stem[cut] + 1) % VOCAB if cut < 40 else 0
        branches = [[*stem[:cut], other, last] for last in (1, 2)]
        second, third = ask(branches[0]), ask(branches[1])
        # Of the first prompt, the states after 38 and after all 40 tokens are there.
        assert second == (0 if cut < 38 else 38 if cut < 40 else 40)
        assert third == cut


def test_the_next_turn_of_a_chat_goes_on_where_its_template_parts(
    folder: Callable[[str], Path],
) -> None:
    with LLM(folder("qwen3_5_text"), kv_cache_memory_bytes="4MB", page_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        (first,) = llm.chat(messages, params)
        # As where a template leaves out what the model thought: another text after the mark.
        messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
        (second,) = llm.chat(messages, params)
        asked = first.prompt_token_ids
        assert second.num_cached_tokens == len(asked) - len("[assistant]")
        fresh = [messages[0], {"role": "user", "content": "something else"}]
        (third,) = llm.chat(fresh, params)
        assert third.num_cached_tokens == len("<s>[system]be brief\n") - len("<s>") + 1


def test_what_lacks_a_state_is_explained_and_counted(folder: Callable[[str], Path]) -> None:
    with LLM(folder("lfm2"), kv_cache_memory_bytes="1MB", page_size=4) as llm:
        stem = [7] * 50
        params = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([stem], params)
        (miss, *_) = llm.explain([*stem[:30], 8, 9]).misses
        assert (miss.reason, miss.start, miss.end) == ("no_state", 0, 30)
        assert "no state: 30 tokens from token 0 on" in str(llm.explain([*stem[:30], 8, 9]))
        llm.generate([[*stem[:30], 8, 9]], params)
        assert llm.explainer.missed_tokens["no_state"] == 30
        assert llm.explain([*stem[:30], 1, 2]).num_cached_tokens == 30


def test_a_failed_step_leaves_no_state_and_the_prompt_is_right_twice() -> None:
    engine, prompt = hash_engine(6), [*range(20)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    request = engine.add_request(prompt, params)
    fail_a_step(engine)
    assert engine.scheduler.states is not None
    assert engine.scheduler.states.index.num_checkpoints == 0
    while engine.has_work:
        engine.step()
    again = engine.add_request(prompt, params)
    while engine.has_work:
        engine.step()
    assert again.sequences[0].cached_tokens == 18
    assert again.sequences[0].generated.tolist() == request.sequences[0].generated.tolist()
    assert not engine.model.wrong_states  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exact": True}, "exact mode is not for recurrent layers"),
        ({"state_memory": 10}, "a sequence takes two states of 1,536 bytes"),
        ({"state_memory": "1GB"}, "leave no room"),
        ({"state_memory": "lots"}, "state_memory must be an amount like 2GB"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Callable[[str], Path], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises((InvalidRequest, ModelError), match=said):
        LLM(folder("lfm2"), **{"kv_cache_memory_bytes": "1MB", **settings})


def test_a_model_that_keeps_states_in_its_own_way_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "replace_recurrent_layers", lambda model: 1)
    with pytest.raises(ModelError, match="keep their states otherwise than transformers"):
        LLM(folder("lfm2"))


def test_few_states_let_few_sequences_run(folder: Callable[[str], Path]) -> None:
    with LLM(folder("lfm2"), kv_cache_memory_bytes="1MB", state_memory=3 * 1536) as llm:
        assert llm.engine.scheduler.max_num_seqs == 2
        assert len(llm.engine.kv_pool.states.tensors["conv", 0, 0]) == 3  # type: ignore[union-attr]


def test_a_model_without_recurrent_layers_takes_no_state_memory() -> None:
    with pytest.raises(InvalidRequest, match="has none"):
        LLM(state_memory="1MB", kv_cache_memory_bytes="1MB")


def test_namespaces_share_no_state() -> None:
    engine = hash_engine(6)
    params = SamplingParams(temperature=0, max_tokens=1)
    for namespace, hit in (("a", 0), ("b", 0), ("a", 18)):
        request = engine.add_request([*range(20)], params, namespace=namespace)
        while engine.has_work:
            engine.step()
        assert request.sequences[0].cached_tokens == hit


def test_the_state_of_a_pinned_prefix_stays(folder: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(folder("lfm2"), kv_cache_memory_bytes="1MB", state_memory=4 * 1536) as llm:
        llm.pin_prefix("rules", [5, 6, 7, 8] * 20)
        for token in range(6):
            llm.generate([[token] * 12], params)
        (output,) = llm.generate([[10, 11]], params, prefix="rules")
        assert output.num_cached_tokens == 80
        llm.unpin_prefix("rules")
        for token in range(6):
            llm.generate([[token] * 13], params)
        assert llm.explain([5, 6, 7, 8] * 20).num_cached_tokens == 0


def test_a_hit_is_ranked_by_what_it_saves() -> None:
    engine = hash_engine(3, running=1)
    params = SamplingParams(temperature=0, max_tokens=1)

    def ask(*prompts: list[int]) -> list[Request]:
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while engine.has_work:
            engine.step()
        return requests

    much, little = [3] * 40, [4] * 20
    ask(much)
    ask(little)  # whose states have taken the place of the others
    first, second = ask([*much[:30], 5, 5], [*little, 5])
    assert first.sequences[0].cached_tokens == 0
    assert second.admitted < first.admitted  # type: ignore[operator]
