"""The scheduler's interface to what loads pages from the tiers below the pool. No torch."""

from __future__ import annotations

from collections.abc import Collection

from radixcache.lease import Lease
from radixcache.runtime.request import Sequence


class PageLoader:
    """The interface of a loader, which by itself loads nothing.

    Attributes:
        pending: whether anything is being read, even if its request has gone.
    """

    pending = False

    def begin_step(self) -> None:
        """A step is being scheduled."""

    def waits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence cannot be admitted before pages have been read."""
        return False

    def has_read(self, sequence: Sequence) -> bool:
        """Whether pages have been read for a waiting sequence, and are not in the pool yet."""
        return False

    def load(self, sequence: Sequence, lease: Lease) -> bool:
        """Lengthen the lease's hit by what was read, and begin to read what a tier has beyond it.

        True if there is more to read: release the lease, and come again in a later step.
        """
        return False

    def charge(self, budget: int) -> int:
        """The tokens of a step's `budget` that are left beside what loading has cost."""
        return budget

    def forget(self, sequence: Sequence) -> None:
        """A sequence was admitted, or has ended."""

    def recover(self) -> None:
        """A call was cut off."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step that prefilled `num_tokens` tokens has taken `seconds`."""

    def wait(self) -> None:
        """Wait a little for a read to end: nothing can be computed before."""

    def check(self, waiting: Collection[Sequence]) -> None:
        """Assert between two steps that each read is for one of the sequences that wait."""


NO_LOADS = PageLoader()
