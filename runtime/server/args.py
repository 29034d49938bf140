"""The settings of a server besides its engine's. Imports neither torch nor pydantic."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from radixcache.errors import InvalidRequest, MissingDependency
from radixcache.runtime.config.flags import Rule, at_least, check, setting
from radixcache.runtime.sampling.params import SamplingParams

_TRACING = tuple(
    f"opentelemetry-{name}"
    for name in ("sdk", "exporter-otlp-proto-http", "instrumentation-fastapi")
)
_KEY = "other users see it in the list of processes: better"


def _split(value: object) -> object:
    """A list may be written "a,b"."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _replicas(given: Any) -> tuple[int, int]:
    if isinstance(given, tuple):
        return given
    low, dots, high = str(given).partition("..")
    try:
        least, most = int(low), int(high if dots else low)
    except ValueError:
        least, most = 0, 0
    if not 0 < least <= most:
        raise ValueError("must be a number like 2, or the least and the most like 1..4")
    return least, most


def _is_origin(text: str) -> bool:
    parts = urlsplit(text)
    return text == "*" or bool(
        parts.hostname and text == f"{parts.scheme}://{parts.netloc}".lower()
    )


def _is_collector(text: str) -> bool:
    return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)


KEEP_ALIVE = 75.0
"""Seconds: more than the 60 of most proxies, which could write to a closed connection."""

_TEXT = Rule(lambda text: text != "", "must not be empty")
_HOST_NAME = Rule(
    lambda text: bool(text.strip()) and {*text}.isdisjoint("/:?#@* "),
    "must be names without scheme, port or *",
)
_ORIGIN = Rule(
    _is_origin, "must be origins like https://app.example.org, with no slash at the end, or *"
)
_COLLECTOR = Rule(_is_collector, "must be an address like http://127.0.0.1:4318")
_SECONDS = Rule(lambda seconds: seconds > 0, "must be above 0")


@dataclass(frozen=True)
class ServerArgs:
    """The settings of a server or an app: flags of `radixcache serve`, variables and names in the
    settings file, like those of `EngineArgs`.

    Raises:
        InvalidRequest: a value makes no sense, or a key's file cannot be read.
        MissingDependency: tracing is on, and its packages are missing.
    """

    host: str = setting("127.0.0.1", "address to listen on", metavar="HOST", rule=_TEXT)
    port: int = setting(8000, "port; 0 takes a free one (8000)", metavar="N")
    api_key: str | None = setting(
        None,
        f"key that clients must send (none); {_KEY} RADIXCACHE_API_KEY",
        metavar="KEY",
    )
    api_key_file: Path | None = setting(None, "file with the API key", metavar="FILE")
    admin_key: str | None = setting(
        None,
        f"key to see and flush all clients' cache; {_KEY} RADIXCACHE_ADMIN_KEY",
        metavar="KEY",
    )
    admin_key_file: Path | None = setting(None, "file with the admin key", metavar="FILE")
    allowed_hosts: Sequence[str] = setting(
        (),
        "host names that clients without a key may use (localhost, IP addresses)",
        metavar="NAME",
        rule=_HOST_NAME,
        parse=_split,
    )
    allowed_origins: Sequence[str] = setting(
        (),
        "web pages that may use the server, like https://app.example.org, or * for all",
        metavar="ORIGIN",
        rule=_ORIGIN,
        parse=_split,
    )
    allowed_media_domains: Sequence[str] = setting(
        (),
        "hosts from which images are fetched that requests name by URL (none)",
        metavar="NAME",
        rule=_HOST_NAME,
        parse=_split,
    )
    served_model_name: Sequence[str] = setting(
        (), "model names in the API, the first in answers (--model's)", metavar="NAME", rule=_TEXT,
        parse=_split,
    )  # fmt: skip
    max_queued_requests: int = setting(
        1024,
        "completions that may wait, half of them of one client; more get status 429 (1024)",
        metavar="N",
        rule=at_least(0),
    )
    request_timeout: float = setting(600.0, "seconds per request", metavar="S", rule=_SECONDS)
    max_body_size: int = setting(
        96 << 20, "bytes of a request's body (96 MiB)", metavar="N", rule=at_least(1)
    )
    enable_pooling: bool = setting(
        False, "let a language model embed and score, too: /v1/embeddings, /v1/rerank, /v1/score"
    )
    hide_texts: bool = setting(
        False, "hide prompts' texts in the tree, and other requests' in explanations"
    )
    access_log: bool = setting(False, "print a line of JSON for each answered request")
    otlp_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector for traces, like http://127.0.0.1:4318",
        metavar="URL",
        rule=_COLLECTOR,
    )
    replicas: tuple[int, int] | None = setting(
        None,
        "servers of the model behind this address: N, or N..M by load; needs Ray",
        metavar="N",
        parse=_replicas,
    )
    keep_alive_timeout: float = setting(
        KEEP_ALIVE, "seconds that an idle connection stays open (75)", metavar="S", rule=_SECONDS
    )
    shutdown_timeout: float = setting(
        30.0, "seconds for requests to end after SIGTERM", metavar="S", rule=at_least(0)
    )
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of requests: fields of `SamplingParams`."""

    def __post_init__(self) -> None:
        check(self)
        SamplingParams(**self.sampling)  # refuses
        for name in ("api_key", "admin_key"):
            key = _key(name, getattr(self, name), getattr(self, f"{name}_file"))
            object.__setattr__(self, name, key)
            object.__setattr__(self, f"{name}_file", None)
        if self.api_key is not None and self.api_key == self.admin_key:
            raise InvalidRequest("the admin key must not be the API key, which all clients have")
        for package in _TRACING if self.traces else ():
            try:
                version(package)
            except PackageNotFoundError:
                raise MissingDependency(
                    f"traces need {package}: in a checkout, pip install '.[otel]'"
                ) from None

    @property
    def traces(self) -> bool:
        """Whether `otlp_endpoint` or OpenTelemetry's own variables ask for traces."""
        variables = (f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT" for kind in ("", "TRACES_"))
        return self.otlp_endpoint is not None or any(map(os.environ.get, variables))


def _key(name: str, key: str | None, file: Path | None) -> str | None:
    """The key itself, or the one in the file."""
    if file is not None:
        if key is not None:
            raise InvalidRequest(f"{name} and {name}_file are both given")
        try:
            key = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InvalidRequest(f"cannot read {file}: {reason}") from None
    if key is None:
        return None
    kind = "API" if name == "api_key" else "admin"
    if not key.strip():
        raise InvalidRequest(f"the {kind} key is empty")
    if not key.strip().isprintable():
        raise InvalidRequest(f"the {kind} key must be one line that a header can hold")
    return key.strip()
