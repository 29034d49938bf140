"""`radixcache report` over files that a plugin has written, and over others."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from radixcache.errors import InvalidRequest
from radixcache.plugins.report import draw
from radixcache.runtime.cli import main

HEAD = {"run": "a", "engine": "vLLM 0.32.0", "capacity": 9600, "block_size": 32}


def line(at: float, tokens: int, hit: int, misses: list[list[object]]) -> dict[str, object]:
    would = {"exact": min(hit + 5, tokens), "twice": hit, "fourfold": tokens // 2}
    head = {"run": "a", "time": at, "request": "r", "tokens": tokens, "hit": hit}
    return {**head, **would, "misses": misses}


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return str(path)


def test_it_adds_up_and_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line(100 + i, 100, i % 2 * 50, [["evicted", i % 2 * 50, 99]]) for i in range(200)]
    lines.append(line(400, 1000, 0, [["block_size", 0, 10], ["first_seen", 10, 999]]))
    other = {**HEAD, "run": "b", "engine": "SGLang 0.5.23"}
    theirs = {**line(1, 10, 5, [["salt", 5, 9]]), "run": "b"}
    again = {**line(400, 0, 0, []), "run": "c"}
    path = written(tmp_path / "r.jsonl", HEAD, *lines, other, theirs, {**HEAD, "run": "c"}, again)
    assert main(["report", path]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    text, _, sglang = text.partition("\n\n\n")
    assert text.startswith(
        "vLLM 0.32.0: KV of 9,600 tokens, in blocks of 32, 2 starts\n202 requests"
    )
    assert sglang.startswith("SGLang 0.5.23: KV of") and "cached under another salt" in sglang
    assert "202 requests in 300 s: 21,000 prompt tokens" in text
    rows = {row[2:35].strip(): row[35:].split()[:2] for row in text.splitlines() if "%" in row}
    assert rows["as it is"] == ["5,000", "23.8%"]
    assert rows["token-exact, in the same memory"] == ["6,005", "28.6%"]
    assert rows["evicted"] == [f"{100 * 99 + 100 * 49:,}", "70.5%"]
    assert rows["lost to the block size"] == ["10", "0.0%"]


def test_the_curve_is_the_hit_rate(tmp_path: Path) -> None:
    lines = [line(0, 10, 10 * (i >= 32), []) for i in range(64)]
    text = draw(written(tmp_path / "r.jsonl", HEAD, *lines))
    (top,) = [row for row in text.splitlines() if row.startswith("100 %")]
    assert top[6:] == " " * 32 + "█" * 32


def test_it_is_drawn_where_there_is_ascii_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "r.jsonl", HEAD, line(0, 10, 10, []))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["report", path]) == 0
    assert "#" * 22 in out.buffer.getvalue().decode()


def test_a_line_that_a_kill_has_cut_off_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written(path, HEAD, line(1, 10, 5, []))
    with path.open("a") as file:
        file.write('{"run":"a","time":12,"tok')
    assert "1 requests in" in draw(str(path))
    with path.open("a") as file:  # after a restart
        file.write(json.dumps({**HEAD, "run": "b"}) + "\n" + json.dumps(line(1, 10, 5, [])) + "\n")
    text = draw(str(path))
    assert "2 requests in" in text and text.endswith("1 lines were cut off, and are left out.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("", "no request yet"),
        (json.dumps(HEAD) + "\n", "no request yet"),
        ("hello\n", "line 1, is none of radixcache's plugins"),
        ("[1]\n", "line 1, is none of radixcache's plugins"),
        ('{"time": 1}\n', "line 1, is none of radixcache's plugins"),
        ("[" * 100_000 + "\n", "line 1"),
        (b"\xff\xfe\n", "no text in UTF-8"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    path = tmp_path / "r.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidRequest, match=said):
        draw(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": float("nan")}, {"tokens": 1.5}, {"tokens": "x"}, {"tokens": None}, {"hit": []},
        {"tokens": 10**30}, {"tokens": -1}, {"hit": 11}, {"exact": "x"}, {"tokens": True},
        {"time": "x"}, {"time": float("inf")}, {"time": None}, {"misses": None}, {"misses": "abc"},
        {"misses": {"evicted": 1}}, {"misses": [["evicted", 1]]}, {"misses": [["salt", "a", "b"]]},
        {"misses": [["hit", 0, 1]]}, {"misses": [[[], 0, 1]]}, {"misses": [["evicted", 3, 2]]},
        {"misses": [["evicted", 3, 11]]}, {"run": "z"}, {"run": []}, {"engine": "x"},
        {**HEAD, "capacity": None},
        {**HEAD, "engine": 7}, {**HEAD, "engine": "\x1b[2J"}, {**HEAD, "engine": "x" * 99},
    ],
)  # fmt: skip
def test_a_line_that_no_plugin_wrote_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "r.jsonl"
    good = line(1, 10, 5, [["evicted", 5, 9]])
    assert "1 requests in" in draw(written(path, HEAD, good))
    with pytest.raises(InvalidRequest, match="line 3, is none of radixcache's plugins"):
        draw(written(path, HEAD, good, {**good, **change}))
