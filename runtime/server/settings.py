"""What a server is told: by flags, by the environment or by a file. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from radixcache.errors import InvalidRequest, MissingDependency, first_sentence
from radixcache.runtime.kv_events.config import KVEventsConfig
from radixcache.runtime.sampling.params import SamplingParams
from radixcache.runtime.sizes import parse_memory

_PREFIX = "RADIXCACHE_"
_OTHER_VARIABLES = {"data", "march"}
"""Variables of that prefix that are for the benchmarks, and for compiling the kernels."""


SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty")
"""How answers are sampled unless a request says it."""

_TRACING = tuple(
    f"opentelemetry-{name}"
    for name in ("sdk", "exporter-otlp-proto-http", "instrumentation-fastapi")
)


@dataclass(frozen=True)
class ServerArgs:
    """What an app may be told.

    Attributes:
        served_model_name: names of the model, the first of which is in answers; its own if empty.
        api_key: what clients must send as a bearer token; None lets everybody in.
        admin_key: what lets its holder administrate, and do all that clients may. With None, a
            server without an API key is administrated from its own machine, any other not at all.
        allowed_hosts: names that lead to the server, besides `localhost`; see `access.py`.
        allowed_origins: origins of web pages that may use the server; "*" is all.
        max_queued_requests: completions that may wait, besides those that run; one client may have
            half of these places.
        request_timeout: seconds that a request may take.
        max_body_size: bytes of a request.
        hide_texts: show nobody the texts of others: no text in the tree, and in explanations none
            but the request's own. For servers whose users must not see each other's prompts.
        access_log: print a line of JSON for each request; see `request_log.py`.
        sampling: how answers are sampled where a request does not say; fields of `SamplingParams`.
        otlp_endpoint: the address of an OpenTelemetry collector that takes traces over HTTP.
            The variables OTEL_EXPORTER_OTLP_ENDPOINT and ..._TRACES_ENDPOINT ask for them, too.
    """

    served_model_name: Sequence[str] = ()
    api_key: str | None = None
    admin_key: str | None = None
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    max_queued_requests: int = 1024
    request_timeout: float = 600.0
    max_body_size: int = 16 << 20
    hide_texts: bool = False
    access_log: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling)  # refuses
        for name, key in (("API", self.api_key), ("admin", self.admin_key)):
            if key is not None and not key.strip():
                raise InvalidRequest(f"the {name} key is empty")
            if key is not None and (not key.isprintable() or key != key.strip()):
                raise InvalidRequest(f"the {name} key must be one line that a header can hold")
        if self.api_key is not None and self.api_key == self.admin_key:
            raise InvalidRequest("the admin key must not be the API key, which all clients have")
        if not self.request_timeout > 0:
            raise InvalidRequest(
                f"request_timeout must be above 0 seconds, not {self.request_timeout:g}"
            )
        for package in _TRACING if self.traces else ():
            try:
                version(package)
            except PackageNotFoundError:
                raise MissingDependency(
                    f"traces need {package}: in a checkout, pip install '.[otel]'"
                ) from None

    @property
    def traces(self) -> bool:
        """Whether traces are asked for."""
        variables = (f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT" for kind in ("", "TRACES_"))
        return self.otlp_endpoint is not None or any(map(os.environ.get, variables))


def _split(value: object) -> object:
    """A list may be written "a,b"."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _host_name(text: str) -> str:
    if not text.strip() or not {*text}.isdisjoint("/:?#@ "):
        raise ValueError("a name without scheme and port")
    return text


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if text != "*" and (not parts.hostname or text != f"{parts.scheme}://{parts.netloc}".lower()):
        raise ValueError("an origin like https://app.example.org, with no slash at its end, or *")
    return text


def _memory(amount: int | str) -> int:
    try:
        return parse_memory(amount)
    except InvalidRequest:
        raise ValueError("an amount like 2GB or 512MiB, or bytes") from None


def _collector(text: str) -> str:
    if not text.startswith(("http://", "https://")) or not urlsplit(text).hostname:
        raise ValueError("an address like http://127.0.0.1:4318")
    return text


def _replicas(text: str) -> tuple[int, int]:
    low, dots, high = str(text).partition("..")
    try:
        least, most = int(low), int(high if dots else low)
    except ValueError:
        least, most = 0, 0
    if not 0 < least <= most:
        raise ValueError("a number of replicas like 2, or the least and the most like 1..4")
    return least, most


def _events(given: Any) -> Any:
    """A mapping may be written as JSON; what is wrong with it is said in one sentence."""
    return given if given is None else asdict(KVEventsConfig.read(given))


_SPLIT = BeforeValidator(_split)
_EVENTS = BeforeValidator(_events)
_Name = Annotated[str, Field(min_length=1)]
_HostName = Annotated[str, AfterValidator(_host_name)]
_Memory = Annotated[int | str, AfterValidator(_memory)]
_Origin = Annotated[str, AfterValidator(_origin)]
_Replicas = Annotated[tuple[int, int], NoDecode, BeforeValidator(_replicas)]
_Collector = Annotated[str, AfterValidator(_collector)]


class Settings(BaseSettings):
    """A value for each flag of `radixcache serve`; None leaves it to whoever takes it."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", protected_namespaces=())

    # `LLM`'s.
    model: str | None = None
    cache: Literal["radix", "hash-block", "none"] | None = None
    page_size: int | None = None
    kv_memory: _Memory | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    tensor_parallel_size: int | None = None
    exact: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    schedule: Literal["longest-prefix", "fcfs"] | None = None
    kv_events_config: Annotated[dict[str, Any] | None, NoDecode, _EVENTS] = None

    # `SamplingParams`'.
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    # The server's.
    config: str | None = None
    host: _Name = "127.0.0.1"  # an empty one would be every address
    port: int = 8000
    api_key: str | None = None
    api_key_file: Path | None = None
    admin_key: str | None = None
    admin_key_file: Path | None = None
    allowed_host: Annotated[list[_HostName], NoDecode, _SPLIT] = []
    allow_origin: Annotated[list[_Origin], NoDecode, _SPLIT] = []
    served_model_name: Annotated[list[_Name], NoDecode, _SPLIT] = []
    max_queued_requests: Annotated[int, Field(ge=0)] | None = None
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    max_body_size: Annotated[int, Field(ge=1)] | None = None
    hide_texts: bool | None = None
    access_log: bool | None = None
    otlp_endpoint: _Collector | None = None
    replicas: _Replicas | None = None
    shutdown_timeout: Annotated[float, Field(ge=0)] = 30.0

    def options(self) -> ServerArgs:
        """What the app is told; `InvalidRequest` if there is something wrong with a key."""
        given = {field.name: getattr(self, field.name, None) for field in fields(ServerArgs)}
        given |= {
            "served_model_name": self.served_model_name
            or ([_name(self.model)] if self.model else ()),
            "api_key": _key("api-key", self.api_key, self.api_key_file),
            "admin_key": _key("admin-key", self.admin_key, self.admin_key_file),
            "allowed_hosts": [self.host, *self.allowed_host],
            "allowed_origins": self.allow_origin,
            "sampling": {
                name: value for name in SAMPLING if (value := getattr(self, name)) is not None
            },
        }
        return ServerArgs(**{name: value for name, value in given.items() if value is not None})


def read_settings(flags: Mapping[str, Any]) -> Settings:
    """A flag stands before the environment, and that before the file of `config`.

    Raises:
        InvalidRequest: a value or a name that makes no sense, wherever it stands, or no such file.
    """
    variables = {
        name[len(_PREFIX) :].lower(): name for name in os.environ if name.startswith(_PREFIX)
    }
    for name in variables.keys() - _OTHER_VARIABLES:
        _check_name(name, f"the variable {variables[name]}", f"{_PREFIX}{{}}", str.upper)
    path = flags.get("config") or os.environ.get(f"{_PREFIX}CONFIG")
    file = {} if path is None else _read_file(path)
    try:
        return Settings(**{**file, **EnvSettingsSource(Settings)(), **flags})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        where = f"{name} in {path}"
        if name in flags:
            where = f"--{name.replace('_', '-')}"
        elif name in variables:
            where = variables[name]
        reason = first["msg"].removeprefix("Value error, ").partition(", unable")[0]
        reason = reason.replace("Input should be", "must be")
        value = "" if "key" in name else f", not {first['input']!r}"
        raise InvalidRequest(f"{where}: {reason}{value}") from None


def _read_file(path: str) -> dict[str, Any]:
    """The settings in a YAML file, whose names may be written as flags are."""
    if not Path(path).is_file():
        raise InvalidRequest(f"no settings at {path}: no such file")
    try:
        read = YamlConfigSettingsSource(Settings, path)()
    except Exception as error:  # whatever a file makes of the parser
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", "")
        reason = first_sentence(error) if mark is None else f"line {mark.line + 1}, {problem}"
        raise InvalidRequest(f"the settings in {path} are no YAML mapping: {reason}") from None
    settings = {str(name).replace("-", "_"): value for name, value in read.items()}
    for name in settings:
        _check_name(name, f"{name!r} in {path}", "{}", str)
    if "config" in settings:
        raise InvalidRequest(f"'config' in {path}: a file of settings cannot name another one")
    return settings


def _check_name(name: str, where: str, form: str, case: Any) -> None:
    if name not in Settings.model_fields:
        near = get_close_matches(name, Settings.model_fields, 1)
        hint = f": did you mean {form.format(case(near[0]))}?" if near else ""
        raise InvalidRequest(f"{where} is no setting of radixcache serve{hint}")


def _name(model: str) -> str:
    """What a model is called: of a GGUF file not where it lies on this machine."""
    return Path(model).stem if model.lower().endswith(".gguf") else model


def _key(flag: str, key: str | None, file: Path | None) -> str | None:
    if file is None:
        return key and key.strip()
    if key is not None:
        raise InvalidRequest(f"--{flag} and --{flag}-file are both given")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidRequest(f"cannot read {file}: {reason}") from None
