"""`LLM()` as its users have it, on the device against the CPU, with the bundled model.

The CPU's LLM, in float32, judges every token by the log-probabilities that it gives the answer as a
prompt: greedy tokens are its best ones or tied with them, sampled ones lie in its nucleus.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from radixcache import LLM, RequestOutput, SamplingParams
from radixcache.bench.gpu.models import free_memory
from radixcache.bench.gpu.place import Place
from radixcache.bench.gpu.report import NotRun, Report

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


def run(place: Place, report: Report) -> None:
    cpu, llm = LLM(device="cpu", kv_cache_memory_bytes=MEMORY), _llm(place, place.dtype)
    report.check("attention backend", _backend, place, llm)
    report.check("greedy tokens are the CPU's", _greedy, place, llm, cpu)
    report.check("seeded sampling", _sampled, place, llm, cpu)
    report.check("stop strings", _stopped, place, llm)
    report.check("concurrent streams, a third aborted", _streams, place, llm, cpu)
    report.check("float32: the very tokens of the CPU", _float32, place, cpu)
    report.check("a fresh process gives the same tokens", _restarted, place, llm)
    for dtype in dict.fromkeys((torch.float32, place.dtype)):
        report.check(f"HTTP server, {dtype}", _served, place, cpu, dtype)


def _llm(place: Place, dtype: torch.dtype) -> LLM:
    streams = place.sizes.streams
    return LLM(
        device="cuda", dtype=_name(dtype), kv_cache_memory_bytes=MEMORY, max_num_seqs=streams
    )


def _greedily(place: Place, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=place.sizes.tokens, **options)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _backend(place: Place, llm: LLM) -> str:
    name = llm.engine.model.attention.name
    assert name.startswith("FlashInfer") or not place.kernels, f"attention fell back to {name}"
    return llm.engine.model.placement


def _generate(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _greedy(place: Place, llm: LLM, cpu: LLM) -> str:
    told = []
    for turn in ("cold", "cached"):
        answers = _generate(llm, PROMPTS, _greedily(place))
        told.append(f"{turn} {_judge(cpu, PROMPTS, answers)}")
    return ", ".join(told)


def _judge(cpu: LLM, prompts: list[str], answers: list[list[int]]) -> str:
    own = count = 0
    for scores in _scores(cpu, prompts, answers):
        for token, likely in scores:
            gap = max(likely.values()) - likely[token]
            assert gap <= TIE, f"{token} is {gap:.2g} nats less likely than the CPU's token"
            own, count = own + (gap == 0), count + 1
    return f"{own} of {count} tokens" + (f", {count - own} tied" if own < count else "")


def _scores(
    cpu: LLM, prompts: list[str], answers: list[list[int]]
) -> list[list[tuple[int, dict[int, float]]]]:
    """Each token of the answers, with the log-probabilities of it and of the likeliest 20."""
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=20)
    scores = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*cpu.encode(prompt), *answer]
        (output,) = cpu.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        likely = (output.prompt_logprobs or [])[len(tokens) - len(answer) :]
        scores.append([(t, one or {}) for t, one in zip(answer, likely, strict=True)])
    return scores


def _sampled(place: Place, llm: LLM, cpu: LLM) -> str:
    answers: dict[int, list[list[int]]] = {}
    for seed in (1, 1, *range(2, 9)):  # the model is sure of most tokens
        params = SamplingParams(
            temperature=TEMPERATURE, top_p=TOP_P, seed=seed, max_tokens=place.sizes.tokens,
            ignore_eos=True,
        )  # fmt: skip
        found = _generate(llm, PROMPTS, params)
        assert answers.setdefault(seed, found) == found, "one seed gives two answers"
        if found != answers[1]:
            break
    else:
        raise AssertionError("all seeds give one answer")
    scores = [one for found in answers.values() for one in _scores(cpu, PROMPTS, found)]
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


def _stopped(place: Place, llm: LLM) -> str:
    (plain,) = llm.generate(PROMPTS[:1], _greedily(place, ignore_eos=True), use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[len(text) // 2 :][:2]
    params = _greedily(place, ignore_eos=True, stop=stop)
    (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    found = output.outputs[0]
    assert found.text == text[: text.index(stop)], f"{found.text!r} of {text!r}, stop {stop!r}"
    assert found.finish_reason == "stop" and found.stop_reason == stop
    return f"{stop!r} ends {found.text!r}"


def _streams(place: Place, llm: LLM, cpu: LLM) -> str:
    prompts = [PROMPTS[i % len(PROMPTS)] + " " * (i % 3) for i in range(place.sizes.streams)]
    streams = [llm.stream(prompt, _greedily(place)) for prompt in prompts]
    last: dict[int, RequestOutput] = {}
    for row, stream in enumerate(streams):
        for output in stream:
            last[row] = output
            if row % 3 == 0:
                break
        stream.close()
    llm.cache.check()
    assert not llm.engine.has_work, "an aborted stream still runs"
    rows = [row for row in last if row % 3]
    answers = [last[row].outputs[0].token_ids for row in rows]
    return f"{len(streams)} streams: {_judge(cpu, [prompts[row] for row in rows], answers)}"


def _float32(place: Place, cpu: LLM) -> str:
    llm = _llm(place, torch.float32)
    params = _greedily(place)
    found, right = _generate(llm, PROMPTS, params), _generate(cpu, PROMPTS, params)
    del llm
    free_memory()
    assert found == right, f"{found} instead of {right}"
    return f"{sum(map(len, found))} tokens"


def _options(verb: str, dtype: torch.dtype) -> list[str]:
    """Of the command line."""
    return [verb, "--device", "cuda", "--dtype", _name(dtype), "--kv-cache-memory-bytes", MEMORY]


def generate_apart(options: Sequence[str]) -> str:
    """What the command line prints, in a fresh process."""
    command = [sys.executable, "-m", "radixcache", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serve_apart(options: Sequence[str]) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "radixcache", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            told = []
            for line in server.stderr:
                told.append(line)
                if " at http" in line:
                    break
            else:
                raise AssertionError("".join(told) or "the server says nothing")
            yield line.split(" at ")[1].split()[0]
        finally:
            server.kill()


def _restarted(place: Place, llm: LLM) -> str:
    llm.cache.reset()
    (right,) = _generate(llm, PROMPTS[:1], _greedily(place))
    sampling = ["--temperature", "0", "--max-tokens", str(place.sizes.tokens)]
    options = [*_options("generate", place.dtype), "--prompt", PROMPTS[0], "--json", *sampling]
    found = json.loads(generate_apart(options).splitlines()[-1])["outputs"][0]["token_ids"]
    assert found == right, f"{found} instead of {right}"
    return f"{len(found)} tokens"


def _served(place: Place, cpu: LLM, dtype: torch.dtype) -> str:
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise NotRun(f"{' and '.join(missing)} cannot be imported")
    right = [o.outputs[0].text for o in cpu.generate(PROMPTS, _greedily(place), use_tqdm=False)]
    refused = 0
    with serve_apart([*_options("serve", dtype), "--port", "0"]) as url:

        def ask(prompt: str) -> str:
            text: str = _post(url, prompt, max_tokens=place.sizes.tokens)["choices"][0]["text"]
            return text

        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            found = list(clients.map(ask, PROMPTS))
        try:
            _post(url, "x", max_tokens=-1)
        except HTTPError as error:
            refused = error.code
    equal = sum(map(str.__eq__, found, right))
    assert equal == len(right) or dtype != torch.float32, f"{found} instead of {right}"
    assert refused in (400, 422), f"a bad request gets status {refused or 200}"
    return f"{equal} of {len(right)} texts are the CPU's"


def _post(url: str, prompt: str, **options: Any) -> Any:
    body = {"model": "tabletalk", "prompt": prompt, "temperature": 0, **options}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=30) as answer:
        return json.load(answer)
