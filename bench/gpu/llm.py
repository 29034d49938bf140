"""Checks `LLM()` as users call it, on the GPU, with the bundled model.

Plain transformers in float32, on the CPU, judge every token after those before it: greedy tokens
must be the best ones or tied with them, sampled ones must lie in the nucleus.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from radixcache import LLM, SamplingParams
from radixcache.bench.gpu.equality import Judge
from radixcache.bench.gpu.models import free_memory
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import Report
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL

NEAR = 2e-2
"""Logits this close, as a share of a row's range (some 30 nats), may swap in bfloat16."""

TEMPERATURE, TOP_P = 0.8, 0.9
SLACK = 0.05
"""Probability by which bfloat16 may widen the nucleus."""

TABLE = "\n".join(
    f"{name} is {age} years old and lives in {city}."
    for name, age, city in (("Ann", 31, "Rome"), ("Bob", 25, "Oslo"), ("Cleo", 47, "Lima"))
)
PROMPTS = [
    f"{TABLE}\n{text}"
    for text in ("Who is the oldest?", "Where does Bob live?", "Name all the cities.", "How")
]
MEMORY = "256MB"  # several LLMs run at once, and by default each takes most of the GPU


def run(place: Place, report: Report) -> None:
    llm = _llm(place.dtype)
    judged = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    report.check("attention backend", _backend, place, llm)
    report.check("greedy tokens", _greedy, place, llm, Judge(judged, NEAR))
    report.check("seeded sampling", _sampled, place, llm, Judge(judged, NEAR))
    report.check("float32: the very tokens", _float32, place, Judge(judged, 1e-5))


def _llm(dtype: torch.dtype) -> LLM:
    name = str(dtype).removeprefix("torch.")
    return LLM(device="cuda", dtype=name, kv_cache_memory_bytes=MEMORY, max_num_seqs=16)


def _generate(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _backend(place: Place, llm: LLM) -> str:
    name = llm.engine.model.attention.name
    assert name.startswith("FlashInfer") or not place.with_flashinfer, f"it fell back to {name}"
    return llm.engine.model.placement


def _greedy(place: Place, llm: LLM, judge: Judge) -> str:
    """Judges answers to prompts computed cold, then to the same prompts cached."""
    params = SamplingParams(temperature=0, max_tokens=place.sizes.answer)
    prompts = [llm.encode(prompt) for prompt in PROMPTS]
    return judge([*prompts, *prompts], _generate(llm, params) + _generate(llm, params))


def _sampled(place: Place, llm: LLM, judge: Judge) -> str:
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
    farthest = max(
        _mass_before(judge.logits(llm.encode(prompt), answer), answer)
        for found in answers.values()
        for prompt, answer in zip(PROMPTS, found, strict=True)
    )
    assert farthest < TOP_P + SLACK, f"a token outside of the nucleus: {farthest:.3f} before it"
    return f"at most {farthest:.3f} of probability before a token"


def _mass_before(logits: torch.Tensor, answer: list[int]) -> float:
    """The largest total probability of likelier tokens, over the tokens of the answer."""
    shares = (logits / TEMPERATURE).softmax(-1)
    own = shares.gather(-1, torch.tensor(answer)[:, None])
    return float((shares * (shares > own)).sum(-1).max())


def _float32(place: Place, judge: Judge) -> str:
    llm = _llm(torch.float32)
    verdict = _greedy(place, llm, judge)
    del llm
    free_memory()
    return verdict
