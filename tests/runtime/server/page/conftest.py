"""A server, and a browser in front of it, for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.server import http
from tests.runtime.server.page.browser import Page, browser
from tests.runtime.server.processes import forked

STUB = """
// What is on its way can be counted; `stall` never lets an answer end that has begun.
const original = window.fetch;
window.flying = 0; // requests that have no answer yet
window.fetch = async (path, options) => {
  flying += 1;
  const response = await original(path, options).finally(() => { flying -= 1; });
  if (!String(path).endsWith("chat/completions") || !response.ok) return response;
  const text = new TransformStream({
    transform(chunk, controller) {
      controller.enqueue(chunk);
      if (window.stall && /"content":"[^"]/.test(chunk)) return new Promise((_, reject) =>
        options.signal.addEventListener("abort", () => reject(options.signal.reason)));
    },
  });
  const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(text);
  return new Response(body.pipeThrough(new TextEncoderStream()), response);
};
const { setTimeout: set, clearTimeout: clear } = window;
const now = performance.now.bind(performance);
let skipped = 0;
performance.now = () => now() + skipped;
window.timers = new Map(); // what those do that have yet to go off, and when
window.setTimeout = (run, ms) => {
  const wait = ms === 1000 ? 100 : ms; // the cache is looked at as often as a test wants to know
  const once = () => { clearTimeout(timer); run(); };
  const timer = set(once, wait);
  timers.set(timer, [once, performance.now() + wait]);
  return timer;
};
window.clearTimeout = (timer) => { timers.delete(timer); clear(timer); };
window.skip = (ms) => { // so much time passes at once
  skipped += ms;
  for (const [once, end] of [...timers.values()]) if (end <= performance.now()) once();
};
"""


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for a table and half."""
    with forked(tmp_path_factory.mktemp("server"), "--kv-cache-memory-bytes", "10MiB") as (_, url):
        yield url


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile"), STUB) as page:
        yield page


@pytest.fixture
def page(url: str, window: Page) -> Iterator[Page]:
    """The page, with an empty cache. Afterwards, nothing was wrong and nobody else was asked."""
    window.forget()
    window.driver.get_log("browser")  # of a page that another test had open as its server ended
    http.post(f"{url}/v1/cache/flush")
    window.open(url)
    window.until(lambda: not window.all(".node"))
    yield window
    window.driver.get("about:blank")  # a page that is left open goes on asking
    log = [entry["message"] for entry in window.driver.get_log("browser")]
    assert [message for message in log if " 400 " not in message] == []
    requests = window.requests
    assert requests and all(request.startswith(url) for request in requests)
