"""vLLM's `--kv-events-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from radixcache.errors import InvalidRequest, MissingDependency

_MOST = 1_000_000_000


@dataclass(frozen=True)
class KVEventsConfig:
    """Settings of KV events, with vLLM's names and defaults.

    Attributes:
        enable_kv_cache_events: whether anything is published.
        publisher: "zmq", or "null" to publish nothing after all.
        endpoint: where to publish. It is bound if it has a `*` or `::`, or is `ipc://`; any other
            is the address of a subscriber, to which the publisher connects.
        replay_endpoint: where to answer requests for earlier batches; always bound.
        buffer_steps: batches that are kept for replays.
        hwm: batches that wait for a slow subscriber before it misses some; 0 is no limit.
        max_queue_size: batches that wait for the sending thread.
        topic: the topic to which clients subscribe; llm-d wants "kv@POD@MODEL".
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def read(cls, given: str | Mapping[str, Any]) -> KVEventsConfig:
        """A configuration from a mapping or JSON.

        Raises:
            InvalidRequest: it makes no sense.
            MissingDependency: pyzmq or msgspec is not installed.
        """
        try:
            import msgspec
            import zmq  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"KV events need {error.name}: in a checkout, pip install '.[kv-events]'"
            ) from None
        try:
            text = given if isinstance(given, str) else msgspec.json.encode(given)
            given, config = msgspec.json.decode(text), msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the configuration of KV events: {error}") from None
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise InvalidRequest(f"KV events have no {name!r}, but {', '.join(names)}")
        for name, least in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
            if not least <= getattr(config, name) <= _MOST:
                raise InvalidRequest(f"{name} of KV events must be from {least} to {_MOST:,}")
        return config

    @classmethod
    def asked(
        cls, given: str | Mapping[str, Any] | KVEventsConfig | None, page_size: int, caches: bool
    ) -> KVEventsConfig | None:
        """The configuration for a cache; None if nothing is to be published."""
        config = cls() if given is None else given
        if isinstance(config, str | Mapping):
            config = cls.read(config)
        if not config.enable_kv_cache_events or config.publisher == "null":
            return None
        if page_size < 2 or not caches:
            raise InvalidRequest(
                "KV events are about blocks: they need a cache whose page size is the router's "
                "block size, which is above 1"
            )
        return config
