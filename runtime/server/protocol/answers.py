"""Answers of this server's own routes; those of OpenAI's and Anthropic's APIs are dictionaries,
made in `api/`."""

from __future__ import annotations

from typing import Literal

from radixcache.runtime.explanation import Reason
from radixcache.runtime.server.protocol.fields import Body
from radixcache.snapshot import Folded


class MissedTokens(Body):
    """Prompt tokens [start, end) that were not cached or had to be loaded; the reason, also as a
    sentence."""

    reason: Reason | Literal["loaded"]
    start: int
    end: int
    text: str


class Explained(Body):
    """The answer of /v1/explain; a last token that is computed for its logits alone is no miss."""

    object: Literal["explanation"] = "explanation"
    model: str
    prompt_tokens: int
    cached_tokens: int
    explanation: list[MissedTokens]


class Prefix(Body):
    """A pinned prefix; `expires_in` in seconds, null for never."""

    object: Literal["prefix"] = "prefix"
    name: str
    num_tokens: int
    salted: bool
    expires_in: float | None


class PrefixList(Body):
    """The pinned prefixes of a salt, oldest first, and the pages that they hold and may hold."""

    object: Literal["list"] = "list"
    data: list[Prefix]
    pinned_pages: int
    budget_pages: int


class CachePrefix(Prefix):
    """A pinned prefix and its salt's `namespace`, as in `CacheNamespace`."""

    namespace: str | None


class CachePrefixList(PrefixList):
    """The pinned prefixes of all salts, oldest first, and the pages that they hold and may hold."""

    data: list[CachePrefix]  # type: ignore[assignment]


class DeletedPrefix(Body):
    name: str
    object: Literal["prefix"] = "prefix"
    deleted: Literal[True] = True


class CacheNode(Body):
    """A node of the tree; see `radixcache.snapshot.CachedNode`."""

    id: str
    start: int
    num_tokens: int
    text: str
    age: int
    leases: int
    computed_from: int | None
    pins: list[str]
    pinned: bool
    children: list[CacheNode]
    more: Folded | None


class CacheNamespace(Body):
    """The tree of one salt; `namespace` is a digest of the salt, keyed by the process, or null
    without a salt."""

    namespace: str | None
    tree: CacheNode


class LowerTierPages(Body):
    """A tier's room, and the pages read from it and written to it since the server's start."""

    medium: Literal["host", "disk"]
    pages: int
    used_pages: int
    loaded_pages: int
    stored_pages: int


class CacheStatistics(Body):
    """Counters since the last flush, and pages now; `tiers` are those below the KV memory. Pages of
    windows that are kept apart, and slots of states, are counted by what they are used for."""

    requests: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    evicted_tokens: int
    evicted_pages: int
    copied_pages: int
    loaded_tokens: int
    cached_nodes: int
    cached_tokens: int
    pages: int
    free_pages: int
    pinned_pages: int
    window_pages: dict[str, int] | None = None
    recurrent_states: dict[str, int] | None = None
    tiers: list[LowerTierPages]
    page_size: int
    running: int
    waiting: int


class RecentRequest(Body):
    """A request's hit, how much of it was loaded from a tier below, and the seconds for loading and
    to the first token."""

    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    load_seconds: float
    ttft: float


class CacheView(Body):
    """The answer of GET /v1/cache; `above` has the nodes from the root to the one shown, `more` the
    salts left out, `recent` the last requests, oldest first."""

    kind: str
    stats: CacheStatistics
    above: list[CacheNode]
    namespaces: list[CacheNamespace]
    more: Folded | None
    recent: list[RecentRequest]


class CacheHit(Body):
    """The ids of the nodes from the root to the one in which a text was found."""

    path: list[str]


class CacheHits(Body):
    """The answer of GET /v1/cache/search; `total` also counts the hits that are left out."""

    total: int
    data: list[CacheHit]


class ErrorBody(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Body):
    error: ErrorBody
