"""Tries one way after another until one runs on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def first_that_runs(*makers: Callable[[], T]) -> tuple[T | None, list[Exception]]:
    """The result of the first maker that does not fail, or None; and the errors before it.

    A missing kernel, compiler or driver may raise anything.
    """
    errors: list[Exception] = []
    for make in makers:
        try:
            return make(), errors
        except Exception as error:
            errors.append(error)
    return None, errors
