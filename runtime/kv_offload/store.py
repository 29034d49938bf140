"""What the stores of KV pages below a pool have in common: they count, and time their reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import ClassVar, NamedTuple, Protocol

import torch

from radixcache.pages import Pages
from radixcache.runtime.model.kv_pool import KVPool
from radixcache.stored import Medium, StoredPage, StoredPages


class Rate:
    """Amounts a second, the latest counting most."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """So much took so long."""
        self._amount, self._seconds = 0.8 * self._amount + amount, 0.8 * self._seconds + seconds

    def seconds(self, amount: float) -> float | None:
        """How long an amount takes; None before anything was noted."""
        return amount * self._seconds / self._amount if self._amount else None


class PrefillTime:
    """How long prefills take. A token of a short one may take many times as long as one of a long
    one: on a GPU, where both read all weights once."""

    def __init__(self) -> None:
        self._rates: dict[int, Rate] = {}
        """By the number of bits of the number of tokens."""
        self._is_warm = False

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens of prompts. The first one is not counted: libraries
        load their kernels in it."""
        if self._is_warm:
            self._rates.setdefault(num_tokens.bit_length(), Rate()).note(num_tokens, seconds)
        self._is_warm = True

    def seconds(self, num_tokens: int) -> float | None:
        """How long so many take, by what a token took in the best of lengths; None before anything
        was noted."""
        if not self._rates:
            return None
        return min(rate.seconds(num_tokens) or 0.0 for rate in [*self._rates.values()])

    def knows(self, num_tokens: int) -> bool:
        """Whether a step of about so many tokens, or of more, was noted."""
        return max(self._rates, default=0) >= num_tokens.bit_length() - 1


class Counters(NamedTuple):
    """What a store has done."""

    stored_pages: int = 0
    loaded_pages: int = 0
    dropped_pages: int = 0
    """Not kept, because the store was too slow."""
    failed_pages: int = 0
    """Not written, or not as they were when they were read."""


class PageSource(Protocol):
    """What has the bytes of pages."""

    def read_pages(self, pages: Pages) -> torch.Tensor:
        """[n, page_bytes] uint8 on the host: a copy of n pages."""


class Store(ABC):
    """The slots of a tier; a `PageStore` that is read, too.

    Attributes:
        most_bytes: that are read for a request at a time, and copied into the pool in one step.
        most_loading: requests whose pages are read at the same time.
        in_stream: steps wait for what is read; else threads read.
        copying: rate at which its rows are copied into the pool.
        saving: seconds that the engine's thread has spent on `save`.
        place: where it is, for people.
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
        """What is there from before, least recently used first."""
        return []

    @abstractmethod
    def save(self, pages: Pages, stored: StoredPages) -> None:
        """See `PageStore`."""

    @abstractmethod
    def read(self, pages: Sequence[StoredPage]) -> Future[torch.Tensor]:
        """[n, page_bytes] uint8: the bytes of the first n pages that are what they were."""

    @abstractmethod
    def clear(self) -> None:
        """See `PageStore`."""

    @abstractmethod
    def close(self, in_order: Iterable[StoredPage]) -> None:
        """End it; `in_order` are the pages, the next to be evicted first."""

    def read_seconds(self, size: int) -> float | None:
        """How long it takes to read so many bytes, as measured; None before anything was."""
        return self.reading.seconds(size)

    def load_seconds(self, size: int) -> float | None:
        """How long it takes to read so many bytes and to copy them into the pool, as measured."""
        read, copy = self.read_seconds(size), self.copying.seconds(size)
        return None if read is None or copy is None else read + copy

    def _count(self, **more: int) -> None:
        with self._lock:
            now = self.counters._asdict()
            self.counters = Counters(**{n: count + more.get(n, 0) for n, count in now.items()})
