"""Whatever is asked for, and whoever runs beside, each answer is what the request gets alone.

Without drafts, with those that an `LLM` makes, and with right and wrong ones drawn at random.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixcache import LLM, SamplingParams
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.engine.input_processor import Prompt
from radixcache.runtime.engine.scheduling.chunk import Chunk
from radixcache.runtime.engine.scheduling.scheduler import Scheduler
from radixcache.runtime.request import Request, Sequence
from radixcache.runtime.sampling.prompt_logprobs import ScoredPrompts
from radixcache.runtime.spec_decode.proposer import DraftProposer
from radixcache.tokens import as_tokens
from tests.helpers.cover import covering
from tests.helpers.drafts import RandomProposer, draft_always, speculate
from tests.helpers.engines import Layers, finish, make_engine, prompts, run
from tests.helpers.hash_model import VOCAB, force_no_tokens, greedy, hash_engine, logits_after
from tests.helpers.models import tiny_model
from tests.helpers.native import needs_kernels
from tests.helpers.traffic import Asked, play
from tests.runtime.engine.cut_off import GRAMMARS, STRUCTURES, TEXTS

SEED = 20_261_125
ENDS = VOCAB - 1


def decode(ids: list[int], special: bool = False) -> str:
    return "".join(TEXTS[i] for i in ids)


def encode(text: str) -> list[int]:
    return [TEXTS.index(letter) for letter in text]


OPTIONS: dict[str, Any] = {"decode": decode, "encode": encode, "grammar_backend": GRAMMARS}


def random_params(rng: random.Random) -> SamplingParams:
    """Of all that decides about a token, some; what is drawn has a seed."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": rng.choice([1, 2, 9, 30])}
    some = lambda share: rng.random() < share  # noqa: E731
    if some(0.5):
        asked |= {"temperature": rng.choice([0.5, 1.3]), "seed": rng.randrange(9)}
        asked |= rng.choice([{}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5}])
        asked["n"] = rng.choice([1, 1, 3])
    if some(0.25):
        asked["logprobs"] = rng.randrange(3)
    if some(0.1):
        asked["prompt_logprobs"] = rng.randrange(3)
        asked["max_tokens"] *= rng.randrange(2)
    if some(0.2):
        asked["stop"] = [rng.choice(TEXTS[:-1]) + rng.choice(TEXTS[:-1])]
    if some(0.2):
        asked["stop_token_ids"] = [rng.randrange(VOCAB)]
    if some(0.2):
        asked["ignore_eos"] = True
    if some(0.3):
        asked |= rng.choice(
            [
                {"frequency_penalty": 1.1, "presence_penalty": -0.7},
                {"repetition_penalty": 1.4},
                {"logit_bias": {3: 2.0, ENDS: -1.0}},
                {"bad_words": ["ab", "c", "e f"]},
                {"min_tokens": min(5, asked["max_tokens"])},
                {"allowed_token_ids": [1, 2, 3, 5, 8, 13, ENDS]},
            ]
        )
    elif some(0.4) and asked["max_tokens"]:
        asked["structured_outputs"] = rng.choice(STRUCTURES)
        asked["max_tokens"] += 20
    return SamplingParams(**asked)


def told(request: Request) -> Any:
    output = request.output()
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in output.outputs
    ], output.prompt_logprobs


class Reference:
    """What an engine that keeps nothing, step by step, says to a request that it has for itself."""

    def __init__(self) -> None:
        self._engine = hash_engine("none", num_pages=2000, **OPTIONS)
        force_no_tokens(self._engine)
        self._told: dict[Any, Any] = {}

    def __call__(self, request: Request) -> Any:
        key = request.prompt_token_ids.tobytes(), repr(request.params)
        if key not in self._told:
            alone = self._engine.add_request(request.prompt_token_ids, request.params)
            finish(self._engine)
            self._told[key] = told(alone)
        return self._told[key]

    def answer(self, sequence: Sequence) -> list[int]:
        tokens: list[int] = self(sequence.request)[0][sequence.index][0]
        return tokens


def ask_like(rng: random.Random) -> Any:
    stem = [rng.randrange(VOCAB - 1) for _ in range(40)]
    asked: list[Asked] = []

    def ask(texts: list[list[int]]) -> Asked:
        if asked and rng.random() < 0.3:  # again
            return rng.choice(asked)
        known = rng.choice([stem, *texts])
        prompt = known[: rng.randint(0, len(known))] + [rng.randrange(VOCAB - 1) for _ in range(3)]
        asked.append((prompt, random_params(rng), rng.choice([None, None, "salt"])))
        return asked[-1]

    return ask


def hold_to_what_is_left(scheduler: Scheduler) -> None:
    """Drafts stay within the step's budget; for none of them is anything evicted or put back."""
    schedule, reserve = scheduler.schedule, scheduler._reserve_draft

    def checked() -> list[Chunk]:
        chunks = schedule()
        if any(len(chunk.draft) for chunk in chunks):
            cost = sum(chunk.cost + len(chunk.draft) for chunk in chunks)
            rows = sum(1 + len(chunk.draft) for chunk in chunks if chunk.is_last)
            assert cost <= scheduler.max_num_batched_tokens and rows <= scheduler.max_rows
        return chunks

    def reserve_draft(sequence: Sequence, count: int) -> int:
        before = scheduler.cache.stats.evicted_pages, scheduler.num_preemptions
        room = reserve(sequence, count)
        assert (scheduler.cache.stats.evicted_pages, scheduler.num_preemptions) == before
        assert sequence.num_computed + room <= sequence.max_length
        return room

    scheduler.schedule = checked  # type: ignore[method-assign]
    scheduler._reserve_draft = reserve_draft  # type: ignore[method-assign]


@covering(
    drafts=["off", "real", "random"], cache=["radix", "hash-block", "none"], page_size=[1, 4, 16]
)
def test_every_answer_is_as_it_is_alone(drafts: str, cache: str, page_size: int) -> None:
    case = random.Random(f"{SEED} {drafts} {cache} {page_size}")
    num_pages = case.choice([160, 1000]) // page_size + 4
    engine = hash_engine(cache, page_size, num_pages, case.choice([20, 200]), **OPTIONS)
    engine.overlap = case.random() < 0.5
    if case.random() < 0.5:  # as where there are CUDA graphs, none of which is large enough
        engine.runner.graphs = SimpleNamespace(run=lambda *_: None)  # type: ignore[assignment]
        engine.multi_step = None  # which no machine with graphs has
    if case.random() < 0.5:  # hardly anything is kept beside the KV
        engine._scored = ScoredPrompts(VOCAB, num_tokens=30)
        if engine.scheduler.admission.logits_cache is not None:
            engine.scheduler.admission.logits_cache.num_rows = 6
    reference, proposer = Reference(), None
    if drafts == "real":
        proposer = speculate(engine)
    elif drafts == "random":
        ends = engine.model.eos_token_ids
        proposer = RandomProposer(random.Random(SEED), reference.answer, VOCAB, ends)
        engine.scheduler.proposer = proposer
    hold_to_what_is_left(engine.scheduler)

    def verify(request: Request) -> None:
        assert told(request) == reference(request), f"seed {SEED}: {request.params}"

    rng = random.Random(SEED)
    seen = play(engine, rng, 100, ask_like(rng), verify, arrivals=0.3)
    model: Any = engine.model
    assert not model.unwritten, "a slot was read before it was written"
    assert seen["failures"]
    if proposer is not None:
        drafted, accepted = proposer.num_draft_tokens, proposer.num_accepted_tokens
        assert drafted.total() > accepted.total() > 10
    elif cache == "radix":
        assert (
            engine.scheduler.admission.logits_cache is not None
            and engine.scheduler.admission.logits_cache.num_used > 5
        )


@pytest.mark.parametrize("cache", ["radix", "hash-block"])
def test_behind_an_end_that_was_drafted_over_nothing_is_cached(cache: str) -> None:
    """Not even where the drafts go on behind tokens that end a text."""
    rng, reference = random.Random(SEED), Reference()
    engine = hash_engine(cache, 4, 400, **OPTIONS)
    answers = [greedy([1, 2, i], 30) for i in range(20)]
    proposer = RandomProposer(rng, lambda s: answers[s.request.prompt_token_ids[2]], VOCAB, [])
    engine.scheduler.proposer = proposer
    for number, answer in enumerate(answers):
        params = SamplingParams(
            temperature=0, max_tokens=30, stop_token_ids=[answer[len(answer) // 2]]
        )
        request = engine.add_request([1, 2, number], params)
        finish(engine)
        assert told(request) == reference(request)
        tokens = request.sequences[0].tokens
        assert engine.cache.cached_length(tokens) < len(tokens)
    assert proposer.num_accepted_tokens.total() > 50


def test_nothing_is_drafted_across_salts() -> None:
    engine, params = hash_engine(num_pages=400), SamplingParams(temperature=0, max_tokens=20)
    prompt = next([*range(20), i] for i in range(VOCAB) if len(greedy([*range(20), i], 20)) > 9)
    proposer = speculate(engine)
    drafted = []
    for salt in (None, "a", "b", "a"):
        request = engine.add_request(prompt, params, namespace=salt)
        finish(engine)
        drafted.append(request.output().metrics.accepted_tokens.get("tree", 0))
    assert drafted[:3] == [0, 0, 0] and drafted[3] >= len(greedy(prompt, 20)) - 3
    assert {*proposer._indices} == {"a", "b", None}
    engine.reset_cache()
    assert not proposer._indices


def test_what_has_no_seed_is_drawn_from_the_same_distribution() -> None:
    """The first three tokens, against the probabilities themselves."""
    rng, heat, draws = random.Random(SEED), 0.5, 2000

    def chances(said: list[int]) -> np.ndarray[Any, Any]:
        weights = np.exp((logits_after(np.array([3, 4, *said])) - 4) / heat).astype(float)
        return np.asarray(weights / weights.sum())

    engine = hash_engine(num_pages=2000, max_num_seqs=64)
    frequent = [int(chances([]).argmax())] * 3
    engine.scheduler.proposer = RandomProposer(rng, lambda s: frequent, VOCAB, [])
    params = SamplingParams(temperature=heat, max_tokens=4, ignore_eos=True, n=64)
    seen: Counter[tuple[int, ...]] = Counter()
    while seen.total() < draws:
        request = engine.add_request([3, 4], params)
        finish(engine)
        seen.update(tuple(s.generated[:3].tolist()) for s in request.sequences)
    expected: dict[tuple[int, ...], float] = {}
    for first, one in enumerate(chances([])):
        for second, two in enumerate(chances([first])):
            for third, three in enumerate(chances([first, second])):
                expected[first, second, third] = one * two * three * seen.total()
    common = [triple for triple, count in expected.items() if count >= 5]
    rest = sum(expected.values()) - sum(expected[triple] for triple in common)
    square = sum((seen[t] - expected[t]) ** 2 / expected[t] for t in common)
    square += (seen.total() - sum(seen[t] for t in common) - rest) ** 2 / rest
    assert engine.scheduler.proposer.num_accepted_tokens.total() > 25
    assert square < len(common) + 5 * (2 * len(common)) ** 0.5  # five standard deviations


@covering(
    family=["tabletalk", "gemma3_text", "deepseek_v3"],
    layers=["chosen", "stock"],
    kept=[True, False],
)
def test_a_real_model_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, family: str, layers: Layers, kept: bool
) -> None:
    path = BUNDLED_MODEL
    if family != "tabletalk":
        path = tiny_model(family, tmp_path_factory.mktemp(family), seed=SEED)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)
    answers: dict[str, Any] = {}
    for which in ("off", "on"):
        engine = make_engine(path, page_size=4, layers=layers)
        if not kept:
            engine.scheduler.admission.logits_cache = None
        proposer = speculate(engine) if which == "on" else None
        requests = [run(engine, prompts(250), params) for _ in range(2)]  # at once, and again
        answers[which] = [told(request)[0][0] for some in requests for request in some]
    assert proposer is not None and proposer.num_accepted_tokens["tree"] > 100
    for one, other in zip(*answers.values(), strict=True):
        assert one[:4] == other[:4]
        for before, after in zip(one[4], other[4], strict=True):
            assert [*before.values()] == pytest.approx([*after.values()], abs=1e-3)


@needs_kernels
@pytest.mark.parametrize("family", ["tabletalk", "llama"])
def test_in_exact_mode_the_bits_are_the_same(tmp_path_factory: pytest.TempPathFactory, family: str):
    path = BUNDLED_MODEL
    if family == "llama":
        path = tiny_model(family, tmp_path_factory.mktemp(family), seed=SEED)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=30, logprobs=2, ignore_eos=True)
    asked: list[Prompt] = [*prompts(250), *prompts(250)]
    answers = []
    for speculates in ("off", "auto"):
        with LLM(path, exact=True, speculate=speculates, kv_cache_memory_bytes="16MiB") as llm:
            if speculates == "auto":  # however long this machine takes
                draft_always(llm.engine)
            outputs = [output for _ in range(2) for output in llm.generate(asked, params)]
            answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert answers[0] == answers[1]
    assert sum(sum(o.metrics.accepted_tokens.values()) for o in outputs) > 100


def test_who_has_no_draft_waits_half_a_step_longer_at_most() -> None:
    """For the drafts of others; where all have some, they are as long as they pay."""
    path = np.arange(100, 140, dtype=np.int32)
    proposer = DraftProposer(lambda tokens, *_: [path] if tokens[0] == 1 else [], [])

    def sequence(first: int) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=60)
        request = Request(0, None, as_tokens([first, *range(5)]), params)
        request.add_sequences(60, None)
        return request.sequences[0]

    row = proposer.length.costs(4)[0] / 4  # of a step
    mixed = proposer.propose([sequence(first) for first in (1, 1, 2, 3)], 96)
    assert 0 < sum(map(len, mixed.values())) * row <= 0.5
    alike = proposer.propose([sequence(1) for _ in range(4)], 96)
    assert len(alike) == 4 and sum(map(len, alike.values())) * row > 0.5
