"""The page says what came from disk."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

from tests.runtime.server import http
from tests.runtime.server.page.browser import Page, browser
from tests.runtime.server.test_lifecycle import forked


def strip(page: Page) -> list[list[str]]:
    """The parts of the last prompt, and their colours."""
    found: list[list[str]] = page.run(
        "return [...document.querySelectorAll('#strip i')]"
        ".map((part) => [part.className, getComputedStyle(part).backgroundColor])"
    )
    return found


def test_an_answer_whose_prompt_was_loaded_says_so_in_another_shade(tmp_path: Path) -> None:
    flags = ("--kv-dir", str(tmp_path / "kv"), "--kv-dir-size", "30MB")
    question = "What is the occupation of Nora Lund?"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        with forked(tmp_path / name, *flags) as (running, url), browser(tmp_path / name) as page:
            page.open(url)
            page.ask(question)
            recent = http.get(f"{url}/v1/cache").json()["recent"][-1]
            if name == "second":
                loaded = recent["loaded_tokens"]
                assert loaded == recent["cached_tokens"] > 1000
                (reason, *_) = page.texts("#reasons li")
                assert reason.startswith(f"0 – {loaded:,}loaded from disk: {loaded:,} tokens, ")
                loaded_parts = strip(page)
                page.ask("And the email?")
                parts = strip(page)
                assert [name for name, _ in loaded_parts] == ["hit loaded", "miss"]
                assert parts[0][0] == "hit" and parts[0][1] != loaded_parts[0][1]
            running.send_signal(SIGTERM)
            running.wait(30)
