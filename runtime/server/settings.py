"""Reads a server's settings: from flags, from the environment or from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from radixcache.errors import InvalidRequest, first_sentence
from radixcache.runtime.config.flags import Setting, settings_of
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.sampling.params import SamplingArgs
from radixcache.runtime.server.args import ServerArgs

_PREFIX = "RADIXCACHE_"
_OTHER_VARIABLES = {"config", "data", "march"}
"""Variables with that prefix for other things: the file, the benchmarks' data, the kernels."""


class _Base(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", protected_namespaces=())


def _field(one: Setting) -> Any:
    """A setting as a pydantic field, which is None if it is not given."""
    validators: list[Any] = []
    if one.parse is not None:
        parse = one.parse
        validators = [NoDecode, BeforeValidator(lambda v: None if v is None else parse(v))]
    if one.rule is not None:
        rule = one.rule
        validators.append(AfterValidator(lambda v: rule.check(v) or v))
    kind: Any = one.type | None
    for validator in validators:
        kind = Annotated[kind, validator]
    return kind, None


KINDS = (EngineArgs, SamplingArgs, ServerArgs)
SETTINGS = {one.name: one for kind in KINDS for one in settings_of(kind)}

_Settings: type[_Base] = create_model(
    "Settings", __base__=_Base, **{name: _field(one) for name, one in SETTINGS.items()}
)


def read_settings(flags: Mapping[str, Any]) -> tuple[EngineArgs, ServerArgs]:
    """Merge settings: flags override the environment, which overrides the file of `config`.

    Raises:
        InvalidRequest: a name or a value is wrong, in any of them, or there is no such file.
    """
    variables = {
        name[len(_PREFIX) :].lower(): name for name in os.environ if name.startswith(_PREFIX)
    }
    for name in variables.keys() - _OTHER_VARIABLES:
        _check_name(name, f"the variable {variables[name]}", f"{_PREFIX}{{}}", str.upper)
    flags = dict(flags)
    path = flags.pop("config", None) or os.environ.get(f"{_PREFIX}CONFIG")
    file = {} if path is None else _read_file(path)
    try:
        read = _Settings(**{**file, **EnvSettingsSource(_Settings)(), **flags})
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
    given = {name: value for name in SETTINGS if (value := getattr(read, name)) is not None}
    model = given.get("model")
    if model is not None:  # clients need not know where a GGUF file lies
        is_file = str(model).lower().endswith(".gguf") or Path(model).is_file()
        name = Path(model).stem if is_file else str(model)
        given.setdefault("served_model_name", [name])
    engine, sampling, server = (
        {one.name: given[one.name] for one in settings_of(kind) if one.name in given}
        for kind in KINDS
    )
    return EngineArgs(**engine), ServerArgs(**server, sampling=sampling)


def _read_file(path: str) -> dict[str, Any]:
    """The settings in a YAML file; a name may have dashes, as a flag has."""
    if not Path(path).is_file():
        raise InvalidRequest(f"no settings at {path}: no such file")
    try:
        read = YamlConfigSettingsSource(_Settings, path)()
    except Exception as error:  # the parser may raise anything
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", "")
        reason = first_sentence(error) if mark is None else f"line {mark.line + 1}, {problem}"
        raise InvalidRequest(f"the settings in {path} are no YAML mapping: {reason}") from None
    settings = {str(name).replace("-", "_"): value for name, value in read.items()}
    if "config" in settings:
        raise InvalidRequest(f"'config' in {path}: a file of settings cannot name another one")
    for name in settings:
        _check_name(name, f"{name!r} in {path}", "{}", str)
    return settings


def _check_name(name: str, where: str, form: str, case: Any) -> None:
    if name not in SETTINGS:
        near = get_close_matches(name, SETTINGS, 1)
        hint = f": did you mean {form.format(case(near[0]))}?" if near else ""
        raise InvalidRequest(f"{where} is no setting of radixcache serve{hint}")
