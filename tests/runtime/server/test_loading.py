"""What the socket answers while the model loads, and how its app takes over."""

from __future__ import annotations

import http.client
import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import httpx2 as httpx
import pytest

from radixcache import LLM
from radixcache.errors import ModelError
from radixcache.runtime import cli, commands
from radixcache.runtime.model import progress
from radixcache.runtime.server.http import static
from radixcache.runtime.server.http.listener import listen
from tests.helpers.forks import Forked, radixcache
from tests.runtime.server import http as plain
from tests.runtime.server.live import ask, assert_error
from tests.runtime.server.processes import loading, served

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(("share", "told"), [(0.374, " (37 %)"), (None, "")])
def test_health_is_503_and_says_what_is_done_and_how_far(share: float | None, told: str):
    with loading() as (server, url):
        server.report("reading weights", share)
        response = plain.get(f"{url}/health")
        said = response.json()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert (said["status"], said["stage"]) == ("loading", "reading weights")
        assert said["share"] == share and said["error"]["message"] == f"the model is loading{told}"


def test_every_other_route_is_503_but_the_pages_files():
    with loading() as (_, url):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", "/")):
            response = httpx.request(method, f"{url}{path}", verify=False)
            assert_error(response, 503, "the model is loading (0 %)")
            assert response.headers["retry-after"] == "1"
        anthropic = plain.post(f"{url}/v1/messages", json={}).json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "overloaded_error")
        for path, (name, _) in static.FILES.items():
            file = plain.get(f"{url}{path}")
            assert (file.status_code, file.content) == (200, (static.FOLDER / name).read_bytes())
            assert file.headers["content-security-policy"].startswith("default-src 'self';")


def test_who_may_not_come_in_later_may_not_now():
    with loading(api_key="sesame", allowed_origins=["https://a.example"]) as (_, url):
        assert_error(plain.get(f"{url}/v1/models"), 401, "API key")
        key = {"authorization": "Bearer sesame"}
        assert_error(plain.get(f"{url}/v1/models", headers=key), 503, "the model is loading")
        assert plain.get(f"{url}/health").status_code == 503
        other = {**key, "origin": "https://b.example"}
        assert_error(plain.get(f"{url}/health", headers=other), 403, "web pages of")
        allowed = plain.get(f"{url}/v1/models", headers={**key, "origin": "https://a.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"


def test_no_connection_is_lost_when_the_model_has_come(llm: LLM):
    with loading() as (server, url):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        connection.connect()
        connection.auto_open = 0  # else a closed one would be opened again

        def status(method: str, path: str, body: Any = None) -> int:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            response.read()
            return response.status

        body = {"messages": ask("How old is Nora Holm?"), "max_tokens": 4}
        assert status("POST", CHAT, body) == 503
        seen = [status("GET", "/health")]
        with served(server, llm):
            while seen[-1] != 200:
                seen.append(status("GET", "/health"))
            assert {*seen} == {503, 200}
            assert status("POST", CHAT, body) == 200
            assert status("GET", "/v1/models") == 200


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_model_that_fails_to_load_ends_it_in_one_sentence(monkeypatch: Any, capsys: Any):
    """Behind the address, which is told first where the model is not the bundled one."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def load(*_: Any) -> NoReturn:
        progress.report("reading weights", 0.5)
        assert plain.get(f"{url}/health").json()["share"] == 0.5
        raise ModelError("no luck")

    monkeypatch.setattr(commands, "_load", load)
    monkeypatch.setattr(commands, "check_model", lambda name: None)
    assert cli.main(["serve", "org/name", "--port", str(port)]) == 2
    told = f"Loading org/name ... {url}\nradixcache: error: no luck\n"
    assert capsys.readouterr() == ("", told)
    with pytest.raises(httpx.ConnectError):
        plain.get(f"{url}/health")


def serve_slowly(*flags: str) -> int:
    """`radixcache serve` with a model of which only half is ever loaded."""

    def wait(args: Any, *_: str) -> LLM:
        progress.report("reading weights", 0.5)
        time.sleep(60)
        raise AssertionError("nobody has ended this")

    commands._load = wait
    return radixcache("serve", *flags)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_while_it_loads_ends_it(number: int, status: int, tmp_path: Path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    running = Forked(tmp_path, serve_slowly, "--port", str(port))

    try:
        end = time.monotonic() + 60
        share = None
        while share != 0.5:
            assert time.monotonic() < end
            with suppress(httpx.TransportError):
                share = plain.get(f"{url}/health").json()["share"]
        plain.get(f"{url}/")
        running.send_signal(number)
        assert running.wait(5) == status
        assert running.err.read_text() == ""
    finally:
        running.kill()
