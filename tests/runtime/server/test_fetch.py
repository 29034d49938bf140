"""Images are fetched from allowed hosts at public addresses alone, within bounds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from radixcache.errors import InvalidRequest
from radixcache.runtime.server.http.fetch import fetch, is_public

PUBLIC = "93.184.216.34"
MOST = 100_000
FILE = bytes(range(256)) * 100

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    """Hosts, all of which are one server of this machine.

    Attributes:
        addresses: of each host, as a name server says.
        answers: by path.
        seen: host and path of each request, with its headers.
        connected: each address that was connected to.
    """

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {"a.example": [PUBLIC], "b.example": [PUBLIC]}
        self.answers: dict[str, Answer] = {}
        self.seen: list[tuple[str, str]] = []
        self.headers: list[Any] = []
        self.connected: list[tuple[str, int]] = []
        self.resolved: list[str] = []

    def resolve(self, host: str, port: int, **_: Any) -> list[Any]:
        self.resolved.append(host)
        if host not in self.addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in self.addresses[host]]

    def get(
        self, url: str, seconds: float = 20, domains: tuple[str, ...] = ("a.example",)
    ) -> bytes:
        return fetch(url, domains, MOST, time.monotonic() + seconds)


def reply(
    body: bytes = FILE, status: int = 200, length: int | None = None, **headers: str
) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(to: str, status: int = 302) -> Answer:
    return reply(b"", status, location=to)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.seen.append((self.headers["host"], self.path))
            web.headers.append(self.headers)
            web.answers[self.path](self)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # the client hangs up

    with Server(("127.0.0.1", 0), Handler) as server:

        def connect(address: tuple[str, int], timeout: float) -> socket.socket:
            web.connected.append(address)
            end = socket.socket()
            end.settimeout(timeout)
            end.connect(("127.0.0.1", server.server_port))
            return end

        monkeypatch.setattr(socket, "getaddrinfo", web.resolve)
        monkeypatch.setattr(socket, "create_connection", connect)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()


def test_a_file_of_an_allowed_host_is_fetched(web: Web, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    web.answers = {"/a.png?size=1": reply(), "/": reply(b"root")}
    assert web.get("http://a.example/a.png?size=1#part") == FILE
    assert web.get("http://A.example.:80") == b"root"
    assert web.seen == [("a.example", "/a.png?size=1"), ("A.example.:80", "/")]
    assert web.connected == [(PUBLIC, 80)] * 2 and web.resolved == ["a.example"] * 2
    sent = {name.lower() for name in web.headers[0]}
    assert sent == {"host", "user-agent", "accept", "accept-encoding"}


def test_without_a_length_a_file_ends_with_its_connection(web: Web):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(FILE)

    web.answers = {"/": answer}
    assert web.get("http://a.example/") == FILE


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_among_allowed_hosts(web: Web, status: int):
    web.answers = {
        "/x/1": redirect("2", status),
        "/x/2": redirect("//b.example/3", status),
        "/3": redirect("http://a.example:443/4", status),
        "/4": reply(),
        "/0": redirect("/x/1", status),
    }
    both = ("a.example", "b.example")
    assert web.get("http://a.example/x/1", domains=both) == FILE
    assert [address for address, _ in web.connected] == [PUBLIC] * 4
    assert [port for _, port in web.connected] == [80, 80, 80, 443]
    with pytest.raises(InvalidRequest, match="more than 3 redirects"):
        web.get("http://a.example/0", domains=both)


@pytest.mark.parametrize(
    ("to", "sentence"),
    [
        (
            "http://b.example/",
            "not fetched from 'b.example': send it in base64, or start the server",
        ),
        ("http://127.0.0.1/", "not fetched from '127.0.0.1'"),
        ("http://169.254.169.254/latest/meta-data/", "not fetched from '169.254.169.254'"),
        ("http://[::1]/", "not fetched from '::1'"),
        ("http://metadata.example/", "no image comes from metadata.example: its address is not a"),
        ("file:///etc/passwd", "is a data: URL, or begins with https:// or http://"),
        ("data:image/png;base64,AA==", "is a data: URL, or begins with https:// or http://"),
        ("http://a.example:8000/", "no port but 80 and 443"),
        ("http://user@a.example/", "no user name"),
        ("http://[a.example/", "no image comes from a.example"),
    ],
)
def test_redirects_lead_nowhere_else(web: Web, to: str, sentence: str):
    web.answers = {"/": redirect(to)}
    web.addresses["metadata.example"] = ["169.254.169.254"]
    with pytest.raises(InvalidRequest) as refused:
        web.get("http://a.example/", domains=("a.example", "metadata.example"))
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert len(web.seen) == len(web.connected) == 1


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://b.example/", "--allowed-media-domains"),
        ("http://a.example.evil/", "--allowed-media-domains"),
        ("http://evil.a.example/", "--allowed-media-domains"),
        ("http://2130706433/", "--allowed-media-domains"),
        ("http://a.example\\@b.example/", "--allowed-media-domains"),
        ("http://b.example#@a.example/", "--allowed-media-domains"),
        ("http://a.example@b.example/", "--allowed-media-domains"),
        ("http://name:word@a.example/", "no user name and no password"),
        ("http://a.example:22/", "no port but 80 and 443"),
        ("http://a.example:0/", "no port but 80 and 443"),
        ("http://a.example:99999/", "malformed"),
        ("http://[::1/", "malformed"),
        ("ftp://a.example/", "begins with https:// or http://"),
        ("/etc/passwd", "begins with https:// or http://"),
        ("", "begins with https:// or http://"),
    ],
)
def test_what_is_not_allowed_is_not_even_resolved(web: Web, url: str, sentence: str):
    with pytest.raises(InvalidRequest) as refused:
        web.get(url)
    assert sentence in str(refused.value) and not web.resolved and not web.connected


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", f"::ffff:{PUBLIC}", "::7f00:1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        "2001:0:1::1",
    ],
)
def test_an_allowed_host_at_a_private_address_is_refused(web: Web, address: str):
    assert not is_public(address)
    web.addresses["a.example"] = [PUBLIC, address]
    with pytest.raises(InvalidRequest, match="its address is not a public one"):
        web.get("http://a.example/")
    assert not web.connected


def test_public_addresses_are_public():
    for address in (PUBLIC, "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"):
        assert is_public(address)


def test_a_name_is_resolved_once(web: Web, monkeypatch: pytest.MonkeyPatch):
    """A second answer could be another one."""
    web.answers = {"/": reply()}

    def once(host: str, port: int, **_: Any) -> list[Any]:
        found = Web.resolve(web, host, port)
        web.addresses["a.example"] = ["127.0.0.1"]
        return found

    monkeypatch.setattr(socket, "getaddrinfo", once)
    assert web.get("http://a.example/") == FILE
    assert web.connected == [(PUBLIC, 80)]


HEARD: list[bytes] = []
"""What a client has listened to up to the end."""


def slowly(handler: BaseHTTPRequestHandler) -> None:
    """A byte at a time, each within any timeout."""
    handler.send_response(200)
    handler.end_headers()
    dribble(handler, b"x")


def slow_head(handler: BaseHTTPRequestHandler) -> None:
    dribble(handler, b"HTTP/1.1 100 Continue\r\n\r\n")


def dribble(handler: BaseHTTPRequestHandler, piece: bytes) -> None:
    for _ in range(300):  # unless the client hangs up
        handler.wfile.write(piece)
        time.sleep(0.01)
    HEARD.append(piece)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (reply(status=404), "it answers with status 404"),
        (reply(status=302), "it answers with status 302"),
        (reply(b"x" * (MOST + 1)), "it has more than 0 MB"),
        (reply(b"x", length=10**12), "it has more than 0 MB"),
        (reply(b"x" * 10, length=20), "it is cut off"),
        (lambda handler: handler.wfile.write(b"no HTTP\r\n\r\n"), "no HTTP"),
        (lambda handler: None, "Remote end closed connection"),
        (slowly, "it takes too long"),
        (slow_head, "it takes too long"),
    ],
)
def test_answers_that_are_no_file_are_refused(web: Web, answer: Answer, sentence: str):
    web.answers = {"/": answer}
    seconds = 0.3 if answer in (slowly, slow_head) else 20
    with pytest.raises(InvalidRequest) as refused:
        web.get("http://a.example/", seconds)
    assert f"no image comes from a.example: {sentence}" in str(refused.value) and not HEARD


def test_a_file_without_a_length_is_bounded(web: Web):
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:  # until the client hangs up
            handler.wfile.write(b"x" * 10_000)

    web.answers = {"/": endless}
    with pytest.raises(InvalidRequest, match="it has more than 0 MB"):
        web.get("http://a.example/")


def test_a_host_that_cannot_be_reached_is_named(web: Web, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidRequest, match=r"comes from c\.example: Name or service not known"):
        web.get("http://c.example/", domains=("c.example",))
    tried: list[str] = []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address[0])
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    web.addresses["a.example"] = [PUBLIC, "8.8.8.8"]
    with pytest.raises(InvalidRequest, match=r"comes from a\.example: Connection refused"):
        web.get("http://a.example/")
    assert tried == [PUBLIC, "8.8.8.8"]


def test_a_certificate_is_checked(web: Web):
    """This server has none, which is as bad as another's."""
    with pytest.raises(InvalidRequest, match=r"comes from a\.example: "):
        web.get("https://a.example/", seconds=5)
    assert web.connected == [(PUBLIC, 443)] and not web.seen
