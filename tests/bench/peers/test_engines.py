"""The benchmark of whole engines: its requests, the engines that run here, its tables."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from bench.peers.engines import __main__ as engines
from bench.peers.engines import cases
from bench.peers.engines.cases import SIZES, WORKLOADS, Answer, Sizes
from bench.peers.engines.gguf_model import interleave
from bench.peers.engines.worker import ENGINES
from bench.peers.process import Failed
from bench.peers.report import comparison
from radixcache.bench.machine import held_bytes
from tests.helpers.models import VOCAB_SIZE, tiny_model


def test_tokens_per_second_are_read_before_the_first_and_written_after_it(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Timed:
        version = "0"

        def generate(self, requests, max_tokens):
            """Half a second to the first token, a tenth for each one after."""
            clock.now += 0.5 + 0.1 * (max_tokens - 1)
            return [Answer(0.5, [0] * max_tokens, None) for _ in requests]

        def forget(self):
            pass

    monkeypatch.setattr(cases, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    figures = cases.run("W5", Timed(), SIZES["full"], 0).figures
    assert figures == {
        "read, tokens/s": 2000,
        "written by one, tokens/s": pytest.approx(10),
        "written by eight, tokens/s": pytest.approx(80),
    }


def test_engines_that_run_here_agree_on_every_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "VOCAB", VOCAB_SIZE)
    sizes = Sizes(40, 7, 3, 20, 5, 2, 3, 30, 6, 3, 12, 2, 6, 40, 10, 6, 1)
    tiny_model("llama", tmp_path, 0, tokenizer=False)
    answers, cached = {}, {}
    for name in ("transformers", "ours", "transformers-kept"):
        engine = ENGINES[name].load()(tmp_path)
        for workload in WORKLOADS:
            outcome = cases.run(workload, engine, sizes, 0)
            assert all(value > 0 for value in outcome.figures.values())
            answers[name, workload], cached[name, workload] = outcome.answers, outcome.cached
    for (name, workload), found in answers.items():
        assert found == answers["transformers", workload], name
    for name in ("ours", "transformers-kept"):
        assert cached[name, "W1"] == [0, 40, 40]
        # 20 system, 5 user; a turn knows all of the turn before but its last token.
        assert cached[name, "W2"] == [0, 20, 30, 30, 41, 41]
    assert not any(any(cached["transformers", name]) for name in ("W1", "W2", "W3"))


class FakeWorker:
    """Does what `Worker` does; "vllm" breaks in W2, "llama.cpp" does not start."""

    def __init__(self, venv, made_by, module, engine, path, **environment):
        if engine == "llama.cpp":
            raise Failed("ImportError: no such thing")
        self.engine, self.version = engine, "1"
        self.process = SimpleNamespace(pid=os.getpid())

    def ask(self, request):
        if self.engine == "vllm" and request["workload"] == "W2":
            raise Failed("RuntimeError: too little memory")
        return {"figures": {}, "answers": []}

    def close(self):
        pass


@pytest.fixture
def take_turns(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "Worker", FakeWorker)

    def take(**more):
        more = {"without": [], "quick": True, "rounds": 2, "seed": 0, "model": None, **more}
        return engines.take_turns(Namespace(**more), tmp_path)

    return take


def test_engines_that_fail_are_named_once_and_left_out(take_turns, capsys):
    turns = take_turns(only=["W2", "W4"])
    assert [turn.engine for turn in turns] == ["ours", "transformers", "transformers-kept"] * 2
    assert [*turns[0].outcomes] == ["W2", "W4", "process"]
    assert capsys.readouterr().out == (
        "vllm is left out: RuntimeError: too little memory.\n"
        "llama.cpp is left out: ImportError: no such thing.\n"
    )


def test_a_gguf_file_is_for_those_that_read_one(take_turns, tmp_path):
    turns = take_turns(model=tmp_path / "x.gguf", only=["W5"], rounds=1)
    assert [turn.engine for turn in turns] == ["ours", "ours-bfloat16", "llama.cpp-defaults"]


def test_a_file_is_compared_in_each_format_that_is_asked_for(monkeypatch, tmp_path, capsys):
    (made := tmp_path / "model.gguf").write_bytes(b"")
    compared: list[object] = []

    def write_as(folder, file, kind):
        compared.append(kind)
        return made

    monkeypatch.setattr(engines, "write_as", write_as)
    monkeypatch.setattr(engines, "compare", lambda args, model: compared.append(model))
    monkeypatch.setattr(sys, "argv", ["", "--model", "a.gguf", "--formats", "Q4_0", "Q8_0"])
    engines.main()
    assert compared == ["Q4_0", made, "Q8_0", made]
    assert "a.gguf as Q8_0" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["", "--formats", "Q4_0"])
    with pytest.raises(SystemExit):
        engines.main()
    assert "--formats is for a file" in capsys.readouterr().err


def test_tables_show_medians_spread_and_ours_over_theirs():
    found: dict[str, dict[str, list[float]]] = {
        "ours": {"hit, ms": [10, 12, 14], "all, s": [2.0]},
        "vllm": {"hit, ms": [48, 90, 40]},
    }
    shown = comparison(found)
    out = Console(file=StringIO(), width=200)
    out.print(shown)
    title, *rows = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title.split() == "hit, ms ours is all, s ours is".split()
    assert [row.split() for row in rows] == [
        "ours 12.0 ±17% 2.00".split(),
        "vllm 48.0 ±52% 0.250 x".split(),
    ]


def test_answers_that_are_not_those_of_transformers_are_counted():
    def turn(engine, *answers):
        return engines.Turn(engine, "1", {"W1": {"figures": {}, "answers": [*answers]}})

    turns = [turn("transformers", [1, 2], [3, 4]), turn("ours", [1, 2], [3, 4])]
    turns += [turn("vllm", [1, 2], [3, 4]), turn("vllm", [1, 2], [3, 5])]
    assert [line.split()[:4] for line in engines.agreements(turns)] == [
        ["ours", "2", "of", "2"],
        ["vllm", "1", "of", "2"],
    ]


def test_memory_is_that_of_the_process():
    assert held_bytes(os.getpid()) > 50_000_000  # torch alone is more
    alone = held_bytes(os.getpid())
    code = "held = b'x' * 200_000_000; print(flush=True); input()"
    words, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert held_bytes(os.getpid()) - alone > 150_000_000, "its children count"
        child.kill()


def rotated(x, position, pairs):
    """Dimension 2 i of a head with 2 i + 1 as llama.cpp has it, or i with i + D / 2."""
    half, result = len(x) // 2, np.empty_like(x)
    for i in range(half):
        one, other = (2 * i, 2 * i + 1) if pairs else (i, i + half)
        angle = position * 10_000 ** (-i / half)
        result[one] = x[one] * np.cos(angle) - x[other] * np.sin(angle)
        result[other] = x[other] * np.cos(angle) + x[one] * np.sin(angle)
    return result


def test_scores_of_the_gguf_model_are_those_of_the_model():
    rng = np.random.default_rng(3)
    hidden, heads, kv_heads, size = 12, 4, 2, 8
    query = rng.normal(size=(heads * size, hidden)).astype(np.float32)
    key = rng.normal(size=(kv_heads * size, hidden)).astype(np.float32)
    x, y = rng.normal(size=(2, hidden))

    def scores(query, key, pairs):
        queries, keys = (query @ x).reshape(heads, size), (key @ y).reshape(kv_heads, size)
        return [
            rotated(queries[h], 17, pairs) @ rotated(keys[h * kv_heads // heads], 5, pairs)
            for h in range(heads)
        ]

    expected = scores(query, key, pairs=False)
    found = scores(interleave(query, heads), interleave(key, kv_heads), pairs=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not np.allclose(scores(query, key, pairs=True), expected)
