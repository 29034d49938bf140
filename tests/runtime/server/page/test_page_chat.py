"""The chat of the page: conversations, versions, files, and what is said of an answer."""

from __future__ import annotations

from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.helpers.pictures import data_url, file_of, picture
from tests.runtime.server.page.browser import ANSWER, OTHER, OTHER_ANSWER, QUESTION, Page, numbers

STORE = "localStorage['radixcache.conversations.2']"

LISTEN = """
window.sent = []; // bodies of chats
const before = window.fetch;
window.fetch = (path, options) => {
  if (String(path).endsWith("chat/completions")) sent.push(JSON.parse(options.body));
  return before(path, options);
};
"""


def shown(page: Page) -> list[str]:
    return page.texts("article .text")


def titles(page: Page) -> list[str]:
    return page.texts("#conversations .pick span")


def choose(page: Page, index: int, button: str = ".pick") -> None:
    """Open the list and press what is beside, or is, the name of one conversation."""
    if not page.one("#conversations").get_attribute("open"):
        page.one("#conversations summary").click()
    page.all(f"#conversations li {button}")[index].click()


def versions(page: Page) -> list[str]:
    """Which versions are shown, where there are several."""
    return page.texts(".versions:not([hidden]) span")


def press(page: Page, name: str, index: int = 0) -> None:
    page.all(f".versions:not([hidden]) [aria-label='{name}']")[index].click()


def send_too_long(page: Page, field: str = "#question") -> None:
    """Send what the server refuses."""
    page.run(f"document.querySelector('{field}').value = 'too long '.repeat(4000)")
    page.one(field).send_keys(Keys.ENTER)
    page.until(lambda: "the prompt is too long" in page.text("#refused"))


def sampling(page: Page, **values: str) -> None:
    if not page.one("#sampling").get_attribute("open"):
        page.one("#sampling summary").click()
    for name, value in values.items():
        page.one(f"#sampling [name={name}]").clear()
        page.one(f"#sampling [name={name}]").send_keys(value)


def test_answers_are_stopped_refused_or_break_off_and_the_chat_goes_on(page: Page, url: str):
    note = "tabletalk looks up the table above; radixcache serve MODEL for a real one"
    assert page.text("#about") == note and len(page.all("#examples button")) == 4
    page.run("window.stall = true")
    page.one("#question").send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two", Keys.ENTER)
    page.until(lambda: page.one("#stop").is_displayed() and page.texts(".assistant .text") != [""])
    page.one("#stop").click()
    page.until(lambda: page.texts(".usage") == ["stopped"])
    assert page.one("#send").is_displayed() and page.texts("#refused") == [""]
    assert page.texts("article.user .text") == ["one\ntwo"]
    page.run("window.stall = false")
    assert numbers(page.ask("And the email?"))

    before = shown(page)
    send_too_long(page)
    assert shown(page) == before
    assert str(page.one("#question").get_attribute("value")).startswith("too long too long")
    page.one("#question").clear()
    numbers(page.ask(QUESTION))
    assert page.texts("#refused") == [""]

    page.one("#new").click()
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


def test_an_edited_question_and_a_new_answer_keep_what_was_there(page: Page):
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
    send_too_long(page, "article textarea")
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
    page.edit(1, "And the age?")
    assert versions(page) == ["1/2", "2/2"] and len(shown(page)) == 4

    press(page, "Previous version", 1)
    page.driver.refresh()
    page.until(lambda: shown(page) == before)
    press(page, "Next version")
    assert shown(page) == after and versions(page) == ["2/2", "2/2"]


def test_conversations_are_kept_shown_renamed_and_deleted(page: Page, url: str):
    """An answer goes on while another conversation is shown, and a reload loses nothing."""
    page.run(f"{STORE} = '[{{\"id\": 1}}, null, 7'")  # what others have written does no harm
    page.open(url)
    assert titles(page) == []
    usage = page.ask(QUESTION)
    page.one("#new").click()
    assert not page.all("article")
    page.one("#system-text").send_keys(Keys.END, " Be brief.")
    page.run("window.stall = true")
    page.one("#question").send_keys(OTHER, Keys.ENTER)
    page.until(lambda: page.texts(".assistant .text") != [""] and len(titles(page)) == 2)
    choose(page, titles(page).index(QUESTION))
    assert shown(page) == [QUESTION, ANSWER]
    assert page.one("#send").is_displayed() and not page.one("#flush").is_enabled()
    assert sum("answering" in note for note in page.texts("#conversations small")) == 1
    choose(page, titles(page).index(OTHER))
    assert "Be brief." in str(page.one("#system-text").get_attribute("value"))
    page.until(lambda: page.one("#stop").is_displayed())
    page.one("#stop").click()
    page.until(lambda: page.texts(".usage") == ["stopped"])
    choose(page, titles(page).index(QUESTION))

    page.driver.refresh()
    page.until(lambda: shown(page) == [QUESTION, ANSWER])
    assert page.texts(".assistant .usage") == [usage] and page.all(".assistant .strip i")
    assert {*titles(page)} == {QUESTION, OTHER}
    choose(page, titles(page).index(QUESTION), "[aria-label^=Rename]")
    page.press("Nora", Keys.ENTER)
    page.until(lambda: titles(page)[0] == "Nora" and page.text("#conversations summary") == "Nora")

    # What another tab has written is neither lost nor overwritten.
    page.run(f"""
        const all = JSON.parse({STORE}), mine = all.find((one) => one.title === "Nora");
        mine.changed += 1;
        mine.turns[1].content = "from the other tab";
        all.push({{id: "other", title: "Other<img>", system: "", changed: 5, turns: []}});
        all.push({{id: "foreign", title: 7, changed: 5, turns: [{{}}]}});
        {STORE} = JSON.stringify(all);
    """)
    page.ask("And the email?")
    stored = page.run(f"return {STORE}")
    assert titles(page).count("Nora") == 2 and "Other<img>" in titles(page)
    assert "from the other tab" in stored and "And the email?" in stored
    assert "foreign" not in stored
    for left in (3, 2, 1, 0):
        choose(page, 0, "[aria-label^=Delete]")
        assert len(titles(page)) == left + 1  # a second click is needed
        choose(page, 0, "[aria-label^=Delete]")
        page.until(lambda left=left: len(titles(page)) == left)
    assert not page.all("article") and page.run(f"return {STORE}") == "[]"


def test_a_browser_without_room_says_so_chats_and_keeps_the_others(page: Page):
    page.run("localStorage.clear()")
    numbers(page.ask(QUESTION))
    page.one("#new").click()
    page.run("""
        const {setItem} = Storage.prototype;
        window.room = 30_000;
        Storage.prototype.setItem = function (name, value) {
          if (value.length > room) throw new DOMException("", "QuotaExceededError");
          setItem.call(this, name, value);
        };
    """)
    send_too_long(page)
    assert page.run(f"return JSON.parse({STORE}).length") == 1
    page.one("#question").clear()
    page.run("window.room = 0")
    numbers(page.ask(OTHER))
    assert page.text("#refused") == "the browser has no room to keep this conversation"


def test_an_answer_that_was_cut_goes_on(page: Page):
    sampling(page, max_tokens="4")
    page.ask(QUESTION)
    page.driver.refresh()
    page.until(lambda: page.texts(".continue") == ["cut at 4 tokens, continue"])
    page.run(LISTEN)
    sampling(page, max_tokens="x1")
    page.one(".continue").click()
    page.until(lambda: "max_tokens" in page.text("#refused"))
    assert page.texts(".continue") == ["cut at 4 tokens, continue"]  # as before
    page.one("#sampling [name=max_tokens]").clear()
    page.one(".continue").click()
    page.until(lambda: shown(page) == [QUESTION, ANSWER] and page.texts(".usage"))
    assert not page.all(".continue") and versions(page) == []
    prompt, cached, _ = numbers(page.texts(".assistant .usage")[-1])
    assert prompt - cached < 4
    last = page.run("return sent.at(-1)")
    assert last["messages"][-1]["role"] == "assistant"
    assert (last["continue_final_message"], last["add_generation_prompt"]) == (True, False)


DROP = """
// A file is dropped on the chat, or pasted.
const [type, name, content, size, kind] = arguments;
const data = new DataTransfer();
const bytes = size ? new Uint8Array(size).fill(97) : content;
const parts = [Array.isArray(bytes) ? new Uint8Array(bytes) : bytes];
data.items.add(new File(parts, name, { type: kind ?? "" }));
const target = document.querySelector(type === "paste" ? "#question" : "#scroll");
const options = { bubbles: true, cancelable: true };
const event = type === "paste" ? new ClipboardEvent(type, { ...options, clipboardData: data })
  : new DragEvent(type, { ...options, dataTransfer: data });
return target.dispatchEvent(event);
"""


def test_a_file_becomes_part_of_the_question(page: Page):
    def question() -> str:
        return str(page.one("#question").get_attribute("value"))

    page.one("#question").send_keys("How old is she?")
    assert page.run(DROP, "dragover", "a.md", "x") is False  # the browser must not open it
    assert page.all("#chat.over")
    assert page.run(DROP, "drop", "people.md", "| Nøra | 7 |\n") is False
    page.until(lambda: question() == "people.md:\n| Nøra | 7 |\n\nHow old is she?")
    assert not page.all("#chat.over")
    before = question()
    for name, content, size, sentence in (
        ("large.txt", "", (1 << 20) + 1, "large.txt is larger than 1 MB"),
        (
            "picture.bmp",
            [66, 77, 255],
            0,
            "picture.bmp is no text file, and no PNG, JPEG, WebP or GIF",
        ),
        ("zeros.bin", [97, 0, 98], 0, "zeros.bin is no text file, and no PNG, JPEG, WebP or GIF"),
    ):
        page.run(DROP, "drop", name, content, size)
        page.until(lambda sentence=sentence: page.text("#refused") == sentence)
        assert question() == before
    assert page.run(DROP, "paste", "b.txt", "pasted") is False
    page.until(lambda: question() == f"b.txt:\npasted\n\n{before}")
    assert page.text("#refused") == ""


ANSWERED = """
// Any question is answered, and what was asked is in `sent`.
const kept = window.fetch;
window.sent = [];
window.fetch = async (path, options) => {
  if (!String(path).endsWith("chat/completions")) return kept(path, options);
  sent.push(JSON.parse(options.body));
  const details = { prompt_tokens_details: { cached_tokens: 0 } };
  const usage = { prompt_tokens: 7, completion_tokens: 1, ...details };
  const event = { choices: [{ delta: { content: "A cat." }, finish_reason: "stop" }], usage };
  return new Response(`data: ${JSON.stringify(event)}\n\n`);
};
"""


def test_pictures_go_with_a_question(page: Page, tmp_path: Path):
    """Chosen, dropped or pasted; they are taken away again, come back if refused, and are shown."""

    def sources(where: str) -> list[str]:
        found = page.run(f"return [...document.querySelectorAll('{where} img')].map((e) => e.src)")
        widths = f"return [...document.querySelectorAll('{where} img')].map((e) => e.naturalWidth)"
        page.until(lambda: page.run(widths) == [40] * len(found))  # the page may show them
        return [str(source) for source in found]

    files = [file_of(picture(seed=seed)) for seed in range(3)]
    urls = [*map(data_url, files)]
    (tmp_path / "a.png").write_bytes(files[0])
    (tmp_path / "b.txt").write_text("A text.")
    page.one("#files").send_keys(f"{tmp_path}/a.png\n{tmp_path}/b.txt")
    page.until(lambda: page.one("#question").get_attribute("value") == "b.txt:\nA text.\n\n")
    page.one("#question").clear()
    page.run(DROP, "drop", "b.png", [*files[1]], 0, "image/png")
    page.until(lambda: len(page.all("#pictures img")) == 2)
    page.run(DROP, "paste", "c.png", [*files[2]], 0, "image/png")
    page.until(lambda: len(page.all("#pictures img")) == 3)
    page.run(DROP, "drop", "d.png", "", 20_000_001, "image/png")
    page.until(lambda: page.text("#refused") == "d.png is larger than 20 MB")
    assert sources("#pictures") == urls
    page.one("[aria-label='Remove picture 2']").click()
    assert sources("#pictures") == [urls[0], urls[2]]

    page.one("#question").send_keys("What is it?", Keys.ENTER)  # this model reads none
    page.until(lambda: "image" in page.text("#refused"))
    assert sources("#pictures") == [urls[0], urls[2]] and not page.all("article")
    assert page.one("#question").get_attribute("value") == "What is it?"

    page.run(ANSWERED)
    page.ask("")
    assert sources("article.user") == [urls[0], urls[2]] and not page.all("#pictures img")
    page.ask("And now?")
    page.edit(0, "Who is it?")
    first, second, edited = (body["messages"][1:] for body in page.run("return sent"))
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in (urls[0], urls[2])]
    asked = {"role": "user", "content": [*shown, {"type": "text", "text": "What is it?"}]}
    again = {"role": "user", "content": "And now?"}
    assert first == [asked] and second == [asked, {"role": "assistant", "content": "A cat."}, again]
    assert edited == [{"role": "user", "content": [*shown, {"type": "text", "text": "Who is it?"}]}]
    assert sources("article.user") == [urls[0], urls[2]]

    page.driver.refresh()  # the browser has no room to keep pictures
    page.until(lambda: page.texts("article.user small") == ["2 pictures, not kept"])
    assert "Who is it?" in page.texts("article.user .text")[0]
