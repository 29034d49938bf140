"""Named prefixes that stay cached until they are unpinned, and the pages that they may hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import numpy as np

from radixcache.errors import PinError
from radixcache.lease import Lease
from radixcache.pages import Pages

Key = tuple[Hashable, str]
"""A namespace, and a name in it."""


class Pins(Mapping[Key, int]):
    """Pinned tokens by namespace and name; for the cache, the leases that hold their pages.

    Attributes:
        budget: pages that all pins together may hold; those of one namespace may hold `share`.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.leases: dict[Key, Lease] = {}

    def __getitem__(self, key: Key) -> int:
        return self.leases[key].num_tokens

    def __iter__(self) -> Iterator[Key]:
        return iter(self.leases)

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def share(self) -> int:
        """Pages that the pins of one namespace may hold: half of the budget, rounded up."""
        return -(-self.budget // 2)

    @property
    def num_pages(self) -> int:
        """Distinct pages that all pins hold. O(pages of all pins)."""
        return _count_pages(self._tables())

    def num_pages_of(self, namespace: Hashable) -> int:
        """Distinct pages that the pins of one namespace hold. O(pages of all its pins)."""
        return _count_pages(self._tables(namespace))

    def num_pages_beside(self, lease: Lease) -> int:
        """Pinned pages that are not among those that `lease` has found, or in which a pin ends, so
        that the lease may have to copy them. O(pages of the lease and of all pins)."""
        size = lease.page_size
        whole = [pin.page_table[: pin.num_tokens // size] for pin in self.leases.values()]
        own = lease.page_table[: lease.cached_tokens // size]
        shared = np.intersect1d(own, np.concatenate(whole))
        return len(np.setdiff1d(np.concatenate(self._tables()), shared))

    def check(self, name: str, namespace: Hashable, pages: Pages) -> None:
        """`PinError` unless `pages` may be pinned, too; it tells nothing of other namespaces."""
        if (namespace, name) in self:
            raise PinError(f"a prefix named {name!r} is pinned already")
        num_own = _count_pages([*self._tables(namespace), pages])
        if num_own > self.share:
            raise PinError(
                f"pinning {name!r} makes {num_own} pinned pages, the share is {self.share}"
            )
        if _count_pages([*self._tables(), pages]) > self.budget:
            raise PinError(f"pinning {name!r} takes more pages than all pins together have left")

    def _tables(self, *namespaces: Hashable) -> list[Pages]:
        """The page tables of all pins, or of those in `namespaces`."""
        return [
            lease.page_table
            for (namespace, _), lease in self.leases.items()
            if not namespaces or namespace in namespaces
        ]


def _count_pages(tables: list[Pages]) -> int:
    return len(np.unique(np.concatenate(tables))) if tables else 0
