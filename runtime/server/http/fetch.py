"""Fetches a file from a host that the server's operator allows, and from no other address."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Collection
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from radixcache.errors import InvalidRequest, first_sentence

MAX_REDIRECTS = 3
_PIECE = 1 << 16
_HEADERS = {"User-Agent": "radixcache", "Accept": "image/*", "Accept-Encoding": "identity"}


class _Place(NamedTuple):
    """Where a URL leads: `root` is its scheme, its host and its port, if it has one."""

    root: str
    host: str
    port: int
    path: str


def fetch(url: str, domains: Collection[str], max_bytes: int, deadline: float) -> bytes:
    """The file at an http(s) URL. Takes neither proxies of the environment nor cookies along.

    Args:
        domains: the hosts that are allowed, in lower case; redirects lead to no other.
        deadline: on `time.monotonic`.

    Raises:
        InvalidRequest: the URL is not allowed, or no such file comes from there in time.
    """
    for _ in range(MAX_REDIRECTS + 1):
        place = _check(url, domains)
        try:
            found = _get(place, max_bytes, deadline)
            if time.monotonic() >= deadline:  # what came may be cut off
                raise TimeoutError
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no ASCII
            reason = getattr(error, "strerror", None) or first_sentence(error)
            if time.monotonic() >= deadline:
                reason = "it takes too long"
            raise InvalidRequest(f"no image comes from {place.host}: {reason}") from None
        if isinstance(found, bytes):
            return found
        url = found
    raise InvalidRequest(f"no image comes from {place.host}: more than {MAX_REDIRECTS} redirects")


def _check(url: str, domains: Collection[str]) -> _Place:
    """Where a URL leads; `InvalidRequest` if it may not."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").removesuffix("."), parts.port
    except ValueError:
        raise InvalidRequest("an image's URL is malformed") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequest("an image's URL is a data: URL, or begins with https:// or http://")
    if host not in domains:
        raise InvalidRequest(
            f"images are not fetched from {host[:100]!r}: send it in base64, or start the server "
            "with --allowed-media-domains and that name"
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("an image's URL has no user name and no password")
    if port not in (None, 80, 443):
        raise InvalidRequest("an image's URL has no port but 80 and 443")
    port = port or (443 if parts.scheme == "https" else 80)
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    return _Place(f"{parts.scheme}://{parts.netloc}", host, port, path)


def _get(place: _Place, max_bytes: int, deadline: float) -> bytes | str:
    """What is there, or the URL that it redirects to."""
    end = _connect(place, deadline)
    if place.root.startswith("https"):
        context = ssl.create_default_context()
        end = context.wrap_socket(end, do_handshake_on_connect=False, server_hostname=place.host)
    connection = HTTPConnection(place.host, place.port)
    # Its timeout is for each read alone.
    alarm = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, [end])
    with closing(end), closing(connection):
        alarm.start()
        try:
            if isinstance(end, ssl.SSLSocket):
                end.do_handshake()
            connection.sock = end
            headers = {**_HEADERS, "Host": place.root.partition("://")[2]}
            connection.request("GET", place.path, headers=headers)
            response = connection.getresponse()
            to = response.getheader("location")
            if response.status in (301, 302, 303, 307, 308) and to is not None:
                return urljoin(f"{place.root}{place.path}", to)
            return _read(response, max_bytes)
        finally:
            alarm.cancel()


def _shut(end: socket.socket) -> None:
    """End all reads and writes of another thread."""
    with suppress(OSError):
        socket.socket.shutdown(end, socket.SHUT_RDWR)


def _read(response: HTTPResponse, max_bytes: int) -> bytes:
    if response.status != 200:
        raise HTTPException(f"it answers with status {response.status}")
    pieces, size = [], 0
    while piece := response.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if max(size, response.length or 0) > max_bytes:
            raise HTTPException(f"it has more than {max_bytes // 10**6} MB")
    if response.length:
        raise HTTPException("it is cut off")
    return b"".join(pieces)


def _connect(place: _Place, deadline: float) -> socket.socket:
    """A connection to one of the host's addresses, all of which must be public."""
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    if not all(map(is_public, addresses)):
        raise HTTPException("its address is not a public one")
    error = OSError("it has no address")
    for address in addresses:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            return socket.create_connection((address, place.port), left)
        except OSError as refused:
            error = refused
    raise error


def is_public(address: str) -> bool:
    """Whether an address is the internet's, and by no notation this machine's or its network's."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        others = found.ipv4_mapped or found.sixtofour or found.teredo
        if others or found.is_site_local:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved)
