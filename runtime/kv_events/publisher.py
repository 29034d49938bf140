"""Publishes a cache's events to subscribers."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from radixcache.base import PrefixCache
from radixcache.errors import InvalidRequest, first_sentence
from radixcache.events import Cleared
from radixcache.runtime.kv_events.config import KVEventsConfig
from radixcache.runtime.kv_events.wire import MEDIA, DroppedBelow, Event, StoredBelow, Wire
from radixcache.tiers.stored_pages import StoredPage
from radixcache.tokens import Tokens

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_MAX_RECEIVED = 4096
"""Bytes of a subscription or a replay request; ZeroMQ disconnects clients that send more."""


class KVEventPublisher:
    """Publishes what a cache stores and evicts, until `close`.

    Call `end_step` after each step: it sends a batch of the changes since the last one. Blocks of a
    failed step are stored and removed within one batch.

    If more than `max_queue_size` batches wait, they are dropped, and the next one begins with
    `AllBlocksCleared`: subscribers then know of less than is cached, never of more.

    Args:
        cache: a `RadixCache` or `HashBlockCache` with pages of more than one token.

    Attributes:
        endpoint: where it publishes, with the port that was chosen for 0.
        connects: the endpoint is a subscriber's.
        replay_endpoint: where it answers replay requests, if anywhere.

    Raises:
        InvalidRequest: an endpoint makes no sense, or is taken.
    """

    def __init__(self, cache: PrefixCache, config: KVEventsConfig) -> None:
        import zmq
        from msgspec import msgpack

        self._cache, self._config = cache, config
        self._wire = Wire(cache.page_size, 2 * cache.pool.num_pages)
        self._pack = msgpack.Encoder().encode
        self._pending: list[Event] = []
        self._unwritten: dict[StoredPage, Tokens] = {}
        """Whole pages that are being written to the tier below, with the prefix that each ends."""
        self._queue: deque[tuple[float, list[Event]]] = deque()
        self._kept: deque[tuple[bytes, bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._numbers = count()
        self._closed = False
        self._pub, self.endpoint = _open(zmq.PUB, config.endpoint, config.hwm)
        self.connects = not _is_bound(config.endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            most = config.buffer_steps + 1  # a whole replay waits for a client that reads nothing
            try:
                self._replay, self.replay_endpoint = _open(zmq.ROUTER, config.replay_endpoint, most)
            except InvalidRequest:
                self._pub.close()
                raise
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        cache.events.append(self._collect)
        self._medium = ""
        if cache.lower is not None:
            self._medium = MEDIA[cache.lower.medium]
            cache.lower.listener = self
            for page, tokens in cache.lower.from_root():
                if not page.is_of_window:
                    self.added(page, tokens)
            self.end_step()  # so that routers know them before the first request

    # -- on the engine's thread ----------------------------------------------------------------

    def _collect(self, event: Event) -> None:
        self._pending.append(event)
        if isinstance(event, Cleared):
            self._unwritten.clear()

    def added(self, page: StoredPage, tokens: Tokens) -> None:
        """As a tier's listener: note a page, to publish it once it can be loaded."""
        if len(page.tokens) == self._cache.page_size:
            self._unwritten[page] = tokens

    def dropped(self, page: StoredPage) -> None:
        """As a tier's listener: note that a page is gone."""
        if len(page.tokens) == self._cache.page_size and self._unwritten.pop(page, None) is None:
            self._pending.append(DroppedBelow(page.key, self._medium))

    def end_step(self) -> None:
        """Queue the changes, unless a step has yet to compute them. Never waits."""
        written = [page for page in self._unwritten if page.state != "writing"]
        for page in sorted(written, key=lambda page: len(self._unwritten[page])):  # parents first
            tokens = self._unwritten.pop(page)
            if page.state == "stored":
                self._pending.append(StoredBelow(page, tokens, self._medium))
        if not self._pending or self._cache.in_flight or self._cache.broken:
            return
        events, self._pending = self._pending, []
        if len(self._queue) >= self._config.max_queue_size:
            log.warning("%d batches of KV events are dropped: too many wait", len(self._queue))
            self._queue.clear()
            events.insert(0, Cleared())
        self._queue.append((time.time(), events))
        self._notify()

    def close(self) -> None:
        """End, once the cache changes no more; queued batches may be lost. Idempotent."""
        if not self._closed:
            self._cache.events.remove(self._collect)
            if self._cache.lower is not None:
                self._cache.lower.listener = None
            self._closed = True
            self._notify()
        self._thread.join()

    def _notify(self) -> None:
        with suppress(OSError):  # full, so the thread wakes anyway
            self._wake.send(b"\0")

    # -- on the sending thread -----------------------------------------------------------------

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closed:
                for ready, _ in poller.poll():
                    if ready is self._replay:
                        self._answer()
                    else:
                        self._woken.recv(4096)
                with suppress(IndexError):  # `end_step` may clear the queue meanwhile
                    while True:
                        self._send(*self._queue.popleft())
        finally:
            self._pub.close()
            if self._replay is not None:
                self._replay.close()
            self._wake.close()
            self._woken.close()

    def _send(self, now: float, events: list[Event]) -> None:
        try:
            messages = [one for event in events for one in self._wire.describe(event)]
            payload = self._pack((now, messages, 0))
        except Exception:
            log.exception("a batch of KV events is lost: subscribers begin anew")
            messages = [*self._wire.describe(Cleared())]
            payload = self._pack((now, messages, 0))
        if messages:
            number = next(self._numbers).to_bytes(8, "big")
            self._kept.append((self._config.topic.encode(), number, payload))
            self._pub.send_multipart((self._config.topic.encode(), number, payload))

    def _answer(self) -> None:
        """Answer a request `(b"", number)`: the kept batches from that number on, and an end."""
        replay = self._replay
        assert replay is not None
        client, *request = replay.recv_multipart()
        if len(request) == 2 and len(request[1]) == 8:
            for message in self._kept:
                if message[1] >= request[1]:
                    replay.send_multipart((client, b"", *message))
        replay.send_multipart((client, b"", b"", _END, b""))


def _open(kind: int, endpoint: str, hwm: int) -> tuple[zmq.Socket[bytes], str]:
    """A socket and its endpoint; `InvalidRequest` if it cannot be opened."""
    import zmq

    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    opened.set_hwm(hwm)
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED)
    opened.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        _check_place(endpoint)
        if _is_bound(endpoint) or kind == zmq.ROUTER:
            opened.bind(endpoint)
        else:
            opened.connect(endpoint)
        return opened, opened.getsockopt_string(zmq.LAST_ENDPOINT)
    except (zmq.ZMQError, ValueError) as error:
        opened.close()
        reason = first_sentence(error)
        raise InvalidRequest(f"KV events cannot be at {endpoint!r}: {reason}") from None


def _is_bound(endpoint: str) -> bool:
    """Whether to bind an endpoint, as in vLLM; else it is a subscriber's."""
    return any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://"))


def _check_place(endpoint: str) -> None:
    """ValueError for an endpoint that ZeroMQ would misread or take from its owner."""
    kind, _, place = endpoint.partition("://")
    port = place.rpartition(":")[2]
    if kind == "tcp" and port != "*" and not (port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{port!r} is no port")
    if kind == "ipc":
        with socket.socket(socket.AF_UNIX) as other, suppress(OSError):
            other.connect(place)
            raise ValueError("Address already in use")
