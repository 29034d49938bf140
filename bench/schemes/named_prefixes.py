"""Prefixes that people name: registered templates, and vLLM 0.3's prefix object."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixcache.lease import Lease
from radixcache.no_cache import NoCache
from radixcache.pages import PagePool, Pages
from radixcache.tokens import Tokens, TokensLike, as_tokens


@dataclass(eq=False)
class Prefix:
    """A named prefix: how many tokens, where they are, and whether their KV is there."""

    num_tokens: int
    pages: Pages | None = None
    computed: bool = False


class PrefixLease(Lease):
    """A lease that may begin with the pages of a named prefix."""

    __slots__ = ("prefix",)
    prefix: Prefix | None


class PrefixObjectCache(NoCache):
    """vLLM 0.3.0's prefix object: `prefix_pos`, a position that the user gives with a prompt.

    Rules (`Prefix` and `PrefixPool` of 0.3.0, and where engine, block manager and model runner use
    them):

    - The prefix is the prompt up to `prefix_pos`, cut to whole blocks; of less than a block there
      is none. A request has one, and finds all of it or nothing.
    - The first request that names it takes its blocks and computes it; it is found from the next
      step on. A request that names it before that shares the blocks, but computes them, too.
    - Nothing else is found: not what follows the position, not what was generated, and not the
      beginning of a prefix that goes on otherwise, which has blocks of its own.
    - It is never freed: prefixes keep their memory even if requests wait for some.

    The user names what the workload declares as the stem of a prompt (`Arrival.stem_tokens`), less
    the prompt's last token, which must be computed; and as prefixes never go, no more of them than
    fit half of the memory, in order of first use. There is neither `reset` nor `cached_length`: a
    replay needs none.
    """

    caches = True

    def __init__(self, pool: PagePool, names: Iterable[Tokens]) -> None:
        size = pool.page_size
        cut = (tokens[: len(tokens) // size * size] for tokens in names)
        self._names = dict.fromkeys(tokens.tobytes() for tokens in cut if len(tokens))
        self._lengths = sorted({len(name) // 4 for name in self._names}, reverse=True)
        super().__init__(pool)
        self.granularity = size

    def _forget_all(self) -> None:
        super()._forget_all()
        self.pin_budget = self.pool.num_pages // 2
        self._prefixes: dict[tuple[Hashable, bytes], Prefix] = {}

    def _find(self, tokens: Tokens, namespace: Hashable, most: int) -> tuple[Hashable, bytes]:
        """The longest name of at most `most` tokens with which `tokens` begin, or an empty one."""
        heads = (tokens[:length].tobytes() for length in self._lengths if length <= most)
        return namespace, next((head for head in heads if head in self._names), b"")

    def match(self, tokens: TokensLike, namespace: Hashable = None) -> int:
        prefix = self._prefixes.get(self._find(as_tokens(tokens), namespace, len(tokens) - 1))
        return prefix.num_tokens if prefix is not None and prefix.computed else 0

    def _acquire(
        self, tokens: Tokens, namespace: Hashable, resumed: bool, include_last: bool
    ) -> PrefixLease:
        lease = PrefixLease(self.page_size, len(tokens), namespace, resumed)
        lease.prefix = self._name(self._find(tokens, namespace, len(tokens) - 1))
        self._share(lease)
        if lease.prefix is not None and lease.prefix.computed:
            lease.cached_tokens = lease.num_tokens = lease.prefix.num_tokens
        return lease

    def _name(self, key: tuple[Hashable, bytes]) -> Prefix | None:
        """The prefix of that name; None if there is no name, or no room for it."""
        held = sum(prefix.num_tokens for prefix in self._prefixes.values()) + len(key[1]) // 4
        if key[1] and key not in self._prefixes and held <= self.pin_budget * self.page_size:
            self._prefixes[key] = Prefix(len(key[1]) // 4)
        return self._prefixes.get(key)

    def _share(self, lease: PrefixLease) -> None:
        """Begin the empty table of a lease with the blocks of its prefix, if it has any yet."""
        if lease.prefix is not None and lease.prefix.pages is not None:
            lease._set_pages(0, lease.prefix.pages)
            self.pool.refs[lease.prefix.pages] += 1
            lease.capacity = lease.prefix.num_tokens

    def reserve(self, lease: Any, num_tokens: int) -> None:
        self._mine(lease)
        if not lease._num_pages:
            self._share(lease)  # others may have taken its blocks since `acquire`
        first = lease.prefix if not lease._num_pages else None
        super().reserve(lease, max(num_tokens, first.num_tokens) if first else num_tokens)
        if first:
            first.pages = lease.page_table[: first.num_tokens // self.page_size].copy()
            self.pool.refs[first.pages] += 1

    def commit(self) -> None:
        for lease in self._in_flight:
            prefix = getattr(lease, "prefix")  # noqa: B009 (mypy minds the other way)
            if prefix is not None and lease.num_tokens >= prefix.num_tokens:
                table = lease.page_table[: prefix.num_tokens // self.page_size]
                prefix.computed |= np.array_equal(table, prefix.pages)
        super().commit()

    def filled_slots(self) -> NDArray[np.int32]:
        """[num_pages] slots that hold a token of a prefix."""
        filled = np.zeros(self.pool.num_pages, np.int32)
        for prefix in self._prefixes.values():
            if prefix.pages is not None and prefix.computed:
                filled[prefix.pages] = self.page_size
        return filled

    def check(self) -> None:
        refs = np.zeros(self.pool.num_pages, np.int32)
        for prefix in self._prefixes.values():
            assert prefix.pages is not None or not prefix.computed
            if prefix.pages is not None:
                assert len(prefix.pages) * self.page_size == prefix.num_tokens
                refs[prefix.pages] += 1
        assert refs.max() <= 1, "two prefixes hold one page"
        assert refs.sum() <= self.pin_budget, "prefixes hold more than half of the memory"
        for lease in self._leases:
            assert lease.num_tokens <= lease.capacity
            np.add.at(refs, lease.page_table, 1)
        self.pool.check(refs)


class TemplateCache(PrefixObjectCache):
    """Named templates, as proposed to vLLM (pull request 2296, December 2023, not merged).

    Rules:

    - `add_prefix_template({name: content})` registers texts before requests come; `add_request(...,
      prefix_name=name)` says with which one a prompt begins. There are no others, so nothing that
      was generated, and nothing that became known later, is ever found.
    - Templates hold their memory from the start, and keep it. All of one is found, or nothing.

    What the proposal leaves open is as in `PrefixObjectCache`. It computes a template when that is
    registered; here the first request that names it does, so that no work is left out of the
    figures. The user registers what the workload declares as known beforehand
    (`Arrival.template_tokens`), in order of first use, in no more than half of the memory.
    """

    def _forget_all(self) -> None:
        super()._forget_all()
        for name in self._names:
            prefix = super()._name((None, name))
            if prefix is not None:
                prefix.pages = self.pool.allocate(prefix.num_tokens // self.page_size)

    def _name(self, key: tuple[Hashable, bytes]) -> Prefix | None:
        return self._prefixes.get(key)
