"""The page at `/`, in a browser where there is one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from radixcache import LLM
from radixcache.runtime.demo.script import TABLE
from radixcache.runtime.server.http import static
from tests.runtime.server import http
from tests.runtime.server.browser import INSTALLED, Page, browser
from tests.runtime.server.live import LiveServer, ask, live
from tests.runtime.server.test_lifecycle import forked
from tests.runtime.server.trees import fill

needs_browser = pytest.mark.skipif(not INSTALLED, reason="needs chromium and chromedriver")

QUESTION, ANSWER = (
    "What is the occupation of Nora Lund?",
    "The occupation of Nora Lund is Carpenter.",
)
NUMBERS = re.compile(
    r"([\d,]+) prompt tokens, ([\d,]+) cached, ([\d,]+) computed, TTFT [\d.]+ ms"
    r"(, [\d,.]+ tokens/s)?"
)


# What it is made of.


def test_the_files_come_with_their_types_and_may_load_nothing_from_elsewhere(server: LiveServer):
    for path, (_, media_type) in static.FILES.items():
        response = server.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == media_type
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in response.headers["content-security-policy"]
        assert set(re.findall(r"https?://[^\"' ]*", response.text)) <= {
            "http://www.w3.org/2000/svg"
        }


def test_no_path_leads_out_of_the_folder(server: LiveServer):
    for path in ("/page/index.html", "/static.py", "/..%2fstatic.py", "/main.js/../app.py"):
        assert server.get(path).status_code == 404


def test_the_bundled_model_has_an_example_and_others_have_none(server: LiveServer):
    about = server.get("/page.json").json()
    assert about["model"] == "tabletalk" and about["example"]["system"] == TABLE.read_text()
    assert 3 <= len(about["example"]["questions"]) <= 4
    assert about["note"] == "looks up the table above; radixcache serve MODEL for a real one"
    default = {"temperature": 0, "top_p": 1, "max_tokens": 64}
    assert about["sampling"] == {**default, "description": "temperature 0 (greedy)"}
    name = server.backend.llm.model_name
    server.backend.llm.model_name = "other"
    try:
        about = server.get("/page.json").json()
        assert about["example"] is None and about["note"] is None
    finally:
        server.backend.llm.model_name = name


def test_an_unchanged_cache_is_not_sent_again(server: LiveServer):
    server.post("/v1/cache/flush")

    def tag() -> str:
        """The present tag, which is not sent if it is known."""
        response = server.get("/v1/cache")
        found: str = response.headers["etag"]
        again = server.get("/v1/cache", headers={"If-None-Match": found})
        assert (again.status_code, again.text, again.headers["etag"]) == (304, "", found)
        return found

    def unpin() -> None:
        server.delete("/v1/prefixes/p")

    changes: list[Callable[[], Any]] = [
        lambda: server.post("/v1/chat/completions", {"messages": ask(QUESTION)}),
        lambda: server.post("/v1/chat/completions", {"messages": ask(QUESTION)}),
        lambda: server.post("/v1/prefixes", {"name": "p", "prompt": "x " * 40}),
        unpin,
        lambda: server.post("/v1/cache/flush"),
    ]
    tags = [tag()]
    for change in changes:
        change()
        tags.append(tag())
    assert len(set(tags)) == len(tags)


def test_the_cache_tells_of_the_last_requests(server: LiveServer):
    server.post("/v1/cache/flush")
    answers = [
        server.post("/v1/chat/completions", {"messages": ask(text)}).json()["usage"]
        for text in ("How old is Nora Holm?", QUESTION)
    ]
    recent = server.get("/v1/cache").json()["recent"][-2:]
    assert [(r["prompt_tokens"], r["cached_tokens"]) for r in recent] == [
        (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        for usage in answers
    ]
    assert all(0 < request["ttft"] < 60 for request in recent)


# What people see.

STUB = """
// What is on its way can be counted; `stall` never lets an answer end.
const original = window.fetch;
window.flying = 0; // requests that have no answer yet
window.fetch = async (path, options) => {
  flying += 1;
  const response = await original(path, options).finally(() => { flying -= 1; });
  if (!String(path).endsWith("chat/completions") || !response.ok) return response;
  const text = new TransformStream({
    transform(chunk, controller) {
      controller.enqueue(chunk);
      if (window.stall) return new Promise((_, reject) =>
        options.signal.addEventListener("abort", () => reject(options.signal.reason)));
    },
  });
  const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(text);
  return new Response(body.pipeThrough(new TextEncoderStream()), response);
};
const { setTimeout: set, clearTimeout: clear } = window;
window.timers = new Set(); // those that have yet to go off
window.setTimeout = (run, ms) => {
  const timer = set(() => { timers.delete(timer); run(); }, ms);
  timers.add(timer);
  return timer;
};
window.clearTimeout = (timer) => { timers.delete(timer); clear(timer); };
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for a table and half."""
    with forked(tmp_path_factory.mktemp("server"), "--kv-cache-memory-bytes", "10MiB") as (_, url):
        yield url


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile"), STUB) as page:
        yield page


@pytest.fixture
def page(url: str, window: Page) -> Iterator[Page]:
    """The page, with an empty cache. Afterwards, nothing was wrong and nobody else was asked."""
    window.driver.get("about:blank")  # a page of another server may still ask that one
    window.forget()
    http.post(f"{url}/v1/cache/flush")
    window.open(url)
    window.until(lambda: not window.all(".node"))
    yield window
    log = window.driver.get_log("browser")
    assert [entry["message"] for entry in log if " 400 " not in entry["message"]] == []
    requests = window.requests
    assert requests and all(request.startswith(url) for request in requests)


def numbers(line: str) -> tuple[int, int, int]:
    """Prompt, cached and computed tokens of an answer, as the page says them."""
    match = NUMBERS.fullmatch(line)
    assert match, line
    prompt, cached, computed = (int(number.replace(",", "")) for number in match.groups()[:3])
    return prompt, cached, computed


def cached_tokens(page: Page) -> int:
    return int(page.text("#pages").partition(" ")[0].replace(",", ""))


@needs_browser
def test_three_turns_grow_the_tree_and_compute_only_what_is_new(page: Page, url: str):
    questions = [QUESTION, "And the email?", "How old is Nora Holm?"]
    assert TABLE.read_text() == page.one("#system-text").get_attribute("value")
    grown = [cached_tokens(page)]
    known = 0
    for turn, question in enumerate(questions):
        prompt, cached, computed = numbers(page.ask(question))
        assert cached + computed == prompt
        assert cached == known  # all that was computed before
        page.until(lambda before=grown[-1]: cached_tokens(page) > before)
        view = http.get(f"{url}/v1/cache").json()
        assert (view["recent"][-1]["prompt_tokens"], view["recent"][-1]["cached_tokens"]) == (
            prompt,
            cached,
        )
        (node,) = view["namespaces"][0]["tree"]["children"]
        page.until(lambda tokens=node["num_tokens"]: cached_tokens(page) == tokens)
        assert len(page.all("#hits rect")) == len(page.all("#ttft rect")) >= turn + 1
        grown.append(node["num_tokens"])
        known = node["num_tokens"]
    assert page.texts("article.assistant .text")[0] == ANSWER
    assert page.texts("article.user .text") == questions
    assert grown == sorted(set(grown))


@needs_browser
def test_an_edited_message_is_a_branch_that_hits_up_to_the_word_that_differs(page: Page):
    page.ask(QUESTION)
    page.ask("What is the phone number of Hugo Marsh?")
    page.until(lambda: len(page.all(".node")) == 1)
    _, _, computed = numbers(page.edit(1, "What is the phone number of Hugo Lund?"))
    assert computed < 6
    assert page.texts("article .text")[2:] == [
        "What is the phone number of Hugo Lund?",
        "The phone number of Hugo Lund is 555-1642.",
    ]
    page.until(lambda: len(page.all(".node.idle")) == 3)
    shared, one, other = [node.rect for node in page.all(".node")]
    assert one["x"] == other["x"] >= shared["x"] + shared["width"] > 5 * one["width"]
    page.one("#new").click()
    assert not page.all("article") and len(page.all("#examples button")) == 4


@needs_browser
def test_the_explanation_says_where_and_why_and_is_no_markup(page: Page):
    question = "What is <b>{}</b> about, and who is it that asks?"
    page.ask(question.format("this"))
    prompt, cached, computed = numbers(page.edit(0, question.format("that")))
    line, last = page.texts("#reasons li")
    assert line.startswith(f"{cached:,} – {prompt - 1:,}diverged at token {cached:,} of {prompt:,}")
    assert "<b>that</b>" in line and "<b>this</b>" in line
    assert last == f"{prompt - 1:,} – {prompt:,}the last token is computed for its logits"
    segments = "[...document.querySelectorAll('#strip i')]"
    parts = page.run(f"return {segments}.map((part) => [part.className, +part.style.flexGrow])")
    assert parts == [["hit", cached], ["miss", computed - 1], ["miss", 1]]
    assert numbers(page.edit(0, question.format("that"))) == (prompt, prompt, 0)
    parts = page.run(f"return {segments}.map((part) => [part.className, +part.style.flexGrow])")
    assert parts == [["hit", prompt]] and not page.texts("#reasons li")


@needs_browser
def test_what_is_flushed_is_seen_to_go(page: Page):
    page.ask(QUESTION)
    page.until(lambda: len(page.all(".node.idle")) == 1)
    tokens = page.texts(".node small")
    page.one("#flush").click()
    page.until(lambda: page.texts("#gone") == [f"{tokens[0]} tokens flushed"])
    assert page.texts(".node.evicted small") == tokens
    page.until(lambda: not page.all(".node") and page.texts("#gone") == [""])
    assert cached_tokens(page) == 0


@needs_browser
def test_what_is_evicted_is_seen_to_go(page: Page, url: str):
    page.ask(QUESTION)
    page.until(lambda: len(page.all(".node.idle")) == 1)
    http.post(f"{url}/v1/completions", json={"prompt": "x y " * 800, "max_tokens": 1}, timeout=60)
    page.until(lambda: page.all(".node.evicted"))
    lost = int(page.texts(".node.evicted small")[0].replace(",", ""))
    stats = http.get(f"{url}/v1/cache").json()["stats"]
    assert lost == stats["evicted_tokens"] > 0
    assert page.texts("#gone") == [f"{lost:,} tokens evicted"]
    assert page.text("#pages").endswith(f" {lost:,} evicted")


@needs_browser
def test_nodes_in_use_and_pinned_ones_say_so(page: Page, url: str):
    page.run("window.stall = true")
    body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True}
    seen = threading.Event()

    def keep_busy() -> None:  # one answer may be over before the page looks
        while not seen.is_set():
            http.post(f"{url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(keep_busy)
        try:
            page.until(lambda: page.all(".node.used"))
        finally:
            seen.set()
    busy.result()
    page.until(lambda: page.all(".node.idle") and not page.all(".node.used"))
    http.post(f"{url}/v1/prefixes", json={"name": "mine", "prompt": "z " * 40}, timeout=60)
    page.until(lambda: page.all(".node.pinned"))
    assert "pinned as mine" in page.one(".node.pinned").accessible_name
    http.delete(f"{url}/v1/prefixes/mine")
    page.until(lambda: not page.all(".node.pinned"))


@needs_browser
def test_an_answer_can_be_stopped_and_the_chat_goes_on(page: Page):
    page.run("window.stall = true")
    page.one("#question").send_keys(QUESTION, Keys.ENTER)
    page.until(lambda: page.one("#stop").is_displayed() and page.texts(".assistant .text") != [""])
    page.one("#stop").click()
    page.until(lambda: page.texts(".usage") == ["stopped"])
    assert page.one("#send").is_displayed() and page.texts("#refused") == [""]
    page.run("window.stall = false")
    assert numbers(page.ask("And the email?"))


@needs_browser
def test_a_refused_message_can_be_sent_again(page: Page):
    page.run("document.querySelector('#question').value = 'too long '.repeat(4000)")
    page.one("#question").send_keys(Keys.ENTER)
    page.until(lambda: "the prompt has" in page.text("#refused"))
    assert not page.all("article")
    assert str(page.one("#question").get_attribute("value")).startswith("too long too long")
    page.one("#question").clear()
    numbers(page.ask(QUESTION))
    assert page.texts("#refused") == [""]


IDLE = "return timers.size + flying === 0"


def hide(page: Page) -> None:
    """Let the page believe that nobody sees it, and wait until it asks for nothing more."""
    page.run(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.until(lambda: page.run(IDLE))


def titles(page: Page) -> list[str]:
    return page.texts("#conversations .pick span")


def choose(page: Page, index: int, button: str = ".pick") -> None:
    """Open the list and press what is beside, or is, the name of one conversation."""
    if not page.one("#conversations").get_attribute("open"):
        page.one("#conversations summary").click()
    page.all(f"#conversations li {button}")[index].click()


@needs_browser
def test_conversations_are_kept_shown_renamed_and_deleted(page: Page, url: str):
    """An answer goes on while another conversation is shown, and a reload loses nothing."""
    kept = "return localStorage.getItem('radixcache.conversations.2')"
    page.run("localStorage.setItem('radixcache.conversations.2', '[{\"id\": 1}, null, 7')")
    page.open(url)
    assert titles(page) == []
    usage = page.ask(QUESTION)
    page.one("#new").click()
    page.one("#system-text").send_keys(Keys.END, " Be brief.")
    page.run("window.stall = true")
    page.one("#question").send_keys("How old is Nora Holm?", Keys.ENTER)
    page.until(lambda: page.texts(".assistant .text") != [""] and len(titles(page)) == 2)
    choose(page, titles(page).index(QUESTION))
    assert page.texts("article .text") == [QUESTION, ANSWER]
    assert page.one("#send").is_displayed() and not page.one("#flush").is_enabled()
    assert sum("answering" in note for note in page.texts("#conversations small")) == 1
    choose(page, titles(page).index("How old is Nora Holm?"))
    assert "Be brief." in str(page.one("#system-text").get_attribute("value"))
    page.until(lambda: page.one("#stop").is_displayed())
    page.one("#stop").click()
    page.until(lambda: page.texts(".usage") == ["stopped"])
    choose(page, titles(page).index(QUESTION))

    page.driver.refresh()
    page.until(lambda: page.texts("article .text") == [QUESTION, ANSWER])
    assert page.texts(".assistant .usage") == [usage] and page.all(".assistant .strip i")
    assert set(titles(page)) == {QUESTION, "How old is Nora Holm?"}
    choose(page, titles(page).index(QUESTION), "[aria-label^=Rename]")
    page.press("Nora", Keys.ENTER)
    page.until(lambda: titles(page)[0] == "Nora" and page.text("#conversations summary") == "Nora")
    assert '"title":"Nora"' in page.run(kept)

    # What another tab has written is neither lost nor overwritten.
    page.run(
        "const name = 'radixcache.conversations.2', all = JSON.parse(localStorage.getItem(name));"
        "const mine = all.find((one) => one.title === 'Nora');"
        "mine.changed += 1; mine.turns[1].content = 'from the other tab';"
        "all.push({id: 'other', title: 'Other', system: '', changed: 5, turns: []});"
        "all.push({id: 'foreign', title: 7, changed: 5, turns: [{}]});"
        "localStorage.setItem(name, JSON.stringify(all))"
    )
    page.ask("And the email?")
    stored = page.run(kept)
    assert titles(page).count("Nora") == 2 and "Other" in titles(page)
    assert "from the other tab" in stored and "And the email?" in stored
    assert "foreign" not in stored
    for left in (3, 2, 1, 0):
        choose(page, 0, "[aria-label^=Delete]")
        assert len(titles(page)) == left + 1  # a second click is needed
        choose(page, 0, "[aria-label^=Delete]")
        page.until(lambda left=left: len(titles(page)) == left)
    assert not page.all("article") and page.run(kept) == "[]"


@needs_browser
def test_a_browser_without_room_says_so_and_chats(page: Page):
    page.run(
        "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }"
    )
    numbers(page.ask(QUESTION))
    assert page.text("#refused") == "the browser has no room to keep this conversation"


@needs_browser
def test_what_has_no_room_takes_no_room_from_the_others(page: Page):
    numbers(page.ask(QUESTION))
    assert page.run("return JSON.parse(localStorage['radixcache.conversations.2']).length") == 1
    page.one("#new").click()
    page.run("""
        const {setItem} = Storage.prototype;
        Storage.prototype.setItem = function (name, value) {
          if (value.length > 30_000) throw new DOMException("", "QuotaExceededError");
          setItem.call(this, name, value);
        };
        document.querySelector("#question").value = "too long ".repeat(4000);
    """)
    page.one("#question").send_keys(Keys.ENTER)
    page.until(lambda: "the prompt has" in page.text("#refused"))
    assert page.run("return JSON.parse(localStorage['radixcache.conversations.2']).length") == 1
    page.one("#question").clear()


@needs_browser
def test_an_edit_that_is_refused_takes_nothing_away(page: Page):
    numbers(page.ask(QUESTION))
    numbers(page.ask("And the email?"))
    page.all(".edit")[0].click()
    page.run("document.querySelector('article textarea').value = 'too long '.repeat(4000)")
    page.one("article form").find_element("css selector", "button").click()
    page.until(lambda: "the prompt has" in page.text("#refused"))
    assert page.texts("article.user .text") == [QUESTION, "And the email?"]
    assert len(page.all(".assistant .usage")) == 2
    kept = "return JSON.parse(localStorage['radixcache.conversations.2'])[0].turns.length"
    assert page.run(kept) == 4
    page.one("#question").clear()


@needs_browser
def test_an_answer_that_breaks_off_says_so_and_the_chat_goes_on(page: Page, url: str):
    page.run("""
        window.kept = window.fetch;
        const event = {choices: [{delta: {content: "Half of"}}]};
        window.fetch = async (path, options) => String(path).endsWith("chat/completions")
          ? new Response(`data: ${JSON.stringify(event)}\n\n`) : kept(path, options);
    """)
    page.one("#question").send_keys(QUESTION, Keys.ENTER)
    page.until(lambda: page.text("#refused") == "the answer has broken off")
    assert page.texts(".usage") == ["stopped"] and page.one("#send").is_displayed()
    page.open(url)
    assert page.texts(".assistant .text") == ["Half of"]


@needs_browser
def test_what_others_have_written_into_the_list_does_no_harm(page: Page, url: str):
    page.run("""
        const chat = {id: "a", title: "<img src=x onerror=alert(1)>", system: "", turns: []};
        localStorage["radixcache.conversations.2"] = JSON.stringify(
          [{...chat, changed: 1e300}, {...chat, changed: 1}, {...chat, changed: "1"}, null, 7]);
    """)
    page.open(url)
    assert len(page.all("#conversations .pick")) == 1 and not page.all("#conversations img")
    numbers(page.ask(QUESTION))


@needs_browser
def test_an_answer_is_computed_anew_with_the_sampling_that_is_asked_for(page: Page, url: str):
    prompt, _, _ = numbers(page.ask(QUESTION))
    page.all(".assistant .again")[-1].click()
    hit = f"{prompt:,} prompt tokens, {prompt:,} cached, 0 computed, TTFT"
    page.until(lambda: [line[: len(hit)] for line in page.texts(".assistant .usage")] == [hit])
    assert page.texts("article .text") == [QUESTION, ANSWER]
    page.run(
        "window.sent = []; const before = window.fetch; window.fetch = (path, options) => {"
        "if (options.body) sent.push(JSON.parse(options.body)); return before(path, options); }"
    )
    page.one("#sampling summary").click()
    for name, value in {"temperature": "0.5", "max_tokens": "2", "seed": "x1"}.items():
        page.one(f"#sampling [name={name}]").send_keys(value)
    assert page.text("#sampling summary") == "Sampling: temperature 0.5, max_tokens 2, seed x1"
    page.all(".assistant .again")[-1].click()
    page.until(lambda: "seed" in page.text("#refused"))
    assert page.texts("article .text") == [QUESTION, ANSWER]  # the old answer is still there
    page.one("#sampling [name=seed]").clear()
    page.all(".assistant .again")[-1].click()
    page.until(lambda: page.texts("article .text")[-1:] not in ([ANSWER], [""]))
    page.until(lambda: page.one("#send").is_displayed())
    assert ANSWER.startswith(page.texts("article .text")[-1].strip() or "?")
    asked = [{k: body[k] for k in ("temperature", "top_p", "max_tokens", "seed") if k in body}
             for body in page.run("return sent")]  # fmt: skip
    assert asked == [
        {"temperature": 0.5, "max_tokens": 2, "seed": "x1"},
        {"temperature": 0.5, "max_tokens": 2},
    ]


MARKDOWN = {
    "# A\n###### B": "<h3>A</h3><h6>B</h6>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "**a *b*** ***c** d* __e__ ~~f~~": "<p><strong>a <em>b</em></strong> <em><strong>c</strong> d"
    "</em> <strong>e</strong> <del>f</del></p>",
    "snake_case_name 2 * 3 * 4 \\*x\\* **open": "<p>snake_case_name 2 * 3 * 4 *x* **open</p>",
    "`a*b*` ``c`d`` `open": "<p><code>a*b*</code> <code>c`d</code> `open</p>",
    "- a\n  - b\n    - c\n- d": "<ul><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li>"
    "</ul></li><li><p>d</p></li></ul>",
    "3. a\n   > q\n4. b\n\nend": '<ol start="3"><li><p>a</p><blockquote><p>q</p></blockquote></li>'
    "<li><p>b</p></li></ol><p>end</p>",
    "x\n- a\n***\ny\n-z": "<p>x</p><ul><li><p>a</p></li></ul><hr><p>y\n-z</p>",
    "```py\n\ta\n\n  *b*\n```\nc": '<div class="code"><small>py</small><button type="button">Copy'
    "</button><pre><code>\ta\n\n  *b*</code></pre></div><p>c</p>",
    "~~~\n<b>never closed": '<div class="code"><small></small><button type="button">Copy</button>'
    "<pre><code>&lt;b&gt;never closed</code></pre></div>",
    "|a|b|\n|:-|-:|\n|`x`|1|2|\n|y|": '<table><thead><tr><th style="text-align: left;">a</th>'
    '<th style="text-align: right;">b</th></tr></thead><tbody><tr><td style="text-align: left;">'
    '<code>x</code></td><td style="text-align: right;">1</td></tr><tr>'
    '<td style="text-align: left;">y</td></tr></tbody></table>',
    '[**a**](https://b.org/c_(d) "t") [m](mailto:a@b.org)': '<p><a href="https://b.org/c_(d)" '
    'title="https://b.org/c_(d)" target="_blank" rel="noopener"><strong>a</strong></a> '
    '<a href="mailto:a@b.org" title="mailto:a@b.org" target="_blank" rel="noopener">m</a></p>',
    "**https://a.org/b.**": '<p><strong><a href="https://a.org/b" title="https://a.org/b" '
    'target="_blank" rel="noopener">https://a.org/b</a>.</strong></p>',
    "<script>alert(1)</script>\n<img src=x onerror=alert(1)>\n&lt;b&gt;": "<p>&lt;script&gt;"
    "alert(1)&lt;/script&gt;\n&lt;img src=x onerror=alert(1)&gt;\n&amp;lt;b&amp;gt;</p>",
    "# <b>x</b>\n- <i>y</i>": "<h3>&lt;b&gt;x&lt;/b&gt;</h3><ul><li><p>"
    "&lt;i&gt;y&lt;/i&gt;</p></li></ul>",
    **{
        f"[x]({address})": f"<p>[x]({address.replace('&', '&amp;')})</p>"
        for address in (
            "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "/v1/cache",
            "javascript&#58;alert(1)", "data:text/html,x", "vbscript:x", "//evil.org", "",
            "\x01javascript:alert(1)", "file:///etc/passwd",
        )
    },
}  # fmt: skip
"""What becomes of a text. No markup of its own ever becomes an element or a dangerous address."""

HOSTILE = ("> ", "- ", "* a ", "*a ", "**a** ", "_a", "a_ ", "[", "[a](", "](b", "`", "``` ",
           "`` ` ", "|", "|a", "a|b\n-|-\n", "- a\n", "  - a\n ", "~", "\\", "#", "# ", "* ",
           "1. ", "](https://a)", "[[a]](b ", "](x (y) ", "https://", "https://.", "\t", " ", "\n",
           "***", "a\n> ", "```\n", "![a](b)", "<a href=")  # fmt: skip
"""Repeated, each takes time that is linear in its length."""

RENDER = """
const [cases, hostile, done] = arguments;
const { markdown } = await import("/markdown.js");
const html = (text, step) => {
  const parent = document.createElement("div");
  const show = markdown(parent);
  for (let end = step; end < text.length; end += step) show(text.slice(0, end));
  show(text);
  return parent.innerHTML;
};
const time = (text) => {
  const start = performance.now();
  markdown(document.createElement("div"))(text);
  return performance.now() - start;
};
const isSlow = (piece) => {
  const [short, long] = [10000, 40000].map((length) => time(piece.repeat(length / piece.length)));
  return long > 10 * short + 200;
};
const often = [1, 2, 3, 4, 5]; // something else may compute just then
const slow = hostile.filter((piece) => often.every(() => isSlow(piece)));
const shown = (step) => cases.map((text) => html(text, step));
done({ whole: shown(1e9), grown: shown(1), slow });
"""


@needs_browser
def test_markdown_is_shown_and_what_is_hostile_is_text(page: Page):
    """Letter by letter or at once, the same comes of it."""
    script = RENDER.replace("const [cases, hostile, done] = arguments;", "", 1)
    run = f"const [cases, hostile, done] = arguments; (async () => {{{script}}})()"
    found = page.driver.execute_async_script(run, list(MARKDOWN), HOSTILE)
    assert dict(zip(MARKDOWN, found["whole"], strict=True)) == MARKDOWN
    assert dict(zip(MARKDOWN, found["grown"], strict=True)) == MARKDOWN
    assert found["slow"] == []


@needs_browser
def test_one_cold_start_does_not_flatten_the_chart_and_a_request_tells_its_figures(page: Page):
    recent = [
        {"prompt_tokens": 1000, "cached_tokens": 900 if ttft < 1 else 0, "ttft": ttft}
        for ttft in (8.0, 0.004, 0.040, 0.012)
    ]
    hide(page)  # so that nothing else is drawn
    for _ in range(2):  # the first time, the tree gets another height, and looks at the cache
        page.driver.execute_async_script(
            "const [view, done] = arguments;"
            "import('/charts.js').then((charts) => { charts.showCharts(view);"
            "requestAnimationFrame(() => requestAnimationFrame(done)); })",
            {"recent": recent, "stats": {"requests": 4, "hit_rate": 0.675}},
        )
        page.until(lambda: page.run(IDLE))
    tops = [float(bar.get_attribute("y") or 1) for bar in page.all("#ttft rect")]
    assert tops[0] < tops[2] < tops[3] < tops[1]
    assert tops[1] - tops[2] > 0.2  # a decade is a fifth of the height
    assert page.texts("#ttft .axis span") == ["10 s", "1 s", "100 ms", "10 ms", "1 ms"]
    page.run("document.querySelector('#ttft svg').focus()")
    page.press(Keys.ARROW_LEFT, Keys.HOME)
    said = "1,000 tokens, 0.0 % cached, TTFT 8000 ms"
    assert page.texts("#hits small") == page.texts("#ttft small") == [said]
    page.press(Keys.END)
    assert "90.0 % cached, TTFT 12 ms" in page.text("#ttft small")
    box = page.one("#hits svg").rect
    page.run(
        "document.querySelector('#hits svg').dispatchEvent(new PointerEvent('pointerdown',"
        "{clientX: arguments[0], clientY: arguments[1], pointerType: 'touch'}))",
        box["x"] + box["width"] * 22.5 / 24, box["y"] + 5,
    )  # fmt: skip
    assert "40 ms" in page.text("#hits small") and len(page.all("rect.chosen")) == 2


@needs_browser
def test_the_tree_is_read_with_the_keyboard(page: Page):
    page.ask(QUESTION)
    page.edit(0, "How old is Nora Holm?")
    page.until(lambda: len(page.all(".node.idle")) == 3)
    page.one("#scale input").click()  # which is before the tree
    for _ in range(10):
        page.press(Keys.TAB)
        if page.run("return document.activeElement.className").startswith("node"):
            break
    page.press(Keys.HOME)
    assert page.text("#detail pre").startswith("<|system|>You answer questions")
    for keys, start in (
        ([Keys.ARROW_RIGHT], QUESTION),
        ([Keys.ARROW_DOWN], "How old is Nora Holm?"),
        ([Keys.ARROW_LEFT], "<|system|>"),
        ([Keys.END], "How old is Nora Holm?"),
        ([Keys.HOME], "<|system|>"),
    ):
        page.press(*keys)
        assert page.text("#detail pre").startswith(start)
        name = page.driver.switch_to.active_element.accessible_name
        assert " page" in name and " ".join(start.split()) in name
    page.press(Keys.SHIFT + Keys.TAB)  # the tree is one stop
    assert page.run("return document.activeElement.id") == "find-text"


IMAGE_TAG = "<img src=x onerror=alert(1)>"

CLIPPED = """
// Boxes whose label is not there, or has no room for four letters.
return [...document.querySelectorAll('.node')].filter((box) => {
  const [inside, text] = [box, box.firstChild].map((element) => element.getBoundingClientRect());
  const room = Math.min(box.firstChild.textContent.length, 4) * 5;
  const below = text.bottom > inside.bottom + 1;
  return !box.textContent || text.width < room || text.height < 12 || below;
}).map((box) => box.outerHTML)"""


def branch(url: str, stem: str, tails: list[str]) -> None:
    body = {"prompt": [f"{stem} {tail}" for tail in tails], "max_tokens": 1}
    http.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


@needs_browser
def test_what_has_no_room_folds_and_opens_and_a_node_can_fill_the_tree(page: Page, url: str):
    branch(url, f"One {IMAGE_TAG} stem", [f"{c} a tail" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    branch(url, "Two", [f"{c} end" for c in "abcdef"])
    page.until(lambda: page.texts(".node.fold"))
    total = http.get(f"{url}/v1/cache").json()["stats"]["cached_nodes"]

    def counted() -> int:
        folds = [int(text.split()[0].replace(",", "")) for text in page.texts(".node.fold span")]
        return len(page.all(".node:not(.fold)")) + sum(folds)

    page.until(lambda: counted() == total)
    assert not page.run(CLIPPED) and not page.all(".node img, #crumbs img, #detail img")
    (one,) = [node for node in page.all(".node") if IMAGE_TAG in node.accessible_name]
    one.click()
    page.until(lambda: len(page.texts("#crumbs button")) == 2)
    assert page.texts("#crumbs button")[0] == "Everything"
    assert IMAGE_TAG in page.texts("#crumbs button")[1]
    assert not any("end" in text for text in page.texts(".node span"))
    assert page.run("return document.activeElement.ariaLabel").find(IMAGE_TAG) > 0
    folded = len(page.all(".node:not(.fold)"))
    page.press(Keys.END)
    assert re.search(r"\d+ branches folded, \d+ nodes, ", page.text("#detail"))
    page.press(Keys.ENTER)
    page.until(lambda: len(page.all(".node:not(.fold)")) > folded and not page.all(".fold"))
    assert {f"{c} a tail" for c in "ABYZ"} <= {name[:8] for name in page.texts(".node span")}
    page.one(".node").click()  # it fills the tree already
    page.press(Keys.ESCAPE)
    page.until(lambda: page.texts("#crumbs button") == ["Everything"] and page.all(".fold"))
    page.until(lambda: counted() == total)


@needs_browser
def test_text_is_found_and_its_way_is_lit(page: Page, url: str):
    branch(url, f"One {IMAGE_TAG} stem", [f"{c} a tail" for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    page.until(lambda: page.all(".node.fold"))
    page.one("#find-text").send_keys("A A TAIL", Keys.ENTER)  # the oldest, which is folded
    page.until(lambda: page.texts("#found") == ["1 of 1"] and page.texts(".node.here"))
    way = page.all(".node.way:not(.fold)")
    assert IMAGE_TAG in way[0].accessible_name and not page.one("#next").is_displayed()
    page.one("#find-text").clear()
    page.one("#find-text").send_keys("a tail", Keys.ENTER)
    page.until(lambda: page.texts("#found") == ["1 of 26"])
    first = page.until(lambda: page.texts(".node.here span"))
    page.one("#next").click()
    page.until(lambda: page.texts("#found") == ["2 of 26"] and page.all(".node.here"))
    page.until(lambda: page.texts(".node.here span") not in ([], first))
    page.one("#before").click()
    page.until(lambda: page.texts(".node.here span") == first)
    assert page.all(".node.fold.way"), "there are more in the fold"
    page.one("#find-text").send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all(".searched, .here") and page.texts("#found") == [""])
    page.one("#find-text").send_keys("nobody says this", Keys.ENTER)
    page.until(lambda: page.texts("#found") == ["not found"])
    page.open(url)
    page.until(lambda: page.all(".node.fold"))
    assert page.texts("#found") == [""] and page.texts("#crumbs button") == ["Everything"]


@needs_browser
def test_a_branch_that_has_gone_is_left(page: Page, url: str):
    branch(url, "One stem", ["A tail", "B tail"])
    page.until(lambda: len(page.all(".node.idle")) == 3)
    page.one(".node").click()
    page.until(lambda: len(page.texts("#crumbs button")) == 2)
    http.post(f"{url}/v1/cache/flush")
    page.until(lambda: page.texts("#crumbs button") == ["Everything"] and not page.all(".idle"))
    page.driver.get_log("browser")  # 404, once


@needs_browser
@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_hundreds_of_nodes_can_be_read(
    window: Page, tmp_path_factory: pytest.TempPathFactory, size: tuple[int, int]
):
    with forked(tmp_path_factory.mktemp("large"), "--kv-cache-memory-bytes", "96MiB") as (_, url):
        assert fill(url, 500) >= 500
        window.resize(*size)
        window.open(url)
        window.until(lambda: window.all(".node.fold"))
        while folds := window.all(".node.fold"):  # and on the way down
            window.until(lambda: not window.run(CLIPPED))
            wide, inner = window.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide <= inner == size[0]
            least = window.run(
                "return Math.min(...[...document.querySelectorAll('.node')]"
                ".map((box) => box.getBoundingClientRect().height))"
            )
            assert least >= (28 if size[0] < 820 else 17)
            before = window.texts("#crumbs button")
            folds[0].click()
            window.until(lambda before=before: window.texts("#crumbs button") != before)
        window.driver.get("about:blank")
    window.resize(1280, 800)


@needs_browser
def test_enter_sends_and_shift_enter_begins_a_line(page: Page):
    page.one("#question").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.one("#question").get_attribute("value") == "one\ntwo"
    page.press(Keys.ENTER)
    page.until(lambda: page.texts("article.user .text") == ["one\ntwo"])
    page.until(lambda: page.all(".usage"))


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_has_a_name_and_fits_the_width(page: Page, width: int):
    page.resize(width, 800)
    page.ask(QUESTION)
    page.edit(0, "How old is Nora Holm?")
    page.until(lambda: len(page.all(".node.idle")) == 3)
    page.all(".node")[1].click()
    assert page.all("#detail button") and page.one(".versions button").is_displayed()
    page.all(".edit")[0].click()
    controls = page.all("input, textarea, button, [tabindex], [role]")
    assert len(controls) > 15
    nameless = [
        c.get_attribute("id") for c in controls if c.is_displayed() and not c.accessible_name
    ]
    assert set(nameless) <= {"refused", "trouble", "gone"}  # these are messages
    fields = "[...document.querySelectorAll('input, textarea')]"  # a placeholder is no label
    assert page.run(f"return {fields}.filter((e) => !e.labels.length && !e.ariaLabel).length") == 0
    too_wide, inner = page.run(
        "const e = document.documentElement; return [e.scrollWidth, innerWidth]"
    )
    assert too_wide <= inner == width
    page.resize(1280, 800)


@needs_browser
def test_a_page_that_nobody_sees_asks_for_nothing(page: Page):
    hide(page)
    page.ask(QUESTION)  # which looks once, and then no more
    page.until(lambda: page.all(".node.idle") and page.run(IDLE))
    page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    assert not page.run(IDLE)


@needs_browser
def test_a_server_with_keys_asks_for_them(window: Page):
    """The API key is enough to chat, the cache takes the admin key."""
    with live(LLM(kv_cache_memory_bytes="32MiB"), api_key="secret", admin_key="boss") as server:
        window.driver.get(server.url)
        window.until(lambda: window.one("#key").is_displayed())
        window.one("#key-text").send_keys("clé…", Keys.ENTER)
        window.until(lambda: "no characters but ASCII's" in window.text("#trouble"))
        window.one("#key-text").clear()
        window.one("#key-text").send_keys("secret", Keys.ENTER)
        window.until(lambda: window.text("#model") == "tabletalk")
        window.until(lambda: "the server's admin key is needed" in window.text("#trouble"))
        numbers(window.ask(QUESTION))
        assert not window.all(".node")
        window.one("#key-text").clear()
        window.one("#key-text").send_keys("boss", Keys.ENTER)
        window.until(lambda: not window.text("#trouble"))
        numbers(window.ask(QUESTION))
        window.until(lambda: window.all(".node.idle"))
        server.assert_idle()
        window.driver.get("about:blank")


@needs_browser
def test_where_the_cache_is_not_shown_its_place_folds_to_a_line_that_says_why(window: Page):
    with live(LLM(kv_cache_memory_bytes="32MiB"), api_key="secret") as server:
        window.driver.get(server.url)
        window.until(lambda: window.one("#key").is_displayed())
        window.one("#key-text").send_keys("secret", Keys.ENTER)
        window.until(
            lambda: "start it with --admin-key and send that key" in window.text("#closed")
        )
        hidden = "#cache-title, #flush, #find, #tree, #legend, #detail, #charts"
        assert not any(element.is_displayed() for element in window.all(hidden))
        assert window.texts("#trouble") == [""] and window.one("#cache").size["height"] < 120
        numbers(window.ask(QUESTION))
        assert window.run("return flying === 0 && timers.size === 0"), "it goes on asking"
        window.driver.get("about:blank")
