"""How far a model is loaded: said where it is loaded, heard by whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

Watcher = Callable[[str, float | None], object]
"""Called with what is done now, and the share of the load that is behind; None if unknown."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` hear of what is loaded within this block, beside those who hear it already."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def report(stage: str, share: float | None = None) -> None:
    """Say what is done now."""
    for watcher in _watchers.get():
        watcher(stage, share)


def track(items: Sequence[T], stage: str) -> Iterator[T]:
    """The items, and before each how many are behind; what follows the last counts as one more."""
    for done, item in enumerate(items):
        report(stage, done / (len(items) + 1))
        yield item
    report(stage, len(items) / (len(items) + 1))
