"""The base of stores of KV pages below a pool, which count pages and time their reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import ClassVar, NamedTuple, Protocol

import torch

from radixcache.pages import Pages
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.tiers.stored_pages import Medium, StoredPage, StoredPages


class Rate:
    """Measures an amount per second; the latest figures count most."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Note that `amount` took `seconds`."""
        self._amount, self._seconds = 0.8 * self._amount + amount, 0.8 * self._seconds + seconds

    def seconds(self, amount: float) -> float | None:
        """How long an amount takes; None before the first note."""
        return amount * self._seconds / self._amount if self._amount else None


class PrefillTime:
    """How long prefills take, by length: on a GPU a token of a short one may take many times as
    long as one of a long one, since both read all weights once."""

    def __init__(self) -> None:
        self._rates: dict[int, Rate] = {}
        """Rates by the bit length of the number of tokens."""
        self._is_warm = False

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note a step that computed so many prompt tokens. The first one does not count, as
        libraries load their kernels in it."""
        if self._is_warm:
            self._rates.setdefault(num_tokens.bit_length(), Rate()).note(num_tokens, seconds)
        self._is_warm = True

    def seconds(self, num_tokens: int) -> float | None:
        """How long `num_tokens` take at the best rate of all lengths; None before any note."""
        if not self._rates:
            return None
        return min(rate.seconds(num_tokens) or 0.0 for rate in [*self._rates.values()])

    def knows(self, num_tokens: int) -> bool:
        """Whether a step of about `num_tokens` tokens or more was noted."""
        return max(self._rates, default=0) >= num_tokens.bit_length() - 1


class Counters(NamedTuple):
    """Counts of pages since a store was opened."""

    stored_pages: int = 0
    loaded_pages: int = 0
    dropped_pages: int = 0
    """Dropped because the store was too slow."""
    failed_pages: int = 0
    """Not written, or found changed when they were read."""


class PageSource(Protocol):
    """Has the bytes of pages: a pool, or a store above."""

    def read_pages(self, pages: Pages) -> torch.Tensor:
        """A copy of n pages: [n, page_bytes] uint8 on the host."""


class Store(ABC):
    """The slots of a tier: a `PageStore` that can also be read.

    Attributes:
        most_bytes: the most that is read for a request at a time, and copied in one step.
        most_loading: the most requests whose pages are read at the same time.
        in_stream: whether steps wait for reads; else threads read.
        copying: the rate at which its rows are copied into the pool.
        saving: seconds that the engine's thread has spent on `save`.
        place: where the store is, in words.
    """

    medium: ClassVar[Medium]
    most_bytes: int
    most_loading: ClassVar[int]
    in_stream: ClassVar[bool]
    place: str

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        self._pool, self.num_slots, self.page_bytes = pool, num_slots, pool.page_bytes
        self.counters, self.saving = Counters(), 0.0
        self.reading, self.copying = Rate(), Rate()
        self._lock = Lock()

    def stored(self) -> list[StoredPage]:
        """The pages that it holds from before, least recently used first."""
        return []

    @abstractmethod
    def save(self, pages: Pages, stored: StoredPages) -> None:
        """See `PageStore`."""

    @abstractmethod
    def read(self, pages: Sequence[StoredPage]) -> Future[torch.Tensor]:
        """[n, page_bytes] uint8: the bytes of the first n pages, up to one that was spoilt."""

    @abstractmethod
    def clear(self) -> None:
        """See `PageStore`."""

    @abstractmethod
    def close(self, in_order: Iterable[StoredPage]) -> None:
        """Close the store; `in_order` are its pages, the next to be evicted first."""

    def read_seconds(self, size: int) -> float | None:
        """How long it takes to read so many bytes, as measured; None before the first read."""
        return self.reading.seconds(size)

    def load_seconds(self, size: int) -> float | None:
        """How long it takes to read so many bytes and to copy them into the pool, as measured."""
        read, copy = self.read_seconds(size), self.copying.seconds(size)
        return None if read is None or copy is None else read + copy

    def _count(self, **more: int) -> None:
        with self._lock:
            now = self.counters._asdict()
            self.counters = Counters(**{n: count + more.get(n, 0) for n, count in now.items()})
