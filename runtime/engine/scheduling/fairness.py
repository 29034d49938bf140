"""Clients take turns.

The client with the fewest running sequences is admitted next; among equals, one that `MAX_WAIT`
sequences were admitted before, the longest waiting first: while nothing of a client runs, it waits
for so many, and at most one of each client that was there. Then the one for which the fewest tokens
were computed, as in the Virtual Token Counter of Sheng et al. ("Fairness in Serving Large Language
Models", OSDI 2024), where a new client begins with an equal share, as in weighted fair queueing. No
client waits for what another holds beyond its share: while one waits that has at least two running
sequences fewer, the client with the most has its newest sequence preempted, one in each step. That
is cheap here, since what was computed stays cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from collections.abc import Sequence as List

from radixcache.runtime.request import Sequence

MAX_WAIT = 64
"""Admissions of others after which a waiting client goes first."""


class FairShares:
    """Counts the tokens computed for each client that is present; decoded ones count when their
    sequence leaves."""

    def __init__(self) -> None:
        self._open: Counter[Hashable] = Counter()
        """The sequences of each client that is present."""
        self._share = 0.0
        """The tokens of a client that was always present, and got as much as each other."""
        self._served: dict[Hashable, float] = {}
        self._gone: dict[Hashable, float] = {}
        """`_served` of those that left with more than their share: about as many as are present."""
        self._num_admitted = 0
        self._since: dict[Hashable, int] = {}
        """`_num_admitted` when a client came, or was last admitted."""

    def come(self, client: Hashable) -> None:
        """A client adds a sequence; it may have others."""
        if not self._open:
            self._gone.clear()
        self._open[client] += 1
        if client not in self._served:
            self._gone = {c: n for c, n in self._gone.items() if n > self._share}
            self._served[client] = self._gone.pop(client, self._share)
            self._since[client] = self._num_admitted

    def admit(self, client: Hashable) -> None:
        """A sequence of a client begins to run."""
        self._num_admitted += 1
        self._since[client] = self._num_admitted

    def leave(self, client: Hashable) -> None:
        """A sequence of a client has ended."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client], self._since[client]
            self._gone[client] = self._served.pop(client)

    def keep(self, clients: Iterable[Hashable]) -> None:
        """Forget all sequences but those of these clients, one each."""
        self._open = Counter(clients)
        for known in (self._served, self._since):
            for client in known.keys() - self._open.keys():
                del known[client]

    def note(self, client: Hashable, num_tokens: int) -> None:
        """`num_tokens` were computed for a client."""
        self._served[client] += num_tokens
        self._share += num_tokens / len(self._served)

    def has_waited(self, client: Hashable) -> bool:
        """Whether a waiting client goes before others, whatever was computed for it."""
        return self._since[client] <= self._num_admitted - MAX_WAIT

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
            limit = self._num_admitted - MAX_WAIT
            client = min(
                queues, key=lambda c: (slots[c], min(self._since[c], limit), self._served[c])
            )
            if client not in in_order:
                in_order[client] = iter(order(queues[client]))
            try:
                yield next(in_order[client])
            except StopIteration:
                del queues[client]

    def victim(self, running: List[Sequence], waiting: Iterable[Sequence]) -> Sequence | None:
        """The running sequence to preempt for another client; None if each has its share.

        O(waiting + running) if there are several clients.
        """
        if len(self._served) < 2:
            return None
        slots = Counter(sequence.request.client for sequence in running)
        fewest = min((slots[sequence.request.client] for sequence in waiting), default=len(running))
        client, most = max(slots.items(), key=lambda item: item[1])
        if most < fewest + 2:
            return None
        return next(s for s in reversed(running) if s.request.client == client)
