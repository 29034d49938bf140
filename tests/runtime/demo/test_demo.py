"""The demo shows what it claims, and says so when it does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from radixcache.runtime.checkpoints.model_files import BUNDLED_MODEL
from radixcache.runtime.demo import play
from radixcache.runtime.demo.play import Totals, Turn
from radixcache.runtime.demo.script import DOCUMENTS, SCRIPT
from radixcache.runtime.tokens.tokenizer import Tokenizer
from tests.helpers.forks import Forked, radixcache


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `radixcache demo --json` prints; nothing else may be on standard output."""
    done = Forked(tmp_path_factory.mktemp("demo"), radixcache, "demo", "--json")
    status, out, err = done.wait(300), done.out.read_text(), done.err.read_text()
    assert (status, err) == (0, ""), out + err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def turns(report: dict[str, Any]) -> list[Turn]:
    return [Turn(**turn) for turn in report["turns"]]


def computed_before(turns: list[Turn]) -> Iterator[tuple[Turn, int]]:
    """Each turn, and how many leading tokens of its prompt earlier turns computed.

    By the definition: every conversation is rendered and tokenised from its texts.
    """
    tokenizer = Tokenizer.load(str(BUNDLED_MODEL))
    assert tokenizer is not None
    histories = {
        user: [[{"role": "system", "content": path.read_text()}]]
        for user, path in DOCUMENTS.items()
    }
    known: list[list[int]] = []
    for turn in turns:
        history = histories[turn.user]
        asked = [*history[-2 if turn.edited else -1], {"role": "user", "content": turn.question}]
        history.append([*asked, {"role": "assistant", "content": turn.answer}])
        text = tokenizer.render_chat(asked)
        prompt = tokenizer.encode(text, special=False)
        assert len(prompt) == turn.prompt_tokens
        yield turn, max((common_prefix(prompt, tokens) for tokens in known), default=0)
        known.append(tokenizer.encode(text + turn.answer, special=False))


def common_prefix(one: list[int], other: list[int]) -> int:
    longest = min(len(one), len(other))
    return next((n for n in range(longest) if one[n] != other[n]), longest)


def test_the_cache_serves_every_token_that_was_computed_before(turns: list[Turn]):
    for turn, before in computed_before(turns):
        assert turn.cached_tokens == before
        assert turn.prefilled_tokens == turn.new_tokens == turn.prompt_tokens - before
        assert turn.uncached_prefilled_tokens == turn.prompt_tokens


def test_the_edited_question_branches_in_mid_page(turns: list[Turn]):
    (edited,) = (turn for turn in turns if turn.edited)
    assert edited.page_offset == edited.cached_tokens % 16 != 0
    assert 1 < edited.prefilled_tokens < 8


def test_every_answer_is_right_and_the_totals_add_up(report: dict[str, Any], turns: list[Turn]):
    assert len(turns) == len(SCRIPT)
    assert all(turn.right and turn.same_tokens for turn in turns)
    totals = report["totals"]
    assert totals["ok"]
    assert totals["prompt_tokens"] == totals["uncached_prefilled_tokens"]
    assert totals["prompt_tokens"] == totals["cached_tokens"] + totals["prefilled_tokens"]
    assert totals["prefilled_tokens"] == sum(turn.prefilled_tokens for turn in turns)


def test_piped_output_is_plain_text_with_whole_lines(
    turns: list[Turn], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(play, "play", lambda engine: iter(turns))
    assert play.run({}) == 0
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out and "\r" not in out
    rows = out.split("\n\n")[1].splitlines()[1:]
    for turn, row in zip(turns, rows, strict=True):
        assert row.startswith(f"{turn.user:<5}{turn.question} {turn.expected} ")
        told = [int(number.replace(",", "")) for number in row.split()[-4:]]
        assert told[:2] == [turn.cached_tokens, turn.prefilled_tokens]
        assert told[2:] == [round(turn.ttft_ms), round(turn.uncached_ttft_ms)]


def test_a_terminal_gets_colours_and_one_screen(
    turns: list[Turn], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(play, "play", lambda engine: iter(turns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert play.run({}) == 0
    out = capsys.readouterr().out
    assert "\x1b[36m" in out
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|.*\r", "", out).splitlines()
    assert max(map(len, lines)) <= 80
    assert out.count("\n") - out.count("\x1b[1A") <= 24 - 2  # the command, and the next prompt
    assert any(line.startswith("12 of 12 answers right, the same tokens") for line in lines)
    assert any("Stockholm" not in line and "314 Laurel St…" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"right": False, "answer": "The age is 7."}, "WRONG, not 64: 'The age is 7.'"),
        ({"prefilled_tokens": 900}, "MORE THAN its new tokens"),
        ({"same_tokens": False}, "DIFFERENT TOKENS"),
    ],
)
def test_a_failing_turn_fails_the_demo(
    change: dict[str, Any],
    complaint: str,
    turns: list[Turn],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    broken = [*turns[:-1], replace(turns[-1], **change)]
    assert not Totals.of(broken).ok
    monkeypatch.setattr(play, "play", lambda engine: iter(broken))
    assert play.run({}) == 1
    out = capsys.readouterr().out
    assert complaint in out.replace("\n", " ")
    assert f"{12 - ('right' in change)} of 12 answers right" in out
