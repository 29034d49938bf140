"""The command line: quick help, one sentence for bad input, and its three commands."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from radixcache.kernels.native.library import problem
from radixcache.runtime import commands
from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.cli import main
from radixcache.runtime.demo.script import TABLE
from radixcache.runtime.model import exact, quantized_activations
from radixcache.runtime.sampling.params import SamplingParams

QUESTION = "Question: How old is Nora Lund? Your answer:"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` finds set what it might set, so that it leaves no trace."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch):
    def put(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return put


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy():
    done = python("""
import sys
from radixcache.runtime.cli import main
for argv in [], ["demo"], ["chat"], ["generate"], ["serve"], ["explain"]:
    try:
        main([*argv, "--help"])
    except SystemExit as exit:
        assert exit.code == 0
heavy = {"torch", "transformers", "tokenizers", "rich", "tqdm", "fastapi", "pydantic", "uvicorn"}
heavy &= set(sys.modules)
assert not heavy, heavy
""")
    assert done.returncode == 0, done.stderr
    assert "--kv-cache-memory-bytes" in done.stdout
    assert "the checkpoint's on a GPU" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["generate"], "give one of a prompt, --prompt TEXT and --prompt-file"),
        (["generate", "--prompt", "x", "/no/model", "-"], "give one of a prompt, --prompt TEXT"),
        (["generate", "--prompt", "x", "/no/model"], "no model at /no/model"),
        (["generate", "/no/model", "x"], "no model at /no/model"),
        (["generate", "/no/model", "--seed", "3", "x"], "no model at /no/model"),
        (["info", "/no/model"], "no model at /no/model"),
        (["chat", "a", "--model", "b"], "two models are given: a and --model b"),
        (["generate", "--prompt", "x", "--page-size", "many"], "invalid int value: 'many'"),
        (["generate", "--prompt", "x", "--cache", "disk"], "invalid choice: 'disk'"),
        (["generate", "--prompt", "x", "--top-p", "7"], "top_p must be in (0, 1], not 7.0"),
        (["generate", "--prompt", "x", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", str(BUNDLED_MODEL)], "is a model: give a prompt after it"),
        (["generate", "any.gguf", "--n", "2"], "any.gguf is a model: give a prompt after it"),
        (["generate", "--prompt-file", "/no/file"], "cannot read /no/file: No such file"),
        (["generate", "--prompt", "x", "--model", "/no/model"], "no model at /no/model"),
        (["generate", "--prompt", "x", "--seed", str(2**64)], "seed must be of 64 bits"),
        (["generate", "--prompt", "x", "--top-k", "9" * 400], "top_k must be at least 1"),
        (["generate", "--prompt", "\udcff"], "half a surrogate pair"),
        (["generate", "--prompt", "x", "--device", "meta"], "device 'meta' cannot be used here"),
        (["serve", "--tensor-parallel-size=3"], "arguments: --tensor-parallel-size=3 (see radix"),
        (["serve", "--tp", "3"], "unrecognized arguments: --tp (see radixcache serve --help)"),
        (["serve", "--host", "\udcff", "--port", "0"], "not a host: "),
        (["chat", "--system-file", "/no/file"], "cannot read /no/file: No such file"),
        (["chat", "--temperature", "-1"], "temperature must be at least 0 and finite, not -1.0"),
        (["demo", "--model", "/no/model"], "no model at /no/model"),
        (["chat", "/no/model"], "no model at /no/model"),
        (["generate", "--prompt", "x", "--temprature", "1"], "(see radixcache generate --help)"),
        (["chat", "--gpu-memory-utilization=0.5"], "did you mean --kv-cache-memory-bytes?"),
        (["serve", "--prot", "3"], "unrecognized arguments: --prot: did you mean --port? (see"),
        (["generate", "--foo", "3"], "unrecognized arguments: --foo (see"),
        (["generate", "-", "--seeed", "3"], "--seeed 3: did you mean --seed? (see"),
        (["info", "--model", "x"], "unrecognized arguments: --model (see radixcache info --help)"),
    ],
)
def test_bad_input_gets_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("radixcache: error: ") and err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{oops", "2: not JSON"),
        ("[" * 100_000, "2: JSON that is too deep"),
        ("9" * 5000, "2: JSON that is too deep, or has too long a number"),
        ('"x"', "2: not a prompt"),
        ('{"prompt": 7}', "2: not a prompt"),
        ('{"prompt": "x", "temperature": 1}', "2: not a prompt"),
        ('{"prompt_token_ids": [1, "x"]}', "2: not a prompt"),
    ],
)
def test_a_malformed_line_is_named(
    line: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["generate", "--prompt-file", str(path), "--jsonl"]) == 2
    assert f"radixcache: error: {path}:{sentence}" in capsys.readouterr().err


def test_what_is_not_text_is_refused(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    path = f"{tmp_path}/prompt"
    for argv, source in ((["generate", "--prompt-file", path], path), (["chat"], "-")):
        assert main(argv) == 2
        error = f"radixcache: error: cannot read {source}: it is not UTF-8"
        assert error in capsys.readouterr().err


def test_what_needs_no_torch_runs_without_and_the_rest_says_so():
    done = python("""
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "pydantic", "llguidance"))
from radixcache.runtime.cli import main
bench = ["bench", "best-of-n:questions=2", "--schemes", "radix-1", "--memory", "100%"]
assert main(bench) == 0
for argv in ["bench", "--level", "engine"], ["info"], ["generate", "--prompt", "x"]:
    assert main(argv) == 2, argv
""")
    assert done.returncode == 0, done.stderr
    assert "88.2%" in done.stdout
    bench, info, generate = done.stderr.splitlines()[-3:]
    assert "a model needs " in bench
    assert "torch is missing: pip install '.[runtime]' in a checkout" in info
    assert "needs torch: pip install '.[runtime]' in a checkout" in generate


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError("no 8 EiB"), 2, "radixcache: error: out of memory: no 8 EiB\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_interrupts_a_command_is_its_status(error, status, said, monkeypatch, capsys):
    monkeypatch.setattr(commands, "_read", Mock(side_effect=error))
    assert main(["generate", "-"]) == status
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_is_no_error():
    code = """
import sys
from radixcache.runtime import cli
def generate(args):
    print("x" * 100_000)
cli.generate = generate
sys.exit(cli.main(["generate", "-"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("problem", [None, "no C++ compiler"])
def test_info_says_whether_native_kernels_run_and_why_not(problem, monkeypatch, capsys):
    activations = "runtime.model.quantized_activations"
    for module in ("kernels.native.library", "runtime.model.exact", activations):
        monkeypatch.setattr(f"radixcache.{module}.problem", lambda: problem)
    assert main(["info"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    kernels = "yes" if problem is None else f"no, models run slower: {problem}"
    assert f" native kernels {kernels} exact mode {exact.describe()}" in out
    assert f"{exact.describe()} 8-bit activations {quantized_activations.describe()}" in out
    assert problem is None or out.endswith(problem)
    assert f"torch {torch.__version__}, {torch.get_num_threads()} thread" in out
    assert " 1 threads" not in out


def test_info_says_why_torch_finds_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr("radixcache.runtime.model.host.device.nvidia_driver", lambda: "470.1")
    for cuda, reason in ((None, "built without CUDA"), ("13.0", "is for CUDA 13.0, and finds no")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert main(["info"]) == 0
        assert reason in capsys.readouterr().out


def test_generate_completes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = [tmp_path / "one", tmp_path / "two"]
    paths[0].write_text(f"{TABLE.read_text()}{QUESTION}")
    paths[1].write_text(f"{TABLE.read_text()}{QUESTION.replace('Lund', 'Holm')}")
    assert main(["generate", "--prompt-file", *map(str, paths), "--stop", "\n"]) == 0
    out, err = capsys.readouterr()
    assert out == " The age of Nora Lund is 30.\n The age of Nora Holm is 57.\n"
    placement, first, second = err.splitlines()
    kernels = "native kernels" if problem() is None else "torch "
    assert placement.startswith("qwen3 in float32 on cpu, layers by radixcache with ")
    assert f" with {kernels}" in placement and f", attention by {kernels}" in placement
    assert ", 0 cached, " in first and ", 0 cached, " not in second


def test_generate_reads_standard_input(type_in, capsys: pytest.CaptureFixture[str]):
    type_in("| 1 | Nora")
    assert main(["generate", "-", "--json", "--max-tokens", "3", "--n", "2", "--seed", "1"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["prompt"] == "| 1 | Nora"
    assert [len(completion["token_ids"]) for completion in output["outputs"]] == [3, 3]
    type_in('{"prompt": "| 1 | Nora\\u2028 Lund"}\n\n{"prompt_token_ids": [5, 6, 7]}\n')
    assert main(["generate", "-", "--jsonl", "--json", "--max-tokens", "1"]) == 0
    text, ids = map(json.loads, capsys.readouterr().out.splitlines())
    assert text["prompt"] == "| 1 | Nora\u2028 Lund"
    assert ids["prompt_token_ids"] == [5, 6, 7]


def test_chat_goes_on_from_turn_to_turn(type_in, capsys: pytest.CaptureFixture[str]):
    type_in("How old is Nora Holm?\n\nAnd the country?\n/stats\n/what\n/reset\nAnd?\n/quit\nNo?\n")
    assert main(["chat", "--max-tokens", "40"]) == 0
    out, err = capsys.readouterr()
    first, second, third = out.splitlines()
    assert (first, second) == (
        "The age of Nora Holm is 57.",
        "The country of Nora Holm is Denmark.",
    )
    assert third  # whatever it makes of a question without a conversation
    assert TABLE.read_text() in err
    assert err.count(" prefilled, TTFT ") == 3 == err.count("prompt tokens: ")
    assert "requests: 2; " in err and "/stats shows hits, " in err
    assert err.count("/exit or /quit leaves") == 2


def test_chat_takes_a_system_message(type_in, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "system.md"
    path.write_text("| Name | Age |\n|---|---|\n| Mei Tanaka | 64 |\n| Milo Rossi | 56 |\n")
    type_in("How old is Mei Tanaka?")
    assert main(["chat", "--system-file", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == "The age of Mei Tanaka is 64.\n"
    assert "sailing club" not in err


def test_chat_refuses_a_model_without_a_template_before_it_asks(tmp_path: Path, capsys):
    folder = tmp_path / "base"
    shutil.copytree(BUNDLED_MODEL, folder, ignore=shutil.ignore_patterns("*.jinja"))
    assert main(["chat", str(folder)]) == 2
    assert "no chat template: complete a text, by generate or" in capsys.readouterr().err


def test_ctrl_c_aborts_only_the_answer():
    notes: list[str] = []
    chat = Mock(**{"stream.side_effect": KeyboardInterrupt})
    commands._answer(chat, "Who?", SamplingParams(), notes.append)
    assert notes == ["aborted: the conversation is as it was before the question"]


@pytest.mark.parametrize(("load", "spins"), [(0.0, None), (100.0, "1000")])
def test_threads_sleep_on_a_busy_machine_only(
    load: float, spins: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    commands._share_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
