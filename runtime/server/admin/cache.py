"""The administrator's view of all clients' cache: tree, statistics, flush, named prefixes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
from collections.abc import Hashable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response

from radixcache.errors import LeaseError
from radixcache.runtime.server.admin.prefixes import describe
from radixcache.runtime.server.admin.search import search
from radixcache.runtime.server.http.access import ADMINISTRATOR
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.protocol.answers import (
    CacheHit,
    CacheHits,
    CacheNode,
    CachePrefix,
    CachePrefixList,
    CacheView,
    DeletedPrefix,
    RecentRequest,
)
from radixcache.runtime.server.protocol.fields import PrefixName
from radixcache.runtime.server.serving import ContextDep, ServingContext
from radixcache.runtime.tokens.tokenizer import Tokenizer
from radixcache.snapshot import MAX_DEPTH, ROOT, CachedNode, Look, Picture

router = APIRouter(dependencies=[ADMINISTRATOR])

_KEY = secrets.token_bytes(32)
"""Keys the digests, so that their input cannot be found by trying."""


def share_key(key: bytes) -> None:
    """Name salts and nodes like all other replicas with the same key."""
    global _KEY
    _KEY = key


# The tree.


@router.get(
    "/v1/cache",
    response_model=CacheView,
    responses={304: {"description": "Nothing has changed since `If-None-Match` was the ETag"}},
)
async def view_cache(
    context: ContextDep,
    response: Response,
    rows: Annotated[int, Query(ge=1, le=2_000)] = 500,
    levels: Annotated[int, Query(ge=1, le=MAX_DEPTH)] = MAX_DEPTH,
    under: str | None = None,
    reveal: str | None = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """The cached tree of each salt, and the cache's statistics.

    At most `rows` leaves and `levels` levels are shown, those that were used last; the rest is
    folded. `under` and `reveal` are ids of nodes: the one to begin with (404 if it is gone), and
    one that is not folded.
    """
    cache, worker = context.llm.cache, context.llm.worker
    # Nodes go by no other name than the one told: whether one of a guessed hash is there is secret.
    wanted = Look(rows, levels, under and _node_ids.get(under), reveal and _node_ids.get(reveal))
    if under is not None and not wanted.under:
        raise ApiError(404, f"no node {under[:100]!r} is cached")

    def look() -> tuple[str, dict[str, Any], list[RecentRequest], Picture | None]:
        stats = _statistics(context)
        # Between steps only pins, flushes and aborts change anything; the other values show these.
        tag = f'"{_digest((context.created, worker.num_steps, stats, {**cache.pins}, wanted))}"'
        picture = None if tag == if_none_match else cache.outline().draw(wanted)
        return tag, stats, [*context.metrics.recent], picture

    tag, stats, recent, picture = await context.jobs.call_slow(look)
    if tag == if_none_match:
        return Response(status_code=304, headers={"ETag": tag})
    if picture is None:
        raise ApiError(404, f"no node {under!r} is cached")
    response.headers["ETag"] = tag
    response.headers["Cache-Control"] = "no-cache"

    counts = {"cached_nodes": picture.num_nodes, "cached_tokens": picture.num_tokens}

    def describe_picture(tokenizer: Tokenizer | None) -> dict[str, Any]:
        return {
            "kind": type(cache).__name__,
            "stats": {**stats, **counts},
            "above": [_node(node, tokenizer) for node in picture.above],
            "namespaces": [
                {"namespace": name_of_salt(salt), "tree": _node(root, tokenizer)}
                for salt, root in picture.roots.items()
            ],
            "more": picture.more,
            "recent": recent,
        }

    if context.llm.tokenizer is None or context.options.hide_texts:
        return describe_picture(None)
    return await context.tokenizing.run(describe_picture)


def _statistics(context: ServingContext) -> dict[str, Any]:
    """Counters since the last flush, and pages now; on the engine's thread."""
    cache, scheduler = context.llm.cache, context.llm.engine.scheduler
    offload = context.llm.offload
    return {
        **asdict(cache.stats),
        "hit_rate": cache.stats.hit_rate,
        "pages": cache.pool.num_pages,
        "free_pages": cache.pool.num_free,
        "pinned_pages": cache.pins.num_pages,
        **scheduler.planner.counts(),
        "tiers": [
            {
                "medium": tier.medium,
                "pages": tier.num_slots,
                "used_pages": len(tier),
                "loaded_pages": tier.store.counters.loaded_pages,
                "stored_pages": tier.store.counters.stored_pages,
            }
            for tier in ([] if offload is None else offload.tiers)
        ],
        "page_size": cache.page_size,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
    }


@router.get("/v1/cache/search")
async def search_cache(
    context: ContextDep, text: Annotated[str, Query(min_length=1, max_length=1000)]
) -> CacheHits:
    """The first 100 nodes in which `text` ends, on any path, regardless of case."""
    if context.options.hide_texts:
        raise ApiError(403, "this server hides what prompts say")
    nodes = await context.jobs.call_slow(lambda: context.llm.cache.outline().spell())
    paths, total = await context.tokenizing.run(lambda tokenizer: search(nodes, text, tokenizer))
    hits = [CacheHit(path=[_name(node) for node in path]) for path in paths]
    return CacheHits(total=total, data=hits)


@router.post("/v1/cache/flush")
async def flush_cache(context: ContextDep) -> dict[str, bool]:
    """Empty the cache and zero the statistics; 409 while requests run or prefixes are pinned."""
    try:
        await asyncio.to_thread(context.llm.reset_prefix_cache)
    except LeaseError:
        raise ApiError(
            409,
            "requests run or prefixes are pinned: flush once they have ended, and are deleted",
        ) from None
    return {"flushed": True}


def _node(node: CachedNode, tokenizer: Tokenizer | None) -> CacheNode:
    fields = {
        "id": node.id if node.id == ROOT else _name(node.id),
        "text": tokenizer.show(node.tokens) if tokenizer else "",
        "children": [_node(child, tokenizer) for child in node.children],
    }
    return CacheNode(**{**vars(node), **fields})


_node_ids: dict[str, str] = {}
"""The ids of the nodes that were shown last, by their public names."""
_MAX_NODE_IDS = 50_000
_node_ids_lock = threading.Lock()  # several threads name nodes


def _name(node: str) -> str:
    """A node's public name; its id may be a hash of its text."""
    name = _digest(node)
    with _node_ids_lock:
        _node_ids.pop(name, None)
        _node_ids[name] = node
        if len(_node_ids) > _MAX_NODE_IDS:
            del _node_ids[next(iter(_node_ids))]
    return name


def name_of_salt(salt: Hashable) -> str | None:
    return None if salt is None else _digest(salt)


def _digest(value: object) -> str:
    """A name for a salt, a node or a state that does not reveal it; valid in this process."""
    return hashlib.blake2b(str(value).encode(), digest_size=8, key=_KEY).hexdigest()


# Named prefixes of all salts.


@router.get("/v1/cache/prefixes")
async def list_prefixes(context: ContextDep) -> CachePrefixList:
    """All pinned prefixes."""
    llm = context.llm
    prefixes, pinned = await context.jobs.call(
        lambda: (llm.prefixes.list(), llm.cache.pins.num_pages)
    )
    return CachePrefixList(
        data=[
            CachePrefix(**dict(describe(prefix)), namespace=name_of_salt(prefix.cache_salt))
            for prefix in prefixes
        ],
        pinned_pages=pinned,
        budget_pages=llm.cache.pins.budget,
    )


@router.delete("/v1/cache/prefixes/{namespace}/{name}")
async def unpin_prefix(namespace: str, name: PrefixName, context: ContextDep) -> DeletedPrefix:
    """Unpin a prefix."""
    prefixes = context.llm.prefixes

    def unpin() -> bool:
        for prefix in prefixes.list():
            if (name_of_salt(prefix.cache_salt), prefix.name) == (namespace, name):
                prefixes.unpin(name, prefix.cache_salt)
                return True
        return False

    if not await context.jobs.call(unpin):
        raise ApiError(404, f"no prefix named {name!r} is pinned in {namespace!r}")
    return DeletedPrefix(name=name)
