"""`LLM()` as its users have it, on the device against the CPU, with the bundled model.

The CPU's LLM, in float32, judges every token by the log-probabilities that it gives the answer as a
prompt: greedy tokens are its best ones or tied with them, sampled ones lie in its nucleus.
"""

from __future__ import annotations

import math

import torch

from radixcache import LLM, SamplingParams
from radixcache.bench.gpu.models import free_memory
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report

TIE = 0.5
"""Nats between two tokens that bfloat16 may swap."""

TEMPERATURE, TOP_P = 0.8, 0.9
SLACK = 0.05
"""Of probability, by which bfloat16 may widen the nucleus."""

TABLE = "\n".join(
    f"{name} is {age} years old and lives in {city}."
    for name, age, city in (("Ann", 31, "Rome"), ("Bob", 25, "Oslo"), ("Cleo", 47, "Lima"))
)
PROMPTS = [
    f"{TABLE}\n{text}"
    for text in ("Who is the oldest?", "Where does Bob live?", "Name all the cities.", "How")
]
MEMORY = "256MB"  # several LLMs are there at once, and by default each takes most of the device

Scores = list[list[tuple[int, dict[int, float]]]]
"""Each token of the answers, with the log-probabilities of it and of the likeliest 20."""


def run(place: Place, report: Report) -> None:
    cpu, llm = LLM(device="cpu", kv_cache_memory_bytes=MEMORY), _llm(place.dtype)
    report.check("attention backend", _backend, place, llm)
    report.check("greedy tokens are the CPU's", _greedy, place, llm, cpu)
    report.check("seeded sampling", _sampled, place, llm, cpu)
    report.check("float32: the very tokens of the CPU", _float32, place, cpu)


def _llm(dtype: torch.dtype) -> LLM:
    name = str(dtype).removeprefix("torch.")
    return LLM(device="cuda", dtype=name, kv_cache_memory_bytes=MEMORY, max_num_seqs=16)


def _greedily(place: Place) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=place.sizes.answer)


def _generate(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _backend(place: Place, llm: LLM) -> str:
    name = llm.engine.model.attention.name
    assert name.startswith("FlashInfer") or not place.kernels, f"attention fell back to {name}"
    return llm.engine.model.placement


def _greedy(place: Place, llm: LLM, cpu: LLM) -> str:
    own = count = 0
    for _ in ("cold", "cached"):
        for scores in _scores(cpu, _generate(llm, _greedily(place))):
            for token, likely in scores:
                gap = max(likely.values()) - likely[token]
                assert gap <= TIE, f"{token} is {gap:.2g} nats less likely than the CPU's token"
                own, count = own + (gap == 0), count + 1
    return f"{own} of {count} tokens" + (f", {count - own} tied" if own < count else "")


def _scores(cpu: LLM, answers: list[list[int]]) -> Scores:
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=20)
    scores = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = [*cpu.encode(prompt), *answer]
        (output,) = cpu.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        likely = (output.prompt_logprobs or [])[len(tokens) - len(answer) :]
        scores.append([(t, one or {}) for t, one in zip(answer, likely, strict=True)])
    return scores


def _sampled(place: Place, llm: LLM, cpu: LLM) -> str:
    answers: dict[int, list[list[int]]] = {}
    for seed in (1, 1, *range(2, 9)):  # the model is sure of most tokens
        params = SamplingParams(
            temperature=TEMPERATURE, top_p=TOP_P, seed=seed, max_tokens=place.sizes.answer,
            ignore_eos=True,
        )  # fmt: skip
        found = _generate(llm, params)
        assert answers.setdefault(seed, found) == found, "one seed gives two answers"
        if found != answers[1]:
            break
    else:
        raise AssertionError("all seeds give one answer")
    scores = [one for found in answers.values() for one in _scores(cpu, found)]
    farthest = max(_mass_before(*token) for answer in scores for token in answer)
    assert farthest < TOP_P + SLACK, f"a token outside of the nucleus: {farthest:.3f} before it"
    return f"at most {farthest:.3f} of probability before a token"


def _mass_before(token: int, likely: dict[int, float]) -> float:
    """At least so much probability have the likelier tokens together, at `TEMPERATURE`."""
    weights = {t: math.exp(logprob / TEMPERATURE) for t, logprob in likely.items()}
    # Those that are not told are no likelier than the last of the others.
    rest = max(0.0, 1 - sum(map(math.exp, likely.values())))
    total = sum(weights.values()) + rest * min(weights.values()) ** (1 - TEMPERATURE)
    return sum(w for w in weights.values() if w > weights[token]) / total


def _float32(place: Place, cpu: LLM) -> str:
    llm = _llm(torch.float32)
    params = _greedily(place)
    found, right = _generate(llm, params), _generate(cpu, params)
    del llm
    free_memory()
    assert found == right, f"{found} instead of {right}"
    return f"{sum(map(len, found))} tokens"
