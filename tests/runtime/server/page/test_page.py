"""The page at `/`, in a browser where there is one: the tree, the charts, and who may see them."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from radixcache import LLM
from radixcache.runtime.demo.script import TABLE
from radixcache.runtime.server.http import static
from tests.runtime.server import http
from tests.runtime.server.live import LiveServer, live
from tests.runtime.server.page.browser import ANSWER, OTHER, QUESTION, Page, numbers
from tests.runtime.server.processes import forked, loading, served


def test_the_files_come_with_their_types_and_may_load_nothing_from_elsewhere(server: LiveServer):
    for path, (_, media_type) in static.FILES.items():
        response = server.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == media_type
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in response.headers["content-security-policy"]
        assert {*re.findall(r"https?://[^\"' ]*", response.text)} <= {"http://www.w3.org/2000/svg"}
    for path in ("/page/index.html", "/static.py", "/..%2fstatic.py", "/main.js/../app.py"):
        assert server.get(path).status_code == 404


def test_only_the_bundled_model_has_an_example(server: LiveServer, monkeypatch: Any):
    example = server.get("/page.json").json()["example"]
    assert example["system"] == TABLE.read_text() and example["questions"]
    monkeypatch.setattr(server.backend.llm, "model_name", "other")
    assert server.get("/page.json").json()["example"] is None


def cached_tokens(page: Page) -> int:
    return int(page.text("#pages").partition(" ")[0].replace(",", ""))


def idle(page: Page, count: int) -> None:
    """Wait until the tree has so many nodes, none of them in use."""
    page.until(lambda: len(page.all(".node.idle")) == count)


def test_turns_grow_the_tree_and_edits_branch_it_until_it_is_flushed(page: Page, url: str):
    questions = [QUESTION, "And the email?", OTHER]
    assert TABLE.read_text() == page.one("#system-text").get_attribute("value")
    for question in questions:
        prompt, cached, computed = numbers(page.ask(question))
        assert cached + computed == prompt
    assert page.texts("article.assistant .text")[0] == ANSWER
    assert page.texts("article.user .text") == questions

    question = "What is <b>{}</b> about, and who is it that asks?"
    page.edit(0, question.format("this"))
    prompt, cached, _ = numbers(page.edit(0, question.format("that")))
    line, last = page.texts("#reasons li")
    assert line.startswith(f"{cached:,} – {prompt - 1:,}diverged at token {cached:,} of {prompt:,}")
    assert "<b>that</b>" in line and "<b>this</b>" in line  # it is no markup
    assert last == f"{prompt - 1:,} – {prompt:,}the last token is computed for its logits"
    assert numbers(page.edit(0, question.format("that"))) == (prompt, prompt, 0)
    assert not page.texts("#reasons li")
    idle(page, 5)

    tokens = cached_tokens(page)
    page.one("#flush").click()
    page.until(lambda: page.texts("#gone") == [f"{tokens:,} tokens gone"])
    assert page.all(".node.evicted")
    page.run("skip(3100)")
    page.until(lambda: not page.all(".node") and page.texts("#gone") == [""])
    assert cached_tokens(page) == 0


def test_the_tree_is_read_with_the_keyboard(page: Page):
    page.ask(QUESTION)
    page.edit(0, OTHER)
    idle(page, 3)
    page.one("#scale input").click()  # which is before the tree
    for _ in range(10):
        page.press(Keys.TAB)
        if page.run("return document.activeElement.className").startswith("node"):
            break
    for key, start in (
        (Keys.HOME, "<|system|>You answer questions"),
        (Keys.ARROW_RIGHT, QUESTION),
        (Keys.ARROW_DOWN, OTHER),
        (Keys.ARROW_LEFT, "<|system|>"),
        (Keys.END, OTHER),
    ):
        page.press(key)
        assert page.text("#detail pre").startswith(start)
        name = page.driver.switch_to.active_element.accessible_name
        assert " page" in name and " ".join(start.split()) in name
    page.press(Keys.SHIFT + Keys.TAB)  # the tree is one stop
    assert page.run("return document.activeElement.id") == "find-text"


IMAGE_TAG = "<img src=x onerror=alert(1)>"


def test_a_branch_opens_and_is_found_by_its_text_which_is_no_markup(page: Page, url: str):
    tails = [f"One {IMAGE_TAG} stem {c} a tail" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    body = {"prompt": [*tails, *(f"Two {c} end" for c in "abcdef")], "max_tokens": 1}
    http.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    page.until(lambda: page.texts(".node.fold"))
    assert not page.all(".node img, #crumbs img, #detail img")
    (one,) = page.all(f".node[aria-label*='{IMAGE_TAG}']")
    one.click()
    page.until(lambda: len(page.texts("#crumbs button")) == 2)
    assert page.texts("#crumbs button")[0] == "Everything"
    assert IMAGE_TAG in page.texts("#crumbs button")[1]
    assert not any("end" in text for text in page.texts(".node span"))
    assert page.run("return document.activeElement.ariaLabel").find(IMAGE_TAG) > 0
    page.press(Keys.HOME, Keys.ESCAPE)
    page.until(lambda: page.texts("#crumbs button") == ["Everything"] and page.all(".fold"))

    page.one("#find-text").send_keys("A A TAIL", Keys.ENTER)  # the oldest, which is folded
    page.until(lambda: page.texts("#found") == ["1 of 1"] and page.texts(".node.here"))
    way = page.all(".node.way:not(.fold)")
    assert IMAGE_TAG in way[0].accessible_name and not page.one("#next").is_displayed()
    page.one("#find-text").clear()
    page.one("#find-text").send_keys("a tail", Keys.ENTER)
    page.until(lambda: page.texts("#found") == ["1 of 26"])
    page.one("#next").click()
    page.until(lambda: page.texts("#found") == ["2 of 26"] and page.all(".node.here"))
    page.one("#find-text").send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".way, .here") and page.texts("#found") == [""])

    (one,) = page.all(f".node[aria-label*='{IMAGE_TAG}']")
    one.click()
    page.until(lambda: len(page.texts("#crumbs button")) == 2)
    http.post(f"{url}/v1/cache/flush")  # a branch that has gone is left
    page.until(lambda: page.texts("#crumbs button") == ["Everything"] and not page.all(".idle"))
    page.driver.get_log("browser")  # 404, once


@pytest.mark.parametrize("width", [1280, 390])
def test_everything_has_a_name_and_fits_the_width(page: Page, width: int):
    page.resize(width, 800)
    page.ask(QUESTION)
    page.edit(0, OTHER)
    idle(page, 3)
    page.all(".node")[1].click()
    assert page.all("#detail button") and page.one(".versions button").is_displayed()
    page.all(".edit")[0].click()
    controls = page.all("input, textarea, button, [tabindex], [role]")
    assert len(controls) > 15
    nameless = [
        c.get_attribute("id") for c in controls if c.is_displayed() and not c.accessible_name
    ]
    assert {*nameless} <= {"refused", "trouble", "gone"}  # these are messages
    fields = "[...document.querySelectorAll('input, textarea')]"  # a placeholder is no label
    assert page.run(f"return {fields}.filter((e) => !e.labels.length && !e.ariaLabel).length") == 0
    wide, inner = page.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner == width
    page.resize(1280, 800)


def test_a_page_that_nobody_sees_asks_for_nothing(page: Page):
    asks = "return timers.size + flying > 0"
    page.run(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.until(lambda: not page.run(asks))
    page.ask(QUESTION)  # which looks once, and then no more
    page.until(lambda: page.all(".node.idle") and not page.run(asks))
    page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    assert page.run(asks)


def test_a_server_with_keys_asks_for_them(window: Page):
    """The API key is enough to chat, the cache takes the admin key."""

    def send_key(key: str) -> None:
        window.until(lambda: window.one("#key").is_displayed())
        window.one("#key-text").clear()
        window.one("#key-text").send_keys(key, Keys.ENTER)

    llm = LLM(kv_cache_memory_bytes="32MiB")
    with live(llm, api_key="secret", admin_key="boss") as server:
        window.driver.get(server.url)
        send_key("clé…")
        assert window.all("#key-text:invalid")  # it would be no header, so it is not sent
        send_key("secret")
        window.until(lambda: "the server's admin key is needed" in window.text("#trouble"))
        numbers(window.ask(QUESTION))
        assert not window.all(".node")
        send_key("boss")
        window.until(lambda: not window.text("#trouble"))
        numbers(window.ask(QUESTION))
        window.until(lambda: window.all(".node.idle"))
        window.driver.get("about:blank")


def test_it_shows_how_far_a_model_is_loaded_and_then_goes_on_by_itself(window: Page):
    llm, page = LLM(kv_cache_memory_bytes="16MiB"), window
    with loading() as (server, url):
        bar = "return document.querySelector('progress').position"
        server.report("reading weights", 0.5)
        page.driver.get(url)
        page.until(lambda: page.text("#loading") == "Loading the model: reading weights")
        assert page.run(bar) == 0.5
        assert page.text("#trouble") == "" and not page.one("#send").is_enabled()
        page.one("#question").send_keys("Too early", Keys.ENTER)
        assert not page.all("article") and page.text("#refused") == ""
        server.report("packing weights", None)
        page.until(lambda: page.text("#loading") == "Loading the model: packing weights")
        assert page.run(bar) == -1
        with served(server, llm):
            page.until(lambda: "pages in use" in page.text("#pages"))
            assert page.text("#model") == "tabletalk" and page.one("#send").is_enabled()
            assert not page.one("#loading").is_displayed()
            page.driver.get("about:blank")


def test_tiers_are_bars_and_what_was_loaded_has_a_shade(window: Page, tmp_path: Path):
    flags = "--kv-dir", f"{tmp_path}/kv", "--kv-dir-size", "12MB", "--kv-cache-memory-bytes", "6MB"
    with forked(tmp_path, *flags) as (_, url):
        for name in cycle("abc"):
            message = {"role": "user", "content": f"{name} " + "what is this " * 200}
            body = {"model": "tabletalk", "messages": [message], "max_tokens": 1}
            assert http.post(f"{url}/v1/chat/completions", json=body).status_code == 200
            if http.get(f"{url}/v1/cache").json()["stats"]["loaded_tokens"]:
                break
        window.open(url)
        window.until(lambda: window.all("#hits rect.loaded"))
        pool, disk = window.all("#tiers div")
        moved = re.search(
            r"on disk \(([1-9]\d*) read, ([1-9]\d*) written\)$", window.text("#pages")
        )
        assert moved and str(disk.get_attribute("title")).endswith(moved[0])
        assert pool.size["width"] < disk.size["width"]
        assert 0 < window.one("#tiers .disk i").size["width"] < disk.size["width"]
        window.driver.get("about:blank")


def test_pages_of_windows_are_those_of_running_requests_kept_left_behind_or_free(page: Page):
    """The pool's "in use" counts kept pages, too: no two numbers have one name."""
    by_use = {"running": 3, "kept": 1200, "left": 40, "free": 5}
    show = """
        const [path, uses, done] = arguments;
        const news = await (await fetch("v1/cache")).json();
        news.stats.window_pages = uses;
        (await import(path)).showTree(news);
        done(document.querySelector("#pages").textContent);
    """
    shown = page.driver.execute_async_script(
        f"(async (...arguments) => {{{show}}})(...arguments)", "/tree.js", by_use
    )
    assert shown.endswith(
        "; windows: 3 pages of running requests, 1,200 kept, 40 left behind, 5 free"
    )
    assert shown.count("in use") == 1
