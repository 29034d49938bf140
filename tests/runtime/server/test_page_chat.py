"""The chat of the page: branches, answers that go on, files, and what is said of an answer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from radixcache import LLM
from tests.runtime.server import http, test_page
from tests.runtime.server.browser import Page
from tests.runtime.server.live import ask, live
from tests.runtime.server.test_page import ANSWER, QUESTION, choose, needs_browser, numbers, titles

url, window, page = test_page.url, test_page.window, test_page.page
OTHER = "How old is Nora Holm?"
OTHER_ANSWER = "The age of Nora Holm is 57."

LISTEN = """
window.sent = []; // bodies of chats
const before = window.fetch;
window.fetch = (path, options) => {
  if (String(path).endsWith("chat/completions")) sent.push(JSON.parse(options.body));
  return before(path, options);
};
"""

PRETEND = """
// Events in the place of an answer, each with the milliseconds to wait before it.
const [events] = arguments;
const usual = window.fetch;
window.fetch = async (path, options) => {
  if (!String(path).endsWith("chat/completions")) return usual(path, options);
  window.fetch = usual;
  return new Response(new ReadableStream({ async start(stream) {
    for (const [pause, event] of events) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`));
    }
    stream.close();
  } }));
};
"""


def answer(text: str, finish: str = "stop", **more: Any) -> list[tuple[int, dict[str, Any]]]:
    """The events of an answer of 13 tokens; `more` is what the server has to say of it."""
    usage = {
        "prompt_tokens": 30,
        "completion_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 20},
    }
    said = {"ttft": 0.5, "explanation": None, "repetitions": None, **more}
    return [
        (0, {"choices": [{"delta": {"content": text}, "finish_reason": None}]}),
        (400, {"choices": [{"delta": {"content": "."}, "finish_reason": None}]}),
        (0, {"choices": [{"delta": {}, "finish_reason": finish}]}),
        (300, {"choices": [], "usage": usage, "radixcache": said}),
    ]


def shown(page: Page) -> list[str]:
    return page.texts("article .text")


def versions(page: Page) -> list[str]:
    """Which versions are shown, where there are several."""
    return page.texts(".versions:not([hidden]) span")


def press(page: Page, name: str, index: int = 0) -> None:
    page.all(f".versions:not([hidden]) [aria-label='{name}']")[index].click()


@needs_browser
def test_an_edited_question_and_a_new_answer_keep_what_was_there(page: Page, url: str):
    page.ask(QUESTION)
    page.ask("And the email?")
    before = shown(page)
    page.edit(0, OTHER)
    assert shown(page) == [OTHER, OTHER_ANSWER] and versions(page) == ["2/2"]
    page.ask("And the country?")
    after = shown(page)
    press(page, "Previous version")
    assert shown(page) == before and versions(page) == ["1/2"]
    assert len(page.all(".assistant .usage")) == 2
    focus = "return [document.activeElement.ariaLabel, document.activeElement.checkVisibility()]"
    assert page.run(focus) == ["Previous version", True]
    page.all(".edit")[0].click()
    page.run("document.querySelector('article textarea').value = 'too long '.repeat(4000)")
    page.one("article form").find_element("css selector", "button").click()
    page.until(lambda: "the prompt has" in page.text("#refused"))
    assert shown(page) == before and versions(page) == ["1/2"]  # which was not the last
    page.one("#question").clear()
    page.one(".versions button").send_keys(Keys.ENTER)  # from the first to the last
    assert shown(page) == after and versions(page) == ["2/2"]

    # What is sent is the branch that is shown, and a new answer is a branch as well.
    page.run(LISTEN)
    page.all(".assistant .again")[-1].click()
    page.until(lambda: versions(page) == ["2/2", "2/2"])
    page.until(lambda: page.one("#send").is_displayed())
    assert [message["content"] for message in page.run("return sent[0].messages")[1:]] == after[:3]
    press(page, "Next version")
    assert shown(page) == before
    page.edit(1, "And the age?")
    assert versions(page) == ["1/2", "2/2"] and len(shown(page)) == 4

    page.driver.refresh()
    page.until(lambda: len(shown(page)) == 4)
    assert versions(page) == ["1/2", "2/2"]
    press(page, "Previous version", 1)
    assert shown(page) == before
    page.driver.refresh()
    page.until(lambda: shown(page) == before)
    press(page, "Next version")
    assert shown(page) == after and versions(page) == ["2/2", "2/2"]
    choose(page, 0, "[aria-label^=Delete]")
    choose(page, 0, "[aria-label^=Delete]")
    page.until(lambda: not page.all("article"))
    assert page.run("return localStorage.getItem('radixcache.conversations.2')") == "[]"


@needs_browser
def test_conversations_of_before_there_were_branches_are_kept(page: Page, url: str):
    page.run(
        """
        localStorage.clear();
        const turn = (role, content) => ({role, content});
        const turns = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")];
        const chat = {id: "old", title: "Old", system: "", changed: 1, turns};
        const wrong = (before) => ({...chat, id: `${before}`, turns: [{...turns[0], before}]});
        localStorage["radixcache.conversations.1"] = JSON.stringify(
          [chat, wrong(0), wrong("x"), wrong(-2), wrong(0.5)]);
        """
    )
    page.open(url)
    assert titles(page) == ["Old"]
    choose(page, 0)
    assert shown(page) == ["a", "b", "c"] and versions(page) == []
    assert page.run("return Object.keys(localStorage)") == ["radixcache.conversations.2"]


def open_node(page: Page, text: str) -> bool:
    """Click the node with this text; whether its conversation can be opened."""
    names = [node.accessible_name for node in page.all(".node")]
    (index,) = [index for index, name in enumerate(names) if text in name]
    page.all(".node")[index].click()
    page.until(lambda: text in page.text("#detail pre"))
    return bool(page.all("#detail button"))


@needs_browser
def test_a_node_opens_its_conversation_with_the_branch_that_it_is_of(page: Page, url: str):
    page.run("localStorage.clear()")
    page.ask(QUESTION)
    page.ask("What is the phone number of Hugo Marsh?")
    page.edit(1, "What is the phone number of Hugo Lund?")
    page.one("#new").click()
    page.ask(OTHER)
    foreign = {"messages": ask("What about Felix Wolf?"), "max_tokens": 3}
    http.post(f"{url}/v1/chat/completions", json=foreign, timeout=60).raise_for_status()
    page.until(lambda: len(page.all(".node.idle")) == 7)
    assert open_node(page, "is the occupation")  # of both branches: the one shown
    page.one("#detail button").click()
    assert shown(page)[2] == "What is the phone number of Hugo Lund?"
    page.one("#crumbs button").click()
    page.until(lambda: len(page.all(".node.idle")) == 7)
    page.one("#new").click()
    assert open_node(page, "Marsh?")
    page.one("#detail button").click()
    assert shown(page)[2] == "What is the phone number of Hugo Marsh?"
    assert versions(page) == ["1/2"] and len(titles(page)) == 2
    assert open_node(page, OTHER.removeprefix("How"))
    page.press(Keys.ARROW_UP, Keys.ARROW_DOWN, Keys.TAB, Keys.ENTER)  # without a mouse
    page.until(lambda: shown(page) == [OTHER, OTHER_ANSWER])
    assert not open_node(page, "Felix Wolf?"), "that was somebody else"
    assert open_node(page, "You answer questions")  # of both: that which was changed last
    page.one("#detail button").click()
    assert shown(page)[2] == "What is the phone number of Hugo Marsh?"


MATCH = """
const [conversations, way] = arguments;
const done = arguments[2];
localStorage["radixcache.conversations.2"] = JSON.stringify(conversations);
import("/matching.js").then(({ conversationOf }) => done(conversationOf(way)));
"""


@needs_browser
def test_what_a_template_says_is_of_no_conversation_and_what_others_say_neither(page: Page):
    def chat(name: str, system: str, *said: str) -> dict[str, Any]:
        turns = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
        ]
        return {"id": name, "title": name, "system": system, "changed": 1, "turns": turns}

    chats = [
        chat("greeting", "", "Hello, you", "Hi"),
        chat("polite", "Be very polite.", "Hello, you", "Good day to you"),
        chat("brief", "Be brief and dry.", "Hello, you", "Good day to you"),
    ]
    first = "<|im_start|>system\nYou are an assistant<|im_end|>\n<|im_start|>user\n"
    asked = "Hello, you<|im_end|>\n<|im_start|>assistant\n"
    for texts, found in (
        ([f"{first}Hello, you"], "greeting"),
        ([f"{first}Who are you?"], None),
        ([first], None),
        (["<|im_start|>system\nBe ", "brief and dry.", f"{asked}Good day to you"], "brief"),
        (["<|im_start|>system\nBe ", "very polite.", f"{asked}Good day to you"], "polite"),
        (["<|im_start|>system\nBe ", "very polite.", f"{asked}Good evening"], None),
        ([f"{first}Hello, you", "<|im_end|>\n"], None),
    ):
        way = [{"start": 9 * at, "text": text} for at, text in enumerate(texts)]
        answer = page.driver.execute_async_script(MATCH, chats, way)
        assert (answer and answer["id"]) == found, texts
    page.run("localStorage.clear()")


@needs_browser
def test_the_way_from_a_node_to_its_button_leads_over_others(page: Page):
    page.ask(QUESTION)
    page.edit(0, OTHER)
    page.until(lambda: len(page.all(".node.idle")) == 3)
    assert open_node(page, "Nora Lund?")
    for event, text, buttons in (("enter", "Nora Holm?", 0), ("leave", "Nora Lund?", 1)):
        page.run(
            "const [event, at] = arguments; const place = event === 'leave'"
            " ? document.querySelector('#tree') : document.querySelectorAll('.node')[at];"
            "place.dispatchEvent(new PointerEvent(`pointer${event}`))",
            event,
            2,
        )
        assert text in page.text("#detail pre") and len(page.all("#detail button")) == buttons


@needs_browser
def test_an_answer_that_was_cut_goes_on(page: Page, url: str):
    page.run(LISTEN)
    page.one("#sampling summary").click()
    page.one("[name=max_tokens]").send_keys("4")
    page.ask(QUESTION)
    assert page.text(".continue") == "cut at 4 tokens, continue"
    page.driver.refresh()
    page.until(lambda: page.texts(".continue") == ["cut at 4 tokens, continue"])
    page.run(LISTEN)
    page.one("#sampling summary").click()
    page.one("#sampling [name=max_tokens]").clear()
    page.one("#sampling [name=max_tokens]").send_keys("x1")
    page.one(".continue").click()
    page.until(lambda: "max_tokens" in page.text("#refused"))
    assert page.texts(".continue") == ["cut at 4 tokens, continue"]  # as before
    page.one("#sampling [name=max_tokens]").clear()
    page.one("#sampling [name=max_tokens]").send_keys("2")
    page.one(".continue").click()
    page.until(lambda: page.texts(".continue") == ["cut at 6 tokens, continue"])
    page.one("#sampling [name=max_tokens]").clear()
    page.one(".continue").click()
    page.until(lambda: shown(page) == [QUESTION, ANSWER] and page.texts(".usage"))
    assert not page.all(".continue") and versions(page) == []
    prompt, cached, _ = numbers(page.texts(".assistant .usage")[-1])
    assert prompt - cached < 4
    last = page.run("return sent.at(-1)")
    assert last["messages"][-1]["role"] == "assistant"
    assert (last["continue_final_message"], last["add_generation_prompt"]) == (True, False)
    page.ask("And the email?")  # of an answer in the middle no other one is to be had
    assert ANSWER in [message["content"] for message in page.run("return sent.at(-1).messages")]


@needs_browser
def test_an_answer_without_content_cannot_go_on(page: Page):
    events = answer("", "length")
    events[0][1]["choices"][0]["delta"] = {"reasoning": "Let me think"}
    events[1][1]["choices"][0]["delta"] = {}
    page.run(PRETEND, events)
    page.ask(QUESTION)
    assert page.texts(".assistant .usage")[0] == "cut at 13 tokens" and not page.all(".continue")


@needs_browser
def test_it_tells_the_speed_of_an_answer_and_whether_it_repeats_itself(page: Page, url: str):
    page.run(PRETEND, answer("on and on", repetitions=[3]))
    page.ask(QUESTION)
    speed = float(page.texts(".assistant .usage")[-1].split(", ")[-1].removesuffix(" tokens/s"))
    assert 20 < speed <= 30  # 12 tokens in 400 ms, a little more, and not 700
    warning = "The last 3 tokens of this repeat themselves again and again."
    assert page.texts(".warning") == [warning]
    page.driver.refresh()
    page.until(lambda: page.texts(".warning") == [warning])
    page.run(PRETEND, answer("once"))
    page.ask(OTHER)
    assert len(page.all(".warning")) == 1


@needs_browser
def test_it_shows_what_share_of_the_prompt_is_computed(window: Page):
    llm = LLM(kv_cache_memory_bytes="32MiB", max_num_batched_tokens=16)
    with live(llm) as server:
        window.open(server.url)
        window.run("window.stall = true")  # nothing comes after the first event
        window.one("#question").send_keys(QUESTION, Keys.ENTER)
        window.until(lambda: window.texts(".prefill:not([hidden])"))
        (text,) = window.texts(".prefill:not([hidden])")
        share = re.fullmatch(r"([\d.]+) % of 1,370 prompt tokens", text)
        assert share and 1.1 < float(share[1]) < 100  # at least the 16 of the first step
        position = window.run("return document.querySelector('.prefill progress').position")
        assert position == pytest.approx(float(share[1]) / 100, abs=0.001)
        window.one("#stop").click()
        window.until(lambda: window.one("#send").is_displayed())
        window.run("window.stall = false")
        window.ask(OTHER)
        assert not window.texts(".prefill:not([hidden])")
        server.assert_idle()
        window.driver.get("about:blank")


@needs_browser
def test_it_says_what_the_bundled_model_is_and_how_answers_are_sampled(page: Page):
    note = "tabletalk looks up the table above; radixcache serve MODEL for a real one"
    assert page.text("#about") == note
    summary = "Sampling: by default temperature 0 (greedy), max_tokens 64"
    assert page.text("#sampling summary") == summary
    page.run(LISTEN)
    page.ask(QUESTION)
    assert "max_tokens" not in page.run("return sent[0]")


@needs_browser
def test_where_the_server_has_no_limit_the_page_has_one(window: Page):
    with live(LLM(kv_cache_memory_bytes="32MiB")) as server:
        backend = server.backend
        backend.chat_defaults = replace(backend.chat_defaults, max_tokens=None, temperature=0.25)
        window.open(server.url)
        window.run(LISTEN)
        window.one("#sampling summary").click()
        said = [window.one(f"[name={name}]").get_attribute("placeholder")
                for name in ("temperature", "top_p", "max_tokens")]  # fmt: skip
        assert said == ["0.25", "1", "1024"]
        assert window.text("#sampling summary").endswith("temperature 0.25, max_tokens 1024")
        window.one("[name=temperature]").send_keys("0")
        window.ask(QUESTION)
        window.one("[name=max_tokens]").send_keys("3")
        window.ask(OTHER)
        assert [body["max_tokens"] for body in window.run("return sent")] == [1024, 3]
        window.driver.get("about:blank")


DROP = """
// A file is dropped on the chat, or pasted.
const [type, name, content, size] = arguments;
const data = new DataTransfer();
const bytes = size ? new Uint8Array(size).fill(97) : content;
data.items.add(new File([Array.isArray(bytes) ? new Uint8Array(bytes) : bytes], name));
const target = document.querySelector(type === "paste" ? "#question" : "#scroll");
const options = { bubbles: true, cancelable: true };
const event = type === "paste" ? new ClipboardEvent(type, { ...options, clipboardData: data })
  : new DragEvent(type, { ...options, dataTransfer: data });
return target.dispatchEvent(event);
"""


@needs_browser
def test_a_file_becomes_part_of_the_question(page: Page):
    page.one("#question").send_keys("How old is she?")
    assert page.run(DROP, "dragover", "a.md", "x") is False  # the browser must not open it
    assert page.all("#chat.over")
    assert page.run(DROP, "drop", "people.md", "| Nøra | 7 |\n") is False

    def question() -> str:
        return str(page.one("#question").get_attribute("value"))

    page.until(lambda: question() == "people.md:\n| Nøra | 7 |\n\nHow old is she?")
    assert not page.all("#chat.over")
    before = question()
    for name, content, size, sentence in (
        ("large.txt", "", (1 << 20) + 1, "large.txt is larger than 1 MB"),
        ("picture.png", [137, 80, 78, 71, 255], 0, "picture.png is not a text file"),
        ("zeros.bin", [97, 0, 98], 0, "zeros.bin is not a text file"),
    ):
        page.run(DROP, "drop", name, content, size)
        page.until(lambda sentence=sentence: page.text("#refused") == sentence)
        assert question() == before
    assert page.run(DROP, "paste", "b.txt", "pasted") is False
    page.until(lambda: question() == f"b.txt:\npasted\n\n{before}")
    assert page.text("#refused") == ""
    page.run("document.querySelector('#question').value = ''")
    page.run(DROP, "drop", "full.txt", "", 1 << 20)
    page.until(lambda: len(question()) > 1 << 20)
    page.run("document.querySelector('#question').value = ''")
    page.run(DROP, "drop", "people.md", "| Nøra | 7 |")
    page.until(lambda: question())
    page.ask("Who?")
    assert shown(page)[0] == "people.md:\n| Nøra | 7 |\n\nWho?"
