"""Tries what may not run on this machine, and goes on with the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def first_that_runs(*makers: Callable[[], T]) -> tuple[T | None, list[Exception]]:
    """What the first maker returns that does not fail; None if all do, and what they raised.

    A missing kernel, compiler or driver raises anything at all.
    """
    errors: list[Exception] = []
    for make in makers:
        try:
            return make(), errors
        except Exception as error:
            errors.append(error)
    return None, errors
