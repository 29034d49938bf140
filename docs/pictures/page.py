"""The page while its tree grows from 3 to 5,000 nodes."""

from __future__ import annotations

from pathlib import Path

from docs.pictures.camera import shoot_looks, window
from docs.pictures.trees import fill
from radixcache import LLM
from tests.runtime.server.live import live

SIZES = (3, 60, 500, 5000)
"""Of trees, in nodes; the last prompts may make a few more."""


def take(folder: Path) -> None:
    """All pictures of the page."""
    with LLM(kv_cache_memory_bytes="768MiB") as llm, live(llm) as server, window() as page:
        page.open(server.url)
        page.ask("What is the occupation of Nora Lund?")
        page.one("#new").click()
        page.ask("Which country is Felix Wolf from?")
        for nodes in SIZES:
            if nodes > 60:
                page.one("[name=scale][value=log]").click()
            cached = f"{fill(server.url, nodes):,} nodes"
            page.until(lambda cached=cached: cached in page.text("#pages"))
            shoot_looks(page, folder, f"page-{nodes}", "#cache")
