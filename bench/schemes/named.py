"""The caching schemes that are compared, by name, and how much memory each gets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixcache import HashBlockCache, NoCache, PagePool, PrefixCache, RadixCache
from radixcache.bench.schemes.first_blocks import FirstBlocksCache
from radixcache.bench.schemes.named_prefixes import PrefixObjectCache, TemplateCache
from radixcache.bench.schemes.page_aligned import PageAlignedRadixCache
from radixcache.bench.schemes.states import STATE_RULES
from radixcache.bench.schemes.tier import with_tier
from radixcache.bench.schemes.windows import MODELS, WINDOW_RULES, WindowedModel, make_windowed
from radixcache.bench.workloads.workload import Workload
from radixcache.errors import InvalidRequest
from radixcache.runtime.config.sizes import parse_memory as parse_bytes
from radixcache.runtime.engine.scheduling.saved_state_planner import NO_SAVED_STATES, Planner


class WholeLeaves(RadixCache):
    """Drops each leaf whole, as SGLang's eviction does, however little is asked for."""

    def _evict(self, num_pages: int) -> int:
        freed = 0
        while freed < num_pages and (leaf := self._order.first()) is not None:
            freed += super()._evict(leaf.num_pages)
        return freed


KINDS: dict[str, Callable[[PagePool, Workload], PrefixCache]] = {
    "none": lambda pool, _: NoCache(pool),
    "template": lambda pool, workload: TemplateCache(pool, workload.templates()),
    "prefix": lambda pool, workload: PrefixObjectCache(pool, workload.stems()),
    "cow": lambda pool, _: FirstBlocksCache(pool),
    "hash": lambda pool, _: HashBlockCache(pool),
    "radix": lambda pool, _: RadixCache(pool),
    "whole": lambda pool, _: WholeLeaves(pool),
    "aligned": lambda pool, _: PageAlignedRadixCache(pool),
}
"""Some must be told beforehand which prefixes there will be."""

INDEX_ONLY = ("template", "prefix", "cow")
"""Kinds that are rules without a memory: they run at index level only."""

_DEFAULT = "none hash-16 hash-64 hash-256 radix-1 radix-16".split()

FAMILY = "none template-16 prefix-16 cow-16 hash-16 aligned-16 radix-16 radix-1".split()
"""Schemes of the systems that led here, the oldest first, and ours."""

GROUPS = {
    "default": _DEFAULT,
    "family": FAMILY,
    "all": list(dict.fromkeys([*_DEFAULT, "hash-32", "hash-128", *FAMILY, "whole-16"])),
}
"""Names that stand for several schemes."""


NOTHING = Workload("nothing", "no request")


@dataclass(frozen=True)
class Scheme:
    """A way to cache.

    Attributes:
        states: where a hybrid model's states are kept, one of `STATE_RULES`; then it is the name.
        tier: how many times the memory a tier below holds; 0 if there is none.
        windows: how the windows of `windowed` are kept, one of `WINDOW_RULES`; then it is the name.
    """

    kind: str
    page_size: int
    states: str = ""
    tier: int = 0
    windows: str = ""
    windowed: WindowedModel | None = None

    @property
    def name(self) -> str:
        """Such as "hash-16"; plain "none" for the baseline."""
        if self.states or self.windows:
            return self.states or self.windows
        tier = f"+{self.tier}x" if self.tier else ""
        return self.kind if self.kind == "none" else f"{self.kind}-{self.page_size}{tier}"

    def make(self, num_tokens: int, workload: Workload = NOTHING) -> PrefixCache:
        """An empty cache over pages for `num_tokens` tokens, for the requests of `workload`."""
        return self.make_planned(num_tokens, 0, workload)[0]

    def make_planned(
        self, num_tokens: int, slots: int, workload: Workload
    ) -> tuple[PrefixCache, Planner]:
        """An empty cache, and its planner of windows or of recurrent states in `slots` slots."""
        if self.windowed is not None:
            sizes = num_tokens, self.page_size
            return make_windowed(self.windows, self.windowed, *sizes, workload)
        pool = PagePool(num_tokens // self.page_size, self.page_size)
        cache = with_tier(pool, self.tier) if self.tier else KINDS[self.kind](pool, workload)
        return cache, STATE_RULES[self.states](slots, workload) if self.states else NO_SAVED_STATES


HYBRID = [Scheme("radix", 1, rule) for rule in STATE_RULES]
"""Those that are compared for a hybrid model."""


def windowed_schemes(model: str) -> list[Scheme]:
    """Those that are compared for a model with windows, one of `MODELS`."""
    return [Scheme("radix", 16, windows=rule, windowed=MODELS[model]) for rule in WINDOW_RULES]


def parse_scheme(name: str) -> Scheme:
    """The scheme called "none", "hash-B", "radix-P" or as another of `KINDS`; "radix-P+Nx" has a
    tier below the pool of N times its size."""
    if name == "none":
        return Scheme("none", 16)
    kind, _, size = name.partition("-")
    found = re.fullmatch(r"([1-9]\d{0,4})(?:\+([1-9]\d?)x)?", size)
    if kind not in KINDS or kind == "none" or not found or (found[2] and kind != "radix"):
        raise InvalidRequest(
            f"no scheme {name!r}; say none, hash-16, radix-1, radix-16+4x, aligned-16 or the like"
        )
    return Scheme(kind, int(found[1]), tier=int(found[2] or 0))


def find_schemes(names: Sequence[str]) -> list[Scheme]:
    """The schemes that names of schemes or of groups stand for, each once."""
    expanded = [scheme for name in names for scheme in GROUPS.get(name, [name])]
    return [parse_scheme(name) for name in dict.fromkeys(expanded)]


_MOST = 1 << 28
"""Tokens of a memory: every page is counted in an array, and no machine has that many."""


@dataclass(frozen=True)
class Memory:
    """An amount of KV memory as it was asked for.

    Attributes:
        amount: how many, of `unit`.
        unit: "tokens", "bytes" or "share" of the workload's footprint.
    """

    text: str
    amount: float
    unit: str

    def tokens(self, footprint: int, token_bytes: int, schemes: Sequence[Scheme]) -> int:
        """How many tokens it holds, cut to whole pages of every scheme: all get the same bytes.

        At least two of the largest pages, because the hash-block cache never uses its first.

        Raises:
            InvalidRequest: it is more than can be counted page by page.
        """
        per_unit = {"tokens": 1.0, "bytes": 1 / token_bytes, "share": float(footprint)}
        step = math.lcm(*(scheme.page_size for scheme in schemes))
        wanted = self.amount * per_unit[self.unit]
        if wanted > _MOST:
            raise InvalidRequest(f"a memory of {self.text:.40} is more than {_MOST:,} tokens")
        return max(2, int(wanted) // step) * step


def parse_memory(text: str) -> Memory:
    """ "30%" of the footprint, "2GB" or "512MiB", or "65536" tokens; InvalidRequest if none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    try:
        if found is None:
            return Memory(text, parse_bytes(text), "bytes")
    except InvalidRequest:
        found = None
    if not found or not float(found[1]):
        raise InvalidRequest(f"not an amount of memory: {text!r} (say 30%, 2GB, 512MiB or tokens)")
    amount = float(found[1])
    return Memory(text, amount / 100, "share") if found[2] else Memory(text, amount, "tokens")
