"""A picture of the page for the docs: `python -m tests.runtime.server.screenshot FILE`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from selenium.webdriver import ActionChains

from radixcache import LLM
from radixcache.runtime.demo.script import CREW, DOCUMENTS, SCRIPT
from tests.runtime.server.browser import browser
from tests.runtime.server.live import LiveServer, live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--size", default="1280x800")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    with (
        live(LLM(kv_memory="64MiB")) as server,
        tempfile.TemporaryDirectory() as profile,
        browser(Path(profile)) as page,
    ):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if args.dark else "light"}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.resize(width, height)
        asked = ask_as_others(server)
        page.open(server.url)
        page.ask("What is the occupation of Nora Lund?")
        page.ask("And the email?")
        page.ask("What is the phone number of Hugo Marsh?")
        page.edit(2, "What is the phone number of Hugo Lund?")
        ActionChains(page.driver).move_to_element(page.one("h1")).perform()
        page.until(lambda: len(page.all("#hits rect")) == asked + 4 and not page.all(".node.used"))
        nodes = "[...document.querySelectorAll('.node')]"
        page.run(f"{nodes}.findLast((node) => / ?Lund/.test(node.textContent)).focus()")
        page.screenshot(args.path)


def ask_as_others(server: LiveServer) -> int:
    """What the other users of the demo ask, so that there is a tree; the number of requests."""
    server.post("/v1/prefixes", {"name": "crew", "messages": [system(CREW)]})
    others = [question for question in SCRIPT if question.user != "Ana"]
    for question in others:
        document, text = system(DOCUMENTS[question.user]), question.text
        body = {"messages": [document, {"role": "user", "content": text}]}
        server.post("/v1/chat/completions", body)
    return len(others) + 1


def system(path: Path) -> dict[str, str]:
    return {"role": "system", "content": path.read_text()}


if __name__ == "__main__":
    main()
