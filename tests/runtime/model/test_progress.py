"""Who watches hears how far a model is loaded."""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path

import pytest

from radixcache import LLM
from radixcache.runtime import commands
from radixcache.runtime.model.load import load_stock
from radixcache.runtime.model.progress import report, track, watch
from tests.models import tiny_model

Heard = list[tuple[str, float | None]]


def test_the_share_of_the_bundled_model_grows_from_0_to_1() -> None:
    heard: Heard = []
    with watch(lambda stage, share: heard.append((stage, share))):
        LLM(kv_cache_memory_bytes="16MiB").close()
    shares = [share for _, share in heard if share is not None]
    assert len(shares) == len(heard) and shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    reading = [share for stage, share in heard if stage == "reading weights" and share is not None]
    assert reading[0] == 0 and 0.5 < reading[-1] < 1 and len({*reading}) == len(reading) > 3


def test_of_what_transformers_loads_the_share_is_unknown(tmp_path: Path) -> None:
    import torch

    heard: Heard = []
    folder = tiny_model("llama", tmp_path, tokenizer=False)
    with watch(lambda stage, share: heard.append((stage, share))):
        load_stock(folder, torch.float32, torch.device("cpu"))
    assert ("reading weights", None) in heard and ("packing weights", None) in heard
    assert all(share is None for _, share in heard)


def test_all_who_watch_hear_and_nobody_after_the_end() -> None:
    outer: Heard = []
    inner: Heard = []
    with watch(lambda *said: outer.append(said)):
        with watch(lambda *said: inner.append(said)):
            assert [*track("ab", "both")] == ["a", "b"]
        report("outer alone")
    report("nobody")
    assert inner == [("both", 0), ("both", 1 / 3), ("both", 2 / 3)]
    assert outer == [*inner, ("outer alone", None)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, seconds: float) -> str:
    """What the command line prints of a load that takes so long."""
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(sys, "stderr", screen)
    skipped = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: time.time() + skipped)
    with commands._show_progress():
        report("importing torch", 0.0)
        skipped = seconds
        report("reading weights", 0.5)
        report("packing weights")
    return screen.getvalue()


def test_a_terminal_has_a_bar_after_a_second_which_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(monkeypatch, Terminal(), 1.1)
    assert "reading weights  50 % " in text and "packing weights ..." in text
    *_, last, rest = text.split("\r")
    assert not last.strip() and rest == "" and "\n" not in text


def test_what_loads_at_once_or_has_no_terminal_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(monkeypatch, Terminal(), 0) == ""
    assert shown(monkeypatch, io.StringIO(), 1.1) == ""


@pytest.mark.parametrize(("model", "hub"), [("org/name", True), (None, False)])
def test_bars_of_others_are_off_but_for_downloads_on_a_terminal(
    model: str | None, hub: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    level = logging.get_verbosity()
    enable_progress_bars()
    try:
        monkeypatch.setattr(sys, "stderr", Terminal())
        commands._silence(argparse.Namespace(model=model))
        assert not logging.is_progress_bar_enabled()
        assert are_progress_bars_disabled() is not hub
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
