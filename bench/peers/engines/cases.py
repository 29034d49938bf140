"""The requests that every engine is sent, and what is measured of them.

A workload asks one engine and takes its times. Tokens are random, from a seed; answers are greedy
and always `Sizes.answer` tokens long. An engine starts each workload with nothing cached.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

VOCAB = 16_384
"""Tokens are below this; the Llama has as many, SmolLM2 three times as many."""

KV_BYTES = 256 << 20
"""KV memory of every engine: 32,768 tokens of the Llama."""

THREADS = 2


@dataclass(frozen=True)
class Request:
    """A prompt, and what a cache that is kept by hand may know of it.

    Attributes:
        shared: how many of its first tokens other requests have, too.
        conversation: its number, if it is a turn: it begins with the turn before and its answer.
        salt: of its cache, where caches are told apart.
    """

    tokens: list[int]
    shared: int = 0
    conversation: int | None = None
    salt: str | None = None


class Answer(NamedTuple):
    """The answer of an engine to a request.

    Attributes:
        ttft: seconds from the call to the first token.
        tokens: the generated ones.
        cached: prompt tokens that were not computed, if the engine tells.
    """

    ttft: float
    tokens: list[int]
    cached: int | None


class Engine(Protocol):
    """A model that was loaded from a folder or a file, with whatever it caches."""

    version: str

    def generate(self, requests: list[Request], max_tokens: int) -> list[Answer]:
        """Answer requests that come at once; greedy, no end token counts."""

    def forget(self) -> None:
        """Drop what is cached."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the workloads. Lengths are in tokens."""

    document: int = 3000
    question: int = 30
    questions: int = 20
    system: int = 1000
    user: int = 32
    conversations: int = 6
    turns: int = 6
    prefix: int = 1500
    own: int = 30
    at_once: int = 16
    unrelated: int = 256
    prompts: int = 12
    answer: int = 16
    read: int = 1000
    before: int = 64
    written: int = 64
    tries: int = 5


SIZES = {
    "full": Sizes(),
    # Whatever an engine does once, it does here: same lengths, fewer requests.
    "warm-up": Sizes(questions=3, conversations=2, turns=2, prompts=3, tries=1),
    "quick": Sizes(
        document=200, questions=3, system=60, user=8, conversations=2, turns=3, prefix=100,
        at_once=4, unrelated=40, prompts=2, answer=6, read=100, before=20, written=8, tries=2,
    ),
}  # fmt: skip


Figures = dict[str, float]
"""Values by name and unit. More tokens per second are better, less of everything else."""


@dataclass
class Outcome:
    """Figures, and every answer in the order of asking."""

    figures: Figures = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    cached: list[int | None] = field(default_factory=list)


class Asked:
    """Sends requests to an engine and writes down the answers."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self.outcome = Outcome()
        self._engine = engine
        self._max_tokens = max_tokens

    def __call__(
        self, *requests: Request, max_tokens: int | None = None
    ) -> tuple[float, list[Answer]]:
        """Seconds until the last of them was answered, and the answers."""
        wanted = max_tokens or self._max_tokens
        start = time.perf_counter()
        answers = self._engine.generate(list(requests), wanted)
        seconds = time.perf_counter() - start
        for answer in answers:
            if len(answer.tokens) != wanted:
                raise RuntimeError(f"it generated {len(answer.tokens)} tokens")
            self.outcome.answers.append(list(answer.tokens))
            self.outcome.cached.append(answer.cached)
        return seconds, answers


def document(ask: Asked, sizes: Sizes, rng: np.random.Generator) -> Figures:
    """W1: questions about a document, one at a time."""
    text = _tokens(rng, sizes.document)
    times = []
    for _ in range(sizes.questions):
        question = _tokens(rng, sizes.question)
        seconds, (answer,) = ask(Request(text + question, shared=len(text)))
        times.append((answer.ttft, seconds))
    hits = times[1:]
    return {
        "first TTFT, ms": 1000 * times[0][0],
        "TTFT of a hit, ms": 1000 * statistics.median(ttft for ttft, _ in hits),
        "a token after, ms": 1000
        * statistics.median((s - ttft) / (sizes.answer - 1) for ttft, s in hits),
        "all, s": sum(seconds for _, seconds in times),
    }


def conversations(ask: Asked, sizes: Sizes, rng: np.random.Generator) -> Figures:
    """W2: conversations on one system prompt, turn by turn; a turn holds the answers before it."""
    system = _tokens(rng, sizes.system)
    histories = [list(system) for _ in range(sizes.conversations)]
    total, later = 0.0, []
    for turn in range(sizes.turns):
        for number, history in enumerate(histories):
            history += _tokens(rng, sizes.user)
            request = Request(list(history), shared=len(system), conversation=number)
            seconds, (answer,) = ask(request)
            history += answer.tokens
            total += seconds
            if turn:
                later.append(answer.ttft)
    return {"TTFT from turn 2, ms": 1000 * statistics.median(later), "all, s": total}


def burst(ask: Asked, sizes: Sizes, rng: np.random.Generator) -> Figures:
    """W3: requests at once on one prefix, then as many others on the same."""
    prefix = _tokens(rng, sizes.prefix)
    figures = {}
    for name in ("cold", "warm"):
        prompts = [prefix + _tokens(rng, sizes.own) for _ in range(sizes.at_once)]
        figures[f"{name}, s"], _ = ask(*(Request(prompt, shared=len(prefix)) for prompt in prompts))
    return figures


def unrelated(ask: Asked, sizes: Sizes, rng: np.random.Generator) -> Figures:
    """W4: prompts that share nothing, one at a time."""
    times = [ask(Request(_tokens(rng, sizes.unrelated)))[0] for _ in range(sizes.prompts)]
    return {"a request, ms": 1000 * statistics.median(times)}


def speed(ask: Asked, sizes: Sizes, rng: np.random.Generator) -> Figures:
    """W5: tokens per second, read and then written, by one sequence and by eight at once."""
    read, written = [], {1: [], 8: []}  # type: tuple[list[float], dict[int, list[float]]]
    for _ in range(sizes.tries):
        _, (answer,) = ask(Request(_tokens(rng, sizes.read)), max_tokens=1)
        read.append(sizes.read / answer.ttft)
        for count, rates in written.items():
            prompts = [Request(_tokens(rng, sizes.before)) for _ in range(count)]
            seconds, answers = ask(*prompts, max_tokens=sizes.written)
            after = seconds - max(answer.ttft for answer in answers)
            rates.append(count * (sizes.written - 1) / after)
    return {
        "read, tokens/s": statistics.median(read),
        "written by one, tokens/s": statistics.median(written[1]),
        "written by eight, tokens/s": statistics.median(written[8]),
    }


WORKLOADS: dict[str, Callable[[Asked, Sizes, np.random.Generator], Figures]] = {
    "W1": document,
    "W2": conversations,
    "W3": burst,
    "W4": unrelated,
    "W5": speed,
}


def run(workload: str, engine: Engine, sizes: Sizes, seed: int) -> Outcome:
    """One workload, from an empty cache; the same tokens for every engine."""
    engine.forget()
    ask = Asked(engine, sizes.answer)
    rng = np.random.default_rng([seed, list(WORKLOADS).index(workload)])
    ask.outcome.figures = WORKLOADS[workload](ask, sizes, rng)
    return ask.outcome


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()
