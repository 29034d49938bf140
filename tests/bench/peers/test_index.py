"""The index benchmark, small and with our own index only."""

from __future__ import annotations

import pytest

from bench.peers.index import __main__ as index
from bench.peers.index.cases import CASES
from bench.peers.index.ours import Ours
from bench.peers.index.worker import CONTENDERS
from bench.peers.process import Contender


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("case", "params"),
    [
        ("match", {"length": 300, "node": 64}),
        ("match", {"length": 300, "node": 0, "borrow": True}),
        ("evict", {"leaves": 50, "at_once": 5, "times": 2}),
    ],
)
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
    index.print_row("match 300", results)
    said = capsys.readouterr().out
    missing = "sglang is left out: .venv-of-nobody does not exist: `make bench-index` makes it.\n"
    assert said.startswith(missing) and said.count("left out") == 1 and "ours" in said
