"""The README's film: two people ask about one document. It is as fast as it was."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from PIL import Image
from selenium.webdriver.common.keys import Keys

from docs.pictures.camera import Look, put_on, shoot, window, with_palette
from radixcache import LLM
from tests.runtime.server.live import live
from tests.runtime.server.page.browser import Page

LOOK = Look(1080, 680)
"""A README shows it at four fifths of its size."""


class Film:
    """What a page looked like, and when.

    Attributes:
        frames: those that differ from the one before.
        seconds: the time of each frame, and at last that of the end.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.seconds: list[float] = []

    def roll(self, seconds: float = 0.0) -> None:
        """Film for so long; at least one frame."""
        end = time.monotonic() + seconds
        while True:
            now, frame = time.monotonic(), shoot(self.page)
            if not self.frames or frame.tobytes() != self.frames[-1].tobytes():
                self.frames.append(frame)
                self.seconds.append(now)
            if time.monotonic() >= end:
                return

    def ask(self, question: str, seconds: float) -> None:
        """Type a question word by word, send it and film what comes."""
        for word in question.split():
            self.page.one("#question").send_keys(f"{word} ")
            self.roll()
        self.page.one("#question").send_keys(Keys.BACKSPACE, Keys.ENTER)
        while not self.page.one("#send").is_displayed():
            self.roll()
        self.roll(seconds)

    def save(self, path: Path) -> None:
        """Write it as a GIF that begins again at the end, with one palette for all frames."""
        times = [*self.seconds, time.monotonic()]
        lasted = [round(1000 * (b - a), -1) for a, b in pairwise(times)]
        first, *rest = with_palette(self.frames)
        first.save(path, save_all=True, append_images=rest, duration=lasted, loop=0, optimize=True)


def take(folder: Path) -> None:
    """Film the page of a server that has just started."""
    with LLM(kv_cache_memory_bytes="64MiB") as llm, live(llm) as server, window() as page:
        llm.generate("Warm", use_tqdm=False)
        llm.reset_prefix_cache()
        put_on(page, LOOK)
        page.open(server.url)
        page.run("document.documentElement.style.caretColor = 'transparent'")
        film = Film(page)
        film.roll(1.0)
        film.ask("What is the occupation of Nora Lund?", 1.8)
        film.ask("And the email?", 1.8)
        page.one("#new").click()
        film.ask("Which country is Felix Wolf from?", 2.5)
        film.save(folder / "film.gif")
