"""The index benchmark, small and with our own index only, and the brute-force LRU beside it."""

from functools import partial

import pytest

from bench.peers.index import __main__ as index
from bench.peers.index.cases import CASES
from bench.peers.index.ours import Ours
from bench.peers.index.trace_t import TraceT, arrivals, replay_all
from tests.bench.peers.token_lru import TokenLRU

SMALL = [
    ("match", {"length": 300, "node": 64}),
    ("match", {"length": 300, "node": 0, "borrow": True}),
    ("convert", {"length": 100}),
    ("insert", {"cached": 64, "new": 32, "rounds": 3}),
    ("evict", {"leaves": 50, "at_once": 5, "times": 2}),
    ("chunked", {"length": 256, "chunks": 4, "rounds": 3}),
    ("trace_t", {"conversations": 40, "segment": 80}),
]


def small_trace(seed, **fields):
    sizes = {"conversations": 30, "turns": 4, "system": 20, "user": 5, "generated": 7}
    return TraceT(**{"seed": seed, "in_flight": 3, **sizes, **fields})


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("case", "params"), SMALL)
def test_every_case_gives_rounds_of_our_index(case, params, page_size):
    rounds = CASES[case](partial(Ours, decoding="ahead"), seed=1, page_size=page_size, **params)
    next(rounds)
    for _ in range(2):
        found = next(rounds)
        times = found.get("ns") or list(found["phases"].values())
        # Less the clock's own cost, which a busy machine may misjudge for a phase, not for all.
        assert sum(times) > 0


def test_a_library_that_is_not_installed_is_named_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(index.LIBRARIES, "vllm", ".venv-of-nobody")
    workers = index.Workers([])
    assert workers.of("vllm") is None and workers.of("vllm") is None
    said = capsys.readouterr().out
    assert said == (
        "vllm is left out: .venv-of-nobody does not exist: `make bench-index` makes it.\n"
    )


def test_rows_are_run_in_turns_and_printed(capsys):
    row = index.Row("match 300", "match", {"length": 300, "node": 64}, 2, ("ours", "vllm"))
    workers = index.Workers(["vllm"])
    (result,) = index.run(row, 0, workers)
    workers.close()
    assert result.found == 299 and len(result.rounds) == 2 and not result.error
    index.print_row(row, [result])
    assert "ours" in capsys.readouterr().out


def test_a_path_of_512_token_nodes_is_one():
    ours = Ours(4096, 16, [])
    rounds = CASES["match"](lambda *_: ours, seed=0, page_size=16, length=2048, node=512)
    assert next(rounds)["found"] == 2047
    assert len(list(ours.cache._tree)) == 1 + 4 + 3  # root, path, branches


@pytest.mark.parametrize("seed", range(5))
def test_hits_of_page_size_1_are_those_of_an_exact_lru(seed):
    """With room reserved as it is needed: what is reserved ahead is evicted a little early."""
    trace = small_trace(seed)
    ours = Ours(trace.num_pages(1), 1, trace.texts(), "token")
    found, exact = replay_all(trace, ours), replay_all(trace, TokenLRU(trace))
    assert found == exact
    assert found.requests == trace.requests
    assert ours.cache.stats.evicted_tokens > 0
    assert found.rate < replay_all(*unlimited(trace)).rate
    ours.cache.check()


@pytest.mark.exhaustive
def test_hits_of_the_whole_trace_are_those_of_an_exact_lru():
    trace = TraceT()
    found = replay_all(trace, Ours(trace.num_pages(1), 1, trace.texts(), "token"))
    assert found == replay_all(trace, TokenLRU(trace))
    assert (found.hit_tokens, found.prompt_tokens) == (7_379_127, 11_800_000)


def unlimited(trace: TraceT) -> tuple[TraceT, TokenLRU]:
    """The trace with room for all of it."""
    whole = TraceT(**{**trace.__dict__, "pool_share": 1.0})
    return whole, TokenLRU(whole)


def test_unlimited_memory_hits_what_was_computed_before():
    trace, lru = unlimited(small_trace(0, conversations=6))
    hits = replay_all(trace, lru).hit_tokens
    by_hand = 0
    for number, request in enumerate(arrivals(trace)):
        known = request.num_prompt - trace.user  # the last generated token has no KV
        by_hand += known - (known > trace.system) if number else 0
    assert hits == by_hand
