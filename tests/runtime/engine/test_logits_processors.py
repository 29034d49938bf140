"""Edits of logits against their definitions, worked out token by token; and that what one request
asks for changes no other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixcache import InvalidRequest, SamplingParams
from radixcache.runtime.engine.engine import Engine
from radixcache.runtime.engine.logits_processors import LogitsProcessors
from radixcache.runtime.engine.output_processor import NOT_A_NUMBER
from radixcache.runtime.engine.rows import Row
from radixcache.runtime.request import Request, Sequence
from radixcache.runtime.sampling.penalties import NOTHING_LEFT, PenaltyState
from radixcache.runtime.spec_decode.proposer import NO_TOKENS
from radixcache.tokens import as_tokens
from tests.helpers import engines
from tests.helpers.engines import assert_no_page_is_lost, finish, generated, plain_model
from tests.helpers.models import EOS, VOCAB_SIZE
from tests.helpers.simulated_cuda import simulated_cuda

SEED = 20_261_125
CPU = torch.device("cpu")


def encode(text: str) -> list[int]:
    """A token for each byte, as the tiny models' tokenizer has it, but one for ` ab`."""
    return [250 if part == b" ab" else byte for part in _split(text.encode()) for byte in part[:1]]


def _split(text: bytes) -> list[bytes]:
    parts = []
    while text:
        length = 3 if text.startswith(b" ab") else 1
        parts.append(text[:length])
        text = text[length:]
    return parts


def reference(
    logits: np.ndarray, prompt: list[int], said: list[int], params: SamplingParams, ends: set[int]
) -> np.ndarray:
    """The definition, one token after the other, in float32."""
    edited = logits.astype(np.float32).copy()
    for token in range(len(edited)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            edited[token] = -np.inf
    for word in params.bad_words or ():
        for text in (word, f" {word}"):
            *before, last = encode(text)
            if said[len(said) - len(before) :] == before:
                edited[last] = -np.inf
    if len(said) < params.min_tokens:
        own = set() if params.ignore_eos else ends
        for token in own | set(params.stop_token_ids or ()):
            edited[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += np.float32(bias)
    for token in {*prompt, *said}:
        penalty = np.float32(params.repetition_penalty)
        edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
    for token in {*said}:
        edited[token] -= np.float32(params.frequency_penalty) * np.float32(said.count(token))
        edited[token] -= np.float32(params.presence_penalty)
    return edited


def random_params(rng: random.Random, vocab: int, **more: Any) -> SamplingParams:
    """Each edit in half of the cases; none at all in some."""
    options: dict[str, Any] = {
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([0.5, 1.1, 2.0]),
        "logit_bias": {rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(3)},
        "bad_words": rng.sample(["a", "ab", "ba", "aab", "b c"], 2) if vocab > 250 else [],
        "allowed_token_ids": rng.sample(range(vocab), max(3, vocab // 2)),
        "min_tokens": rng.randrange(5),
        "stop_token_ids": [rng.randrange(vocab)],
        "ignore_eos": True,
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.5}
    return SamplingParams(**{"max_tokens": 24, **more, **(chosen if rng.random() < 0.8 else {})})


def make_sequence(
    prompt: list[int], params: SamplingParams, vocab: int, ends: set[int]
) -> Sequence:
    request = Request(0, None, as_tokens(prompt), params)
    penalties = PenaltyState(params, vocab, ends, encode)
    request.penalties = penalties if penalties.any else None
    request.add_sequences(24, None)
    sequence = request.sequences[0]
    sequence.num_computed = len(sequence)
    return sequence


def rows_of(sequences: list[Sequence]) -> list[Row]:
    return [Row(sequence, NO_TOKENS) for sequence in sequences]


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("vocab", [5, 260])
def test_logits_are_edited_as_the_definitions_say(vocab: int, place: str) -> None:
    """In batches whose members come, go, pause and change places."""
    rng = random.Random(SEED)
    common = [*rng.choices(range(vocab), k=3), 97, 98, 32]  # so that words come about
    common, ends = [token % vocab for token in common], {vocab - 2}
    params = [random_params(rng, vocab) for _ in range(12)]
    prompts = [rng.choices(common, k=rng.randrange(1, 9)) for _ in params]
    sequences = [
        make_sequence(prompt, one, vocab, ends) for prompt, one in zip(prompts, params, strict=True)
    ]
    editor, before = LogitsProcessors(), list[Sequence]()
    with simulated_cuda() as simulated:
        device = torch.device("cuda", 0) if place == "device" else CPU
        for step in range(23):
            batch = rng.sample(before, rng.randrange(1, 1 + len(before))) if step % 3 == 2 else (
                rng.sample(sequences, rng.randrange(1, 13)) if step % 2 else before or sequences
            )  # fmt: skip
            new = [rng.choice(common) for _ in batch]  # what the step before has given
            for sequence, token in zip(batch, new, strict=True):
                if step:
                    sequence.append(token)
                sequence.num_computed = len(sequence)
            logits = 8 * torch.randn(len(batch), vocab, generator=torch.manual_seed(SEED + step))
            raw = logits.to(device)
            simulated.waits.clear()
            edited = editor.edit(rows_of(batch), raw)
            assert not simulated.waits
            assert torch.equal(raw.cpu(), logits), "raw logits are for others, too"
            for row, sequence in zip(range(len(batch)), batch, strict=True):
                index = sequences.index(sequence)
                said = sequence.generated.tolist()
                wanted = reference(logits[row].numpy(), prompts[index], said, params[index], ends)
                np.testing.assert_allclose(edited[row].cpu().numpy(), wanted, rtol=1e-5, atol=1e-5)
            before = batch


def make_engine(path: Path, *, ahead: bool = False, **options: Any) -> Engine:
    engine = engines.make_engine(path, **options)
    engine._encode, engine.overlap = encode, ahead
    return engine


def test_greedy_tokens_are_the_likeliest_by_the_definitions_over_transformers_logits(path) -> None:
    engine, rng, compared = make_engine(path), random.Random(SEED), 0
    requests = [
        engine.add_request(
            rng.choices(range(90, 100), k=9), random_params(rng, VOCAB_SIZE, temperature=0.0)
        )
        for _ in range(8)
    ]
    finish(engine)
    for request in requests:
        prompt, said = request.prompt_token_ids.tolist(), generated([request])[0][0]
        with torch.inference_mode():
            rows = plain_model(path)(torch.tensor([prompt + said])).logits[0]
        for place, token in enumerate(said):
            row = rows[len(prompt) + place - 1].numpy()
            edited = reference(row, prompt, said[:place], request.params, {EOS})
            assert edited[token] >= edited.max() - 1e-3, f"seed {SEED}"
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_has_no_token_left_fails_and_the_others_go_on(path, ahead, temperature) -> None:
    engine = make_engine(path, ahead=ahead)
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 12}
    stuck = engine.add_request(
        [97], SamplingParams(allowed_token_ids=[*b"ab"], bad_words=["aa", "ab", "b"], **options)
    )
    other = engine.add_request([97, 98], SamplingParams(presence_penalty=1, **options))
    finish(engine)
    assert stuck.error == NOTHING_LEFT and stuck.sequences[0].finish_reason == "error"
    assert stuck.sequences[0].generated.tolist() == [97]
    alone = engines.run(make_engine(path), [[97, 98]], other.params)
    assert generated([other]) == generated(alone) and other.error is None
    assert_no_page_is_lost(engine)


@pytest.mark.parametrize(
    ("ahead", "bad", "options"),
    [
        (False, float("nan"), {"temperature": 0.0}),
        (True, float("inf"), {"temperature": 0.0}),
        (True, float("nan"), {"top_p": 0.9}),
        (False, float("inf"), {"presence_penalty": 1.0}),
    ],
)
def test_who_gets_no_numbers_from_the_model_fails_and_the_others_go_on(
    path, ahead, bad, options, monkeypatch
) -> None:
    params = SamplingParams(**{"seed": 1, "max_tokens": 6, "ignore_eos": True, **options})
    alone = generated(engines.run(make_engine(path), [[97, 98]], params))
    engine = make_engine(path, ahead=ahead)
    forward = engine.model.forward

    def spoiled(tokens, batch, rows, *rest):
        logits = forward(tokens, batch, rows, *rest).clone()
        logits[torch.as_tensor(tokens)[torch.as_tensor(rows)] == 99, 5] = bad
        return logits

    monkeypatch.setattr(engine.model, "forward", spoiled)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    asked = (([97, 99], params), ([96, 99], scored), ([97, 98], params))
    *broken, other = (engine.add_request(prompt, one) for prompt, one in asked)
    finish(engine)
    for request in broken:
        assert request.error == NOT_A_NUMBER and not len(request.sequences[0].generated)
    assert generated([other]) == alone and other.error is None
    assert_no_page_is_lost(engine)


def test_what_a_model_does_not_know_is_refused_when_it_is_queued(path) -> None:
    engine = engines.make_engine(path)
    for options, sentence in (
        (
            {"logit_bias": {VOCAB_SIZE: 1}},
            r"logit_bias has token ids outside the vocabulary \[0, 2",
        ),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids has token ids outside"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids has token ids outside"),
        ({"bad_words": ["x"]}, "bad_words need a tokenizer"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            engine.add_request([1, 2], SamplingParams(**options))
    engine._encode = encode
    with pytest.raises(InvalidRequest, match="bad_words must have tokens, and '  ' has none"):
        engine.add_request([1, 2], SamplingParams(bad_words=["  "]))
    assert not engine.has_work
    engine.check()
