"""The page in a headless Chromium, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
INSTALLED = bool(CHROMIUM and DRIVER)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-component-update",
    "--disable-background-networking",
    "--force-prefers-reduced-motion",  # where a thing is, it stays
)

QUESTION, ANSWER = (
    "What is the occupation of Nora Lund?",
    "The occupation of Nora Lund is Carpenter.",
)

OTHER, OTHER_ANSWER = "How old is Nora Holm?", "The age of Nora Holm is 57."

NUMBERS = re.compile(
    r"([\d,]+) prompt tokens, ([\d,]+) cached, ([\d,]+) computed, TTFT [\d.]+ ms"
    r"(, [\d,.]+ tokens/s)?(, [\d.]+ tokens a step)?"
)


class Page:
    """The page of a server, as somebody in front of it sees it."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self.wait = WebDriverWait(driver, 60, poll_frequency=0.05)

    def open(self, url: str) -> None:
        """Load it, and wait for what it asks the server first."""
        self.driver.get(url)
        self.until(lambda: self.text("#model") and "pages in use" in self.text("#pages"))

    def resize(self, width: int, height: int) -> None:
        """Let the window have this size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def until(self, holds: Any) -> Any:
        """What `holds` returns, as soon as that is true."""
        return self.wait.until(lambda _: holds())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def texts(self, selector: str) -> list[str]:
        """The texts of all that match, which may change in the meantime."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)",
            selector,
        )
        return found

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Type where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def ask(self, question: str) -> str:
        """Send a message; what the page says about the answer once that is complete."""
        before = len(self.all(".assistant .usage"))
        self.one("#question").send_keys(question, Keys.ENTER)
        self.until(lambda: len(self.all(".assistant .usage")) > before)
        return self.texts(".assistant .usage")[-1]

    def edit(self, index: int, question: str) -> str:
        """Replace the message of that index by another; what the page says about the answer."""
        self.all(".edit")[index].click()
        field = self.one("article textarea")
        field.clear()
        field.send_keys(question, Keys.ENTER)
        self.until(lambda: len(self.all(".assistant .usage")) == index + 1)
        return self.texts(".assistant .usage")[-1]

    def forget(self) -> None:
        """Let `requests` and the browser's log begin anew."""
        for log in ("browser", "performance"):
            self.driver.get_log(log)

    @property
    def requests(self) -> list[str]:
        """The address of every request to a host since the last look."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if re.match("https?:|wss?:", url)]


@contextmanager
def browser(profile: Path, before: str = "") -> Iterator[Page]:
    """A browser with a profile of its own, which runs the script `before` ahead of every page's;
    without one, the test is skipped."""
    if not INSTALLED:
        pytest.skip("needs chromium and chromedriver")
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    try:
        page = Page(driver)
        page.resize(1280, 800)
        if before:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": before})
        yield page
    finally:
        driver.quit()


def numbers(line: str) -> tuple[int, int, int]:
    """Prompt, cached and computed tokens of an answer, as the page says them."""
    match = NUMBERS.fullmatch(line)
    assert match, line
    prompt, cached, computed = (int(number.replace(",", "")) for number in match.groups()[:3])
    return prompt, cached, computed
