"""The examples run, and print what they are there to show."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from radixcache import LLM
from tests.helpers.pictures import file_of, picture
from tests.helpers.sources import ROOT
from tests.helpers.vlm_models import write_vlm
from tests.runtime.server.live import live

FOLDER = ROOT / "examples"


def run(name: str) -> None:
    """Run an example in this process, so that torch is imported once for all."""
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def run_without_torch(name: str) -> str:
    """The output of an example, in which importing torch or transformers is an error."""
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(FOLDER / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(output: str) -> list[list[int]]:
    """The numbers that the lines of a table begin with."""
    lines = re.findall(r"^ *(\d[\d ]*\d)  \S", output, re.MULTILINE)
    return [[int(number) for number in line.split()] for line in lines]


def test_a_chat_prefills_only_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    run("chat_over_a_document.py")
    output = capsys.readouterr().out
    first, *later = rows_of(output)
    assert first[1] == 0 and len(later) == 3
    assert all(prompt == cached + prefilled for prompt, cached, prefilled in [first, *later])
    assert all(prefilled <= 12 for _, _, prefilled in later)
    assert later[-1][2] < later[-2][2]  # the edited question shares its first words
    for answer in ("Teacher", "petra.novak@example.org", "64", "56"):
        assert f"is {answer}." in output


def test_a_folder_is_searched_and_asked_by_one_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["retrieval_chat.py"])
    run("retrieval_chat.py")
    output = capsys.readouterr().out
    first, second, again = rows_of(output)
    assert first[0] == 0 and second[0] > 0 and again[1] == 0  # what was asked before costs nothing
    assert "Petra Novak is Teacher." in output and output.count("Mei Tanaka is 64.") == 2
    assert "again computed 0 tokens" in output


def test_only_the_first_question_about_an_image_encodes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(file_of(picture(100, 60)))
    model = write_vlm(tmp_path / "model", "qwen3_vl")
    monkeypatch.setattr(sys, "argv", ["chat_about_an_image.py", str(model), str(image)])
    run("chat_about_an_image.py")
    first, second, new = rows_of(capsys.readouterr().out)
    assert first[1] == 0 and [encoded for _, _, encoded in (first, second, new)] == [1, 1, 1]
    differs = len("ich colours has it?[assistant]")  # the tokenizer's tokens are bytes
    assert second[1] >= first[0] and new[0] - new[1] == differs


def test_the_openai_client_is_told_what_was_cached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(LLM(kv_cache_memory_bytes="32MiB")) as server:
        monkeypatch.setattr(sys, "argv", ["openai_client.py", server.url])
        run("openai_client.py")
        server.assert_idle()
    output = capsys.readouterr().out
    assert "Omar Haddad is Jordan." in output and "Nina Wolf is Germany." in output
    (none, _), (cached, total) = re.findall(r"(\d+) of (\d+) tokens were cached", output)
    assert int(none) == 0 and int(total) - int(cached) <= 12


def test_the_toy_engine_finds_its_tokens_in_the_pages_without_torch() -> None:
    output = run_without_torch("own_engine.py")
    # cached, computed, copies: what the prompts have in common can be counted by hand.
    assert rows_of(output) == [[0, 22, 0], [21, 1, 1], [8, 3, 0], [0, 5, 0], [3, 2, 1]]


def test_the_schemes_prefill_what_can_be_counted_by_hand_without_torch() -> None:
    output = run_without_torch("compare_schemes.py")
    table = [line.split()[-4:] for line in output.splitlines() if line.startswith("text of")]
    counts = [[int(cell.replace(",", "")) for cell in cells] for cells in table]
    for (stem, question), found in zip([(90, 10), (6010, 400)], counts, strict=True):
        # Each of the 8 texts is computed once, and by each request what its hit lacks.
        hits = [stem // block * block for block in (64, 16, 1)]
        expected = [8 * hit + 200 * (stem - hit + question) for hit in hits]
        assert found == [200 * (stem + question), *expected]
