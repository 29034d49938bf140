"""Clients take turns.

The client with the fewest running sequences is admitted next; among equals, the one for which the
fewest tokens were computed, as in the Virtual Token Counter of Sheng et al. ("Fairness in Serving
Large Language Models", OSDI 2024): a new client begins with the least count of those present. No
client waits for what another holds beyond its share: while one waits that has at least two running
sequences fewer, the client with the most has its newest sequence preempted, one in each step. That
is cheap here, since what was computed stays cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from collections.abc import Sequence as List

from radixcache.runtime.request import Sequence


class FairShares:
    """Counts the tokens computed for each client that is present; decoded ones count when their
    sequence leaves."""

    def __init__(self) -> None:
        self._served: Counter[Hashable] = Counter()
        self._gone: dict[Hashable, int] = {}
        """`_served` of clients that left with more than the least, kept in case they come back."""

    def come(self, client: Hashable) -> None:
        """A client adds a sequence; it may have others."""
        if client in self._served:
            return
        if not self._served:
            self._gone.clear()
        least = min(self._served.values(), default=0)
        self._gone = {c: n for c, n in self._gone.items() if n > least}
        self._served[client] = max(self._gone.pop(client, 0), least)

    def leave(self, client: Hashable) -> None:
        """A client has no sequence any more."""
        self._gone[client] = self._served.pop(client, 0)

    def keep(self, clients: Iterable[Hashable]) -> None:
        """Forget all other clients."""
        self._served = Counter({client: self._served[client] for client in clients})

    def note(self, client: Hashable, num_tokens: int) -> None:
        """`num_tokens` were computed for a client."""
        self._served[client] += num_tokens

    def in_turn(
        self,
        waiting: Iterable[Sequence],
        running: Collection[Sequence],
        order: Callable[[list[Sequence]], list[Sequence]],
    ) -> Iterator[Sequence]:
        """The waiting sequences in the order in which they should be admitted.

        Args:
            running: may grow between two sequences.
            order: sorts the sequences of one client.
        """
        queues: dict[Hashable, list[Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.request.client, []).append(sequence)
        in_order: dict[Hashable, Iterator[Sequence]] = {}
        while queues:
            slots = Counter(sequence.request.client for sequence in running)
            client = min(queues, key=lambda client: (slots[client], self._served[client]))
            if client not in in_order:
                in_order[client] = iter(order(queues[client]))
            try:
                yield next(in_order[client])
            except StopIteration:
                del queues[client]

    def victim(self, running: List[Sequence], waiting: Collection[Sequence]) -> Sequence | None:
        """The running sequence to preempt for another client; None if each has its share.

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
