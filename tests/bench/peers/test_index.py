"""The index benchmark, small and with our own index only, and a brute-force LRU beside it."""

from __future__ import annotations

import pytest

from bench.peers.index import __main__ as index
from bench.peers.index.cases import CASES
from bench.peers.index.ours import Ours
from bench.peers.index.trace_t import HitCount, Replayed, Request, TraceT, replay
from bench.peers.index.worker import CONTENDERS
from bench.peers.process import Contender

SMALL = [
    ("match", {"length": 300, "node": 64}),
    ("match", {"length": 300, "node": 0, "borrow": True}),
    ("convert", {"length": 100}),
    ("insert", {"cached": 64, "new": 32, "rounds": 3}),
    ("evict", {"leaves": 50, "at_once": 5, "times": 2}),
    ("chunked", {"length": 256, "chunks": 4, "rounds": 3}),
    ("trace_t", {"conversations": 40, "segment": 80}),
]


class TokenLRU:
    """Trace T under exact LRU, token by token, without a tree or a page table. Page size 1.

    The system prompt (owner -1) stays, since somebody always runs on it. A conversation's resident
    tokens are a count: its last ones go first, and only while it does not run.
    """

    def __init__(self, trace: TraceT) -> None:
        self.trace, self.free = trace, trace.num_pages(1)
        self.resident: dict[int, int] = {}
        self.idle: dict[int, None] = {}
        """Conversations that do not run, the least recently used first."""

    def decode(self, requests: list[Request]) -> None:
        for request in requests:
            self._take(request.conversation, 1)

    def admit(self, request: Request) -> int:
        own, system = (self.resident.get(o, 0) for o in (request.conversation, -1))
        hit = system + own
        self.idle.pop(request.conversation, None)
        self._take(-1, self.trace.system - system)
        self._take(request.conversation, request.num_prompt - self.trace.system - own)
        return hit

    def end_step(self) -> None:
        pass

    def finish(self, request: Request) -> None:
        self.idle[request.conversation] = None

    def _take(self, owner: int, count: int) -> None:
        for _ in range(count):
            if not self.free:
                victim = next(o for o in self.idle if self.resident[o])
                self.resident[victim] -= 1
                self.free += 1
            self.free -= 1
            self.resident[owner] = self.resident.get(owner, 0) + 1


def play(trace: TraceT, cache: Replayed) -> HitCount:
    *_, last = replay(trace, cache)
    return last


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("case", "params"), SMALL)
def test_every_case_gives_rounds_of_our_index(case, params, page_size):
    rounds = CASES[case](Ours, seed=1, page_size=page_size, **params)
    next(rounds)
    for _ in range(2):
        assert next(rounds)["value"] > 0


def test_rows_are_run_in_turns_and_a_library_that_is_not_installed_is_named(monkeypatch, capsys):
    nobodys = Contender(".venv-of-nobody", "nothing", "Nothing")
    monkeypatch.setitem(CONTENDERS, "sglang-rust", nobodys)
    row = index.Row("match 300", "match", 2, {"length": 300, "node": 64})
    workers = index.Workers(["vllm"])
    results = index.run(row, 1, 0, workers)
    workers.kept["ours"].close()
    (result,) = results.values()
    assert result.found == 299 and len(result.rounds) == 2 and not result.error
    index.print_row("match 300", results, "µs")
    said = capsys.readouterr().out
    missing = "sglang is left out: .venv-of-nobody does not exist: `make bench-index` makes it.\n"
    assert said.startswith(missing) and said.count("left out") == 1 and "ours" in said


@pytest.mark.parametrize("seed", range(5))
def test_hits_of_page_size_1_are_those_of_an_exact_lru(seed):
    """With room reserved as it is needed: what is reserved ahead is evicted a little early."""
    trace = TraceT(seed, 30, turns=4, system=20, user=5, generated=7, in_flight=3)
    ours = Ours(trace.num_pages(1), 1, trace.texts(), "token")
    found = play(trace, ours)
    assert found == play(trace, TokenLRU(trace)) and found.requests == trace.requests
    assert ours.cache.stats.evicted_tokens > 0
    whole = TraceT(**{**vars(trace), "pool_share": 1.0})
    assert found.hit_tokens < play(whole, TokenLRU(whole)).hit_tokens
    ours.cache.check()


@pytest.mark.exhaustive
def test_hits_of_the_whole_trace_are_those_of_an_exact_lru():
    trace = TraceT()
    found = play(trace, Ours(trace.num_pages(1), 1, trace.texts(), "token"))
    assert found == play(trace, TokenLRU(trace))
    assert (found.hit_tokens, found.prompt_tokens) == (7_379_127, 11_800_000)
