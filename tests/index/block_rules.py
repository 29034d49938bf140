"""The rules of the hash-block mode in plain lists: slow, and without a hash.

vLLM's rules, and those for what vLLM does not have: leases that only look, failed steps, tokens
published late, pins. A block is named by its namespace and all the tokens up to its end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Name = tuple[Hashable, tuple[int, ...]]
Told = tuple[str, Hashable, tuple[int, ...], int]
"""An event: its kind, the namespace, the whole prefix, and where the news in it begins."""


@dataclass(eq=False)
class Hold:
    """A lease, or a pin."""

    namespace: Hashable
    query: int
    resumed: bool
    tokens: list[int]
    table: list[int]
    cached: int
    back: int | None = None
    """Where a rollback takes it; None if nothing of it is in flight."""
    publishing: bool = False
    uses: bool = False
    """Its pages have left the line."""
    published: bool = False


@dataclass
class Rules:
    """What a cache of `num_pages` pages holds, and the line in which pages wait to be used."""

    num_pages: int
    size: int
    budget: int
    line: list[int] = field(init=False)
    content: dict[int, Name] = field(default_factory=dict)
    """The block that each page is cached for, in order of publication."""
    holds: list[Hold] = field(default_factory=list)
    pins: dict[tuple[Hashable, str], Hold] = field(default_factory=dict)
    flight: list[Hold] = field(default_factory=list)
    """Those that stand on tokens in flight, in the order in which they came to do so."""
    fresh: list[int] = field(default_factory=list)
    """Pages whose block is in flight, in order of publication."""
    evicted: int = 0
    asked: list[int] = field(default_factory=lambda: [0] * 5)
    """Requests, queried and hit tokens; the latter two again, of resumed requests."""
    told: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = list(range(1, self.num_pages))  # page 0 is never used

    @property
    def held(self) -> list[int]:
        """Pages of all leases and pins, a page once for each."""
        return [page for hold in self.holds for page in hold.table]

    @property
    def free(self) -> list[int]:
        """What `reserve` may take, the next one first."""
        held = set(self.held)
        return [page for page in self.line if page not in held]

    def pinned(self, *namespaces: Hashable) -> set[int]:
        return {
            page
            for (namespace, _), pin in self.pins.items()
            for page in pin.table
            if not namespaces or namespace in namespaces
        }

    def find(self, tokens: Sequence[int], namespace: Hashable, most: int) -> list[int]:
        """Pages of the longest cached prefix of at most `most` tokens, each published first."""
        pages: list[int] = []
        for end in range(self.size, most + 1, self.size):
            name = (namespace, tuple(tokens[:end]))
            same = [page for page, cached in self.content.items() if cached == name]
            if not same:
                break
            pages.append(same[0])
        return pages

    def acquire(self, tokens: list[int], namespace: Hashable, resumed: bool) -> Hold:
        pages = self.find(tokens, namespace, len(tokens) - 1)
        hit = len(pages) * self.size
        hold = Hold(namespace, len(tokens), resumed, tokens[:hit], pages, hit)
        for at, page in enumerate(pages):
            if page in self.fresh:
                hold.back = at * self.size
                self.flight.append(hold)
                break
        self.holds.append(hold)
        return hold

    def reserve(self, hold: Hold, num_tokens: int) -> bool:
        """False if too few pages are free."""
        wanted = -(-num_tokens // self.size) - len(hold.table)
        if wanted <= 0:
            return True
        free = self.free
        if wanted > len(free):
            return False
        self._use(hold)
        for page in free[:wanted]:
            self.line.remove(page)
            if page in self.content:
                self._evict(page)
            hold.table.append(page)
        return True

    def publish(self, hold: Hold, tokens: list[int], written: bool) -> None:
        if written and hold.back is not None:
            return  # they follow what is not written
        if not written:
            if hold.back is None:
                hold.back = len(hold.tokens)
                self.flight.append(hold)
            hold.publishing = True
        if not hold.published:
            for at, count in enumerate(
                (0, 0, 0, hold.query, hold.cached) if hold.resumed else (1, hold.query, hold.cached)
            ):
                self.asked[at] += count
        hold.published = True
        before = len(hold.tokens) // self.size
        hold.tokens.extend(tokens)
        after = len(hold.tokens) // self.size
        if before == after:
            return
        for page, block in zip(hold.table[before:after], range(before, after), strict=True):
            end = (block + 1) * self.size
            self.content[page] = (hold.namespace, tuple(hold.tokens[:end]))
            if not written:
                self.fresh.append(page)
        whole = tuple(hold.tokens[: after * self.size])
        self.told.append(("stored", hold.namespace, whole, before * self.size))

    def commit(self) -> None:
        for hold in self.flight:
            hold.back, hold.publishing = None, False
        self.flight.clear()
        self.fresh.clear()

    def rollback(self) -> None:
        for page in reversed(self.fresh):
            self._forget(page)
        for hold in reversed(self.flight):
            assert hold.back is not None
            del hold.tokens[hold.back :]
            hold.cached = min(hold.cached, hold.back)
            self._cut(hold, -(-hold.back // self.size))
        self.commit()

    def release(self, hold: Hold) -> None:
        if hold in self.flight:
            self.flight.remove(hold)
        self._cut(hold, 0)
        self.holds.remove(hold)

    def evict(self, count: int) -> int:
        cached = [page for page in self.free if page in self.content][:count]
        for page in cached:
            self._evict(page)
        return len(cached)

    def pin(self, name: str, tokens: list[int], namespace: Hashable) -> bool:
        """False if it is refused."""
        pages = self.find(tokens, namespace, len(tokens))
        whole = len(tokens) // self.size
        share = (self.budget + 1) // 2
        if (
            not whole
            or len(pages) < whole
            or set(pages) & set(self.fresh)
            or (namespace, name) in self.pins
            or len(self.pinned(namespace) | set(pages)) > share
            or len(self.pinned() | set(pages)) > self.budget
        ):
            return False
        end = whole * self.size
        pin = Hold(namespace, len(tokens), False, tokens[:end], pages, end)
        self._use(pin)
        self.holds.append(pin)
        self.pins[namespace, name] = pin
        return True

    def unpin(self, name: str, namespace: Hashable) -> None:
        self.release(self.pins.pop((namespace, name)))

    def reset(self) -> bool:
        """False if it is refused."""
        if self.holds:
            return False
        self.content.clear()
        self.evicted, self.asked = 0, [0] * 5
        self.told.append(("cleared", None, (), 0))
        return True

    def _use(self, hold: Hold) -> None:
        hold.uses = True
        self.line = [page for page in self.line if page not in hold.table]

    def _cut(self, hold: Hold, keep: int) -> None:
        """The table ends after `keep` pages; the last page that nobody uses joins the line first:
        one without a block at the head, one with a block at the tail."""
        gone = hold.table[keep:][::-1]
        del hold.table[keep:]
        if not hold.uses:
            return
        used = {page for other in self.holds if other.uses for page in other.table}
        idle = [page for page in gone if page not in used]
        self.line = [
            *(page for page in idle if page not in self.content),
            *self.line,
            *(page for page in idle if page in self.content),
        ]

    def _evict(self, page: int) -> None:
        self.evicted += 1
        self._forget(page)

    def _forget(self, page: int) -> None:
        namespace, tokens = self.content.pop(page)
        self.told.append(("evicted", namespace, tokens, len(tokens) - self.size))
