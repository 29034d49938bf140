"""A report as JSON, which can be read again."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from radixcache.bench.report.headline import headline
from radixcache.bench.report.results import Report, verdicts
from radixcache.errors import InvalidRequest

FORMAT = 1
"""Of the JSON; another number whenever what was written before could not be read any more."""


def to_json(report: Report) -> str:
    """Everything but the hits of single requests."""
    workloads = [
        {
            **{k: v for k, v in vars(workload).items() if k not in ("shared", "rows", "routing")},
            "differing": workload.disagreements,
            "disagreements": workload.disagreements,
            "headline": headline(workload),
            "verdicts": verdicts(workload),
            "shared": [asdict(segment) for segment in workload.shared],
            "rows": [row.to_json() for row in workload.rows],
            "routing": [{**row.to_json(), "ttfts": row.ttfts} for row in workload.routing],
        }
        for workload in report.workloads
    ]
    found = {"format": FORMAT, "settings": report.settings, "workloads": workloads}
    return json.dumps(found, indent=2)


def read_json(path: Path) -> Report:
    """The report in a file that `to_json` gave.

    Raises:
        InvalidRequest: it cannot be read, is no report, or one of another format.
    """
    try:
        found = json.loads(path.read_bytes(), parse_constant=_refuse)
        written = found["format"]
        if written == FORMAT:
            return _as(Report, found)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidRequest(f"{path} is no report of radixcache bench --json") from None
    raise InvalidRequest(f"{path} is a report of format {written!r}, and this reads {FORMAT}")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of a report")


def _as(kind: Any, value: Any) -> Any:
    """A value out of JSON as the annotation `kind` says. Raises TypeError, ValueError."""
    origin, args = get_origin(kind), get_args(kind)
    make: Any = kind
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        known = [f.name for f in fields(kind) if f.name in value]
        return make(**{name: _as(hints[name], value[name]) for name in known})
    if origin is list:
        return [_as(args[0], one) for one in _as(list, value)]
    if origin is tuple:
        return tuple(_as(each, one) for each, one in zip(args, value, strict=True))
    if origin is dict:
        return {args[0](key): _as(args[1], one) for key, one in _as(dict, value).items()}
    if NoneType in args:
        return None if value is None else _as(args[0], value)
    accepted: Any = {float: (int, float), Any: object}.get(kind, kind)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not Any):
        raise TypeError(f"{value!r} is no {kind}")
    return value
