"""Drafts change no token: with right and wrong ones, everything is as it is without any."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from radixcache import SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.request import Request, Sequence
from tests.cover import covering
from tests.drafts import RandomProposer, speculate
from tests.engines import finish
from tests.hash_model import VOCAB, hash_engine
from tests.runtime.engine.cut_off import GUIDES, STRUCTURES, TEXTS
from tests.traffic import Asked, play

SEED = 20_261_125
ENDS = VOCAB - 1


def decode(ids: list[int], special: bool = False) -> str:
    return "".join(TEXTS[i] for i in ids)


def encode(text: str) -> list[int]:
    return [TEXTS.index(letter) for letter in text]


OPTIONS: dict[str, Any] = {"decode": decode, "encode": encode, "grammar_backend": GUIDES}


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
        asked["prompt_logprobs"] = 1
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
    """What an engine without drafts says to a request that it has for itself."""

    def __init__(self) -> None:
        self._engine = hash_engine(num_pages=2000, **OPTIONS)
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


def play_with_drafts(engine: Engine, seed: int, kind: str, num_requests: int) -> Counter[str]:
    rng, reference = random.Random(seed), Reference()
    if kind == "real":
        proposer = speculate(engine)
    else:
        drafts = random.Random(seed)
        proposer = RandomProposer(drafts, reference.answer, VOCAB, engine.model.eos_token_ids)
        engine.scheduler.proposer = proposer

    def verify(request: Request) -> None:
        assert told(request) == reference(request), f"seed {seed}: {request.params}"

    seen = play(engine, rng, num_requests, ask_like(rng), verify, arrivals=0.3)
    model: Any = engine.model
    assert not model.unwritten, "a slot was read before it was written"
    seen["drafted"] = proposer.num_draft_tokens.total()
    seen["accepted"] = proposer.num_accepted_tokens.total()
    return seen


@covering(
    drafts=["real", "random"],
    cache=["radix", "hash-block", "none"],
    page_size=[1, 4, 16],
    budget=[20, 200],
    tight=[True, False],
    ahead=[True, False],
)
def test_every_answer_is_as_it_is_without_drafts(
    drafts: str, cache: str, page_size: int, budget: int, tight: bool, ahead: bool
) -> None:
    num_pages = (160 if tight else 1000) // page_size + 4
    engine = hash_engine(cache, page_size, num_pages, budget, **OPTIONS)
    engine._runs_ahead = ahead
    seen = play_with_drafts(engine, SEED, drafts, 60)
    assert seen["accepted"] > 10 and seen["drafted"] > seen["accepted"] and seen["failures"]
