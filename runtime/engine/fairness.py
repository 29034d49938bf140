"""Clients take turns.

Who has the fewest sequences running is admitted next; among equals, who had the fewest tokens
computed, as in the Virtual Token Counter of Sheng et al. ("Fairness in Serving Large Language
Models", OSDI 2024): who comes begins with the least count of those who are there. Nobody waits for
what another client holds beyond its share: while one waits that has at least two fewer, the client
with the most puts its newest sequence back, one in each step. That is cheap here, for what was
computed stays cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as List

from radixcache.runtime.request import Sequence


class FairShares:
    """Tokens computed for each client that is there; decoded ones count when they leave."""

    def __init__(self) -> None:
        self._served: Counter[Hashable] = Counter()
        self._gone: Counter[Hashable] = Counter()
        """The same for clients that had more than the least, should they come again."""

    def come(self, client: Hashable) -> None:
        """A client has a sequence; it may have others."""
        if client in self._served:
            return
        if not self._served:
            self._gone.clear()
        least = min(self._served.values(), default=0)
        self._gone = Counter({c: n for c, n in self._gone.items() if n > least})
        self._served[client] = max(self._gone.pop(client, 0), least)

    def leave(self, client: Hashable) -> None:
        """A client has no sequence any more."""
        self._gone[client] = self._served.pop(client, 0)

    def keep(self, clients: Iterable[Hashable]) -> None:
        """These are there, and no others."""
        self._served = Counter({client: self._served[client] for client in clients})

    def note(self, client: Hashable, num_tokens: int) -> None:
        """So many tokens were computed for a client."""
        self._served[client] += num_tokens

    def next(self, clients: Iterable[Hashable], running: Iterable[Sequence]) -> Hashable:
        """Which of these clients is admitted next."""
        slots = Counter(sequence.request.client for sequence in running)
        return min(clients, key=lambda client: (slots[client], self._served[client]))

    def victim(self, running: List[Sequence], waiting: Collection[Sequence]) -> Sequence | None:
        """The running sequence whose place another client should have; None if all have a share.

        O(waiting + running) if there are several clients.
        """
        if len(self._served) < 2 or not waiting:
            return None
        slots = Counter(sequence.request.client for sequence in running)
        fewest = min(slots[sequence.request.client] for sequence in waiting)
        client, most = max(slots.items(), key=lambda item: item[1])
        if most < fewest + 2:
            return None
        return next(s for s in reversed(running) if s.request.client == client)
