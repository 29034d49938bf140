"""The page in front of several replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvicorn

from radixcache import LLM
from radixcache.runtime.server.http.listener import listen
from radixcache.runtime.server.http.serve import configure
from tests.runtime.router.simulated_ray import world
from tests.runtime.server.page.browser import Page, browser


@pytest.mark.exhaustive  # a browser and two models
def test_the_page_shows_the_replica_that_has_the_chat(tmp_path: Path):
    llms = {name: LLM(kv_cache_memory_bytes="16MiB") for name in ("a", "b")}

    def look(page: Page, url: str) -> None:
        def shown() -> tuple[str, list[str]]:
            chosen = page.run("return document.querySelector('#replicas select').value")
            return chosen, page.texts("#replicas option")

        page.open(url)
        page.until(lambda: shown() == ("a", ["a", "b"]))
        for turn, question in enumerate(("Where does Nora Lund live?", "And Nora Holm?")):
            page.ask(question)
            page.until(lambda: shown()[0] == "b")
            page.until(lambda: "request went to b" in page.text("#replicas span"))
            page.until(lambda: len(page.all(".node")) == 1)
            assert llms["a"].cache.stats.requests == 1
            assert llms["b"].cache.stats.requests == turn + 1
        page.one("#replicas option[value=a]").click()
        page.until(lambda: shown()[0] == "a")

    async def main() -> None:
        async with world(llms) as made:
            await made.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})  # so b is next
            with listen("127.0.0.1", 0) as listener:
                config = configure(made.app, "critical")
                config.lifespan = "off"  # the world has begun
                server = uvicorn.Server(config)
                serving = asyncio.ensure_future(server.serve([listener]))
                with browser(tmp_path) as page:
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    await asyncio.to_thread(look, page, url)
                server.should_exit = True
                await serving

    asyncio.run(main())
    for llm in llms.values():
        llm.close()
