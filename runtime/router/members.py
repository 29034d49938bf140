"""The running replicas, as Serve tells its own router; a module apart, since Serve copies that."""

from __future__ import annotations

from collections.abc import Callable


class Members:
    """The names of the running replicas, and a listener in this process."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._listener: Callable[[], object] | None = None

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Call `listener` now and whenever `names` has changed, on Serve's thread."""
        self._listener = listener
        if listener is not None:
            listener()

    def change(self, names: frozenset[str]) -> None:
        """Serve's router calls this when replicas come or go."""
        self.names = names
        if self._listener is not None:
            self._listener()


MEMBERS = Members()
"""Serve makes its routers by itself, one for each process, so they are reached through this."""
