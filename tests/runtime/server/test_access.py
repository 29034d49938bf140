"""Who may do what: keys, hosts, origins, and what is for the administrator alone."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Any

import httpx2 as httpx
import pytest

from radixcache import LLM
from radixcache.runtime.server.app import create_app
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http import access, serve
from radixcache.runtime.server.http.access import Access
from radixcache.runtime.server.http.listener import listen
from tests.runtime.server.live import LiveServer, assert_error, live

COMPLETIONS = "/v1/completions"
ADMIN_ROUTES = """GET /metrics, GET /v1/cache, GET /v1/cache/search, POST /v1/cache/flush,
    GET /v1/cache/prefixes, DELETE /v1/cache/prefixes/{namespace}/{name}"""
CLIENT_ROUTES = """GET /v1/models, GET /v1/models/{name}, POST /v1/chat/completions,
    POST /v1/embeddings, POST /v1/rerank, POST /v1/score,
    POST /v1/completions, POST /v1/responses, POST /v1/responses/input_tokens,
    GET /v1/responses/{response_id},
    GET /v1/responses/{response_id}/input_items, GET /tokenizer_info,
    DELETE /v1/responses/{response_id}, POST /v1/messages, POST /v1/messages/count_tokens,
    POST /v1/explain, POST /v1/prefixes, GET /v1/prefixes, GET /v1/prefixes/{name},
    DELETE /v1/prefixes/{name}, POST /tokenize, POST /detokenize"""


def comes_in(
    options: ServerArgs, path: str = "/v1/models", client: str = "127.0.0.1", **headers: str
) -> int | str:
    """The status with which a request is refused, or what it comes in as."""
    sent: dict[str, Any] = {"host": "127.0.0.1:8000", **headers}
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "client": (client, 50_000),
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()
        ],
    }
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    asyncio.run(Access(app, options)(scope, app, send))  # type: ignore[arg-type]
    if statuses:
        return statuses[0]
    return "administrator" if scope[access._ADMINISTRATES] else "client"


@pytest.mark.parametrize(
    ("key", "with_api_key", "with_admin_key", "with_both"),
    [
        (None, 401, "client", 401),
        ("user", "client", "client", "client"),
        ("boss", 401, "administrator", "administrator"),
        ("userboss", 401, "client", 401),
        ("", 401, "client", 401),
    ],
)
def test_what_a_key_opens(key: str | None, with_api_key: Any, with_admin_key: Any, with_both: Any):
    for sent in ("authorization", "x_api_key"):
        value = key if sent == "x_api_key" else f"Bearer {key}"
        headers: Any = {} if key is None else {sent: value}
        assert comes_in(ServerArgs(api_key="user"), **headers) == with_api_key
        assert comes_in(ServerArgs(admin_key="boss"), **headers) == with_admin_key
        assert comes_in(ServerArgs(api_key="user", admin_key="boss"), **headers) == with_both


def test_with_an_api_key_only_health_and_the_page_are_open():
    options = ServerArgs(api_key="sesame-ö")
    for path in ("/v1/models", "/v1/cache", "/metrics", "/openapi.json", "/nothing"):
        for wrong in ("", "Bearer sesame", "sesame-ö", "\xff\xfe"):
            assert comes_in(options, path, authorization=wrong) == 401
        for scheme in ("Bearer", "bearer"):
            assert comes_in(options, path, authorization=f"{scheme} sesame-ö") == "client"
    for path in ("/health", "/", "/main.js"):
        assert comes_in(options, path) == "client"


@pytest.mark.parametrize(
    ("client", "headers", "comes_as"),
    [
        ("127.0.0.1", {}, "administrator"),
        ("127.8.8.8", {"host": "localhost:8000"}, "administrator"),
        ("::1", {"host": "[::1]:8000"}, "administrator"),
        ("127.0.0.1", {"host": "0.0.0.0:8000"}, "administrator"),
        ("10.0.0.7", {}, "client"),
        ("fe80::1", {}, "client"),
        # A proxy on this machine, which may or may not say so.
        ("127.0.0.1", {"x_forwarded_for": "127.0.0.1"}, "client"),
        ("127.0.0.1", {"forwarded": "for=10.0.0.7"}, "client"),
        ("127.0.0.1", {"x_forwarded_host": "llm.example.org"}, "client"),
        ("127.0.0.1", {"x_forwarded_proto": "https"}, "client"),
        ("127.0.0.1", {"cf_connecting_ip": "10.0.0.7"}, "client"),
        ("127.0.0.1", {"x_original_forwarded_for": "10.0.0.7"}, "client"),
        ("127.0.0.1", {"x_cluster_client_ip": "10.0.0.7"}, "client"),
        ("127.0.0.1", {"x_envoy_external_address": "10.0.0.7"}, "client"),
        ("127.0.0.1", {"x_prometheus_scrape_timeout_seconds": "10"}, "administrator"),
        ("127.0.0.1", {"host": "llm.example.org"}, "client"),
        ("127.0.0.1", {"host": "10.0.0.1:8000"}, "client"),
    ],
)
def test_a_server_without_keys_is_administrated_from_its_own_machine(
    client: str, headers: dict[str, str], comes_as: str
):
    options = ServerArgs(allowed_hosts=["llm.example.org"])
    assert comes_in(options, client=client, **headers) == comes_as
    for with_a_key in (ServerArgs(api_key="user"), ServerArgs(admin_key="boss")):
        assert comes_in(with_a_key, client=client, authorization="Bearer user") == "client"


def test_each_route_is_for_clients_or_for_the_administrator(llm: LLM):
    """A new one has to be put where it belongs."""
    paths = create_app(llm).openapi()["paths"].items()
    routes = {f"{method.upper()} {path}" for path, methods in paths for method in methods}
    for_admin, for_clients = (
        {*re.split(r",\s+", names)} for names in (ADMIN_ROUTES, CLIENT_ROUTES)
    )
    assert routes == for_admin | for_clients | {"GET /health"}
    with live(llm, api_key="user", admin_key="boss") as server:
        for route in sorted(routes):
            method, path = re.sub("{.*?}", "x", route).split()
            user, boss = (
                httpx.request(method, server.url + path, headers=headers, verify=False)
                for headers in ({"authorization": "Bearer user"}, {"authorization": "Bearer boss"})
            )
            assert boss.status_code in (200, 400, 404)
            if route in for_admin:
                assert_error(user, 401, "the server's admin key is needed")
            else:
                assert user.status_code == boss.status_code
    with live(llm, api_key="user") as server:
        refused = server.get("/metrics", headers={"authorization": "Bearer user"})
        error = assert_error(refused, 403, "start it with --admin-key and send that key")
        assert error["type"] == "permission_error"


KNOWN = """localhost LocalHost.:8000 127.0.0.1:8000 [::1]:8000 192.168.1.5:8000 llm.example.org
    LLM.example.org:443""".split()
UNKNOWN = """evil.example evil.example:8000 localhost.evil.example 127.0.0.1.evil.example:8000
    evil.example@localhost localhost?evil.example sub.llm.example.org [::1""".split()


@pytest.mark.parametrize("host", [*KNOWN, *UNKNOWN, ""])
def test_who_sends_no_key_must_know_a_name_of_the_server(host: str):
    options = ServerArgs(allowed_hosts=["127.0.0.1", "LLM.example.org"], admin_key="boss")
    assert comes_in(options, host=host) == ("client" if host in KNOWN else 403)
    assert comes_in(options, host=host, authorization="Bearer boss") == "administrator"
    with_key = ServerArgs(api_key="user")
    assert comes_in(with_key, host=host) == 401
    assert comes_in(with_key, host=host, authorization="Bearer user") == "client"
    for path in ("/health", "/"):
        assert comes_in(options, path, host=host) == "client"


OWN = ["http://127.0.0.1:8000", "https://127.0.0.1:8000", "https://llm.example.org"]
FOREIGN = """http://127.0.0.1:3000 http://127.0.0.1 http://localhost:8000 https://evil.example
    https://evil.example/127.0.0.1:8000 http://[::1 null""".split()


@pytest.mark.parametrize("origin", [*OWN, *FOREIGN, ""])
def test_other_web_pages_may_do_nothing(origin: str):
    options = ServerArgs(allowed_hosts=["127.0.0.1", "llm.example.org"], admin_key="boss")
    for key in ("none", "boss"):
        seen = comes_in(options, origin=origin, authorization=f"Bearer {key}")
        assert (seen != 403) == (origin in OWN)
    nowhere = comes_in(
        ServerArgs(api_key="user"), host="", origin=origin, authorization="Bearer user"
    )
    assert nowhere == 403


def test_a_foreign_page_cannot_flush_and_a_name_made_to_lead_here_cannot_read(llm: LLM):
    body = {"prompt": "| 1 | Nora Lund | 30 |", "max_tokens": 1}
    with live(llm) as server:
        server.post(COMPLETIONS, body)
        simple = {"origin": "https://evil.example", "content-type": "text/plain"}
        flush = server.post("/v1/cache/flush", content=b"", headers=simple)
        assert_error(flush, 403, "web pages of 'https://evil.example' may not use this server")
        usage = server.post(COMPLETIONS, body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        for path in ("/v1/cache", "/metrics", "/v1/prefixes", "/v1/models"):
            rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
            assert_error(server.get(path, headers=rebound), 403, "not known as 'evil.example'")
        assert server.post("/v1/cache/flush", headers={"origin": server.url}).status_code == 200
        server.assert_idle()


@pytest.mark.parametrize(
    ("host", "api_key", "warns"),
    [
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("0.0.0.0", "user", False),
        ("127.0.0.1", None, False),
    ],
)
def test_a_public_address_without_an_api_key_is_warned_of_in_one_line(
    host: str, api_key: str | None, warns: bool, llm: LLM, monkeypatch: Any, capsys: Any
):
    def run(self: Any, sockets: list[socket.socket]) -> None:
        assert not self.config.proxy_headers  # else a header could say that it is this machine

    monkeypatch.setattr(serve.Server, "run", run)
    app = create_app(llm, ServerArgs(api_key=api_key, admin_key="boss"))
    with listen(host, 0) as listener:
        serve.serve(app, listener, 0)
    lines = capsys.readouterr().err.splitlines()
    warnings = [line.startswith("Warning: without an --api-key") for line in lines]
    assert warnings == [warns, *[False] * (len(lines) - 1)] and "Serving" in lines[warns]


def test_an_answer_on_a_kept_connection_does_not_wait_for_the_clients_delayed_ack(
    server: LiveServer,
):
    seconds = []
    with httpx.Client(base_url=server.url) as client:
        for _ in range(8):
            began = time.monotonic()
            assert client.get("/v1/models").status_code == 200
            seconds.append(time.monotonic() - began)
    assert min(seconds[3:]) < 0.03, "a delayed ACK comes after 40 ms"


def test_head_is_answered_like_get_without_a_body(server: LiveServer):
    """So `wget --spider` and `curl -fI` look whether a server is well."""
    routes = server.get("/openapi.json").json()["paths"]
    with httpx.Client(verify=False, base_url=server.url) as client:  # by one connection
        for route in ("/", "/nothing", *(path for path in routes if "get" in routes[path])):
            path = route.replace("{response_id}", "resp_0").replace("{name}", "tabletalk")
            head, get = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert path == "/metrics" or head.headers["content-length"] == f"{len(get.content)}"
