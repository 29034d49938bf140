"""Ids of requests, the access log, and pages of other origins that may come in."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import pytest

from radixcache import LLM
from radixcache.runtime.server import app as app_module
from tests.runtime.server.live import LiveServer, ask, assert_error, live

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
APP = "https://app.example.org"


def preflight(server: LiveServer, origin: str) -> httpx.Response:
    asked = {"method": "POST", "headers": "authorization,content-type"}
    asks = {f"access-control-request-{name}": value for name, value in asked.items()}
    headers = {"origin": origin, **asks}
    return httpx.request("OPTIONS", f"{server.url}{CHAT}", headers=headers, verify=False)


def test_every_answer_has_the_id_of_its_request(server: LiveServer, monkeypatch, caplog):
    sent = {"x-request-id": "job-7:a.b_c"}
    body = {"messages": ask("How old is Nora Lund?"), "max_tokens": 2}
    for response in (
        server.get("/health", headers=sent),
        server.post(CHAT, body, headers=sent),
        server.post(CHAT, {}, headers=sent),
        server.post(CHAT, {**body, "stream": True}, headers=sent),
        server.get("/nowhere", headers=sent),
        server.get("/v1/models", headers={**sent, "origin": "https://evil.example"}),
    ):
        assert response.headers.get_list("x-request-id") == ["job-7:a.b_c"], response.text

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("by a bug")

    monkeypatch.setattr(app_module, "_card", fail)
    failed = server.get("/v1/models", headers=sent)
    assert_error(failed, 500, "the server failed: ZeroDivisionError")
    assert failed.headers.get_list("x-request-id") == ["job-7:a.b_c"]
    assert "request job-7:a.b_c failed" in caplog.text


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, '{"a":1}', "ä"])
def test_an_id_that_makes_no_sense_is_replaced(sent: str, server: LiveServer):
    headers = {"x-request-id": sent.encode("latin-1")}
    ids = [server.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", made) for made in ids) and ids[0] != ids[1]


def test_the_log_has_a_line_for_each_request_without_texts_and_keys(llm: LLM, capsys):
    body = {"messages": ask("How old is Nora Holm?"), "max_tokens": 4, "n": 2}
    with live(llm, access_log=True, api_key="sesame") as server:
        key = {"authorization": "Bearer sesame"}
        usages = [server.post(CHAT, body, headers=key).json()["usage"] for _ in range(2)]
        server.post(CHAT, {**body, "stream": True}, headers={**key, "x-request-id": "mine"})
        server.get("/v1/models?secret=1")
        server.assert_idle()
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines()]
    calls = [*[("POST", CHAT, 200)] * 3, ("GET", "/v1/models", 401)]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == calls
    for line, usage in zip(lines, [*usages, usages[1]], strict=False):
        assert line["prompt_tokens"] == usage["prompt_tokens"]
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert line["generated_tokens"] == usage["completion_tokens"]
        assert 0 < line["duration_s"] < 60 and line["client"] == "127.0.0.1"
    assert lines[2]["request_id"] == "mine"
    assert "prompt_tokens" not in lines[3]
    assert "sesame" not in out and "Nora" not in out and "secret" not in out


def test_a_reader_of_the_log_that_leaves_stops_nothing(llm: LLM, monkeypatch):
    def leave(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    with live(llm, access_log=True) as server:
        monkeypatch.setattr("builtins.print", leave)
        assert server.get("/health").status_code == 200


def test_a_page_that_is_named_may_use_a_server_with_a_key(llm: LLM):
    body = {"messages": ask("How old is Nora Holm?"), "max_tokens": 2}
    with live(llm, api_key="user", allowed_origins=[APP]) as server:
        asked = preflight(server, APP)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == APP
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        page = {"origin": APP, "authorization": "Bearer user"}
        answer = server.post(CHAT, body, headers=page)
        assert answer.status_code == 200
        refused = server.post(CHAT, body, headers={"origin": APP})
        assert_error(refused, 401, "a valid API key")
        for response in (answer, refused):  # or the page could not read why
            assert response.headers["access-control-allow-origin"] == APP
            assert response.headers["access-control-expose-headers"] == "X-Request-Id"
        evil = server.post(CHAT, body, headers={**page, "origin": "https://evil.example"})
        assert_error(evil, 403, "may not use this server")
        asked = preflight(server, "https://evil.example")
        assert "access-control-allow-origin" not in asked.headers


def test_no_page_of_another_origin_administrates_without_a_key(llm: LLM):
    with live(llm) as server:
        assert_error(preflight(server, APP), 403, "may not use this server")
    with live(llm, allowed_origins=["*"]) as server:
        assert preflight(server, APP).headers["access-control-allow-origin"] == "*"
        assert server.get("/v1/models", headers={"origin": APP}).status_code == 200
        flush = server.post("/v1/cache/flush", headers={"origin": APP})
        assert_error(flush, 403, "for the server's administrator")
        assert server.post("/v1/cache/flush").status_code == 200
