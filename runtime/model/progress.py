"""Reports the progress of loading a model to those that show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

Watcher = Callable[[str, float | None], object]
"""Called with the current stage, and the share of it that is done; None if unknown."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Call `watcher`, besides earlier ones, for what is loaded within this block."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def report(stage: str, share: float | None = None) -> None:
    """Report the current stage."""
    for watcher in _watchers.get():
        watcher(stage, share)


def track(items: Sequence[T], stage: str) -> Iterator[T]:
    """Yield the items, and report progress; the work after the last counts as one more."""
    for done, item in enumerate(items):
        report(stage, done / (len(items) + 1))
        yield item
    report(stage, len(items) / (len(items) + 1))
