"""Tries one way after another until one runs right on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from radixcache.errors import first_line

_log = logging.getLogger("radixcache")

T = TypeVar("T")


class Outcome(NamedTuple):
    """What runs, and why what was tried before does not."""

    taken: str
    reasons: list[str]


outcomes: dict[str, Outcome] = {}
"""Of this process, by task."""


@dataclass(frozen=True)
class Trial(Generic[T]):
    """A way to compute something, if it runs.

    Attributes:
        name: of the library, for users.
        make: loads or compiles it.
        probe: runs it, and raises if its results are wrong.
        explain: one sentence about what either has raised.
    """

    name: str
    make: Callable[[], T]
    probe: Callable[[T], Any] = lambda made: None
    explain: Callable[[Exception], str] | None = None


def first_right(
    task: str,
    *trials: Trial[T],
    otherwise: str,
    level: int = logging.WARNING,
    if_missing: int | None = None,
) -> T | None:
    """What the first trial makes that runs right, or None; the reasons are logged, and kept in
    `outcomes`. A missing kernel, compiler or driver may raise anything.

    Args:
        task: what is computed, as in "norms run".
        otherwise: what the caller takes if none is right.
        level: of the log, if one did not run; `if_missing` if it is not installed, where that
            differs.
    """
    found, taken, reasons = None, otherwise, list[str]()
    for trial in trials:
        try:
            made = trial.make()
            trial.probe(made)
        except Exception as error:
            if isinstance(error, ImportError) and if_missing is not None:
                level = if_missing
            reasons.append(
                f"{trial.name}: {first_line(error)}"
                if trial.explain is None
                else trial.explain(error)
            )
        else:
            found, taken = made, trial.name
            break
    outcomes[task] = Outcome(taken, reasons)
    if reasons:
        _log.log(level, "%s in %s: %s", task, taken, ". ".join(reasons))
    return found
