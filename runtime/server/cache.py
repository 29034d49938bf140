"""The cache of all clients, for who administrates it: tree, statistics, flush, named prefixes."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Hashable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response

from radixcache.errors import LeaseError
from radixcache.runtime.server.access import ADMINISTRATOR
from radixcache.runtime.server.answers import (
    CacheNamespace,
    CacheNode,
    CachePrefix,
    CachePrefixList,
    CacheStatistics,
    CacheView,
    DeletedPrefix,
    Flushed,
    RecentRequest,
)
from radixcache.runtime.server.backend import BackendDep
from radixcache.runtime.server.errors import ApiError
from radixcache.runtime.server.fields import PrefixName
from radixcache.runtime.server.metrics import EngineState, Started
from radixcache.runtime.server.prefixes import describe
from radixcache.runtime.text.tokenizer import Tokenizer
from radixcache.snapshot import ROOT, CachedNode

router = APIRouter(dependencies=[ADMINISTRATOR])

_KEY = secrets.token_bytes(32)
"""So that nobody who sees a digest finds what it is of by trying."""


# The tree.


@router.get(
    "/v1/cache",
    response_model=CacheView,
    responses={304: {"description": "Nothing has changed since `If-None-Match` was the ETag"}},
)
async def view_cache(
    backend: BackendDep,
    response: Response,
    max_nodes: Annotated[int, Query(ge=0, le=10_000)] = 500,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """What is cached, as a tree for each salt, and what the cache has been good for."""
    engine = backend.llm.engine

    def look() -> tuple[str, EngineState, list[Started], dict[Hashable, CachedNode] | None]:
        state = EngineState.of(backend.llm)
        # Between steps only pins, flushes and aborts change anything, and these the rest tells.
        seen = (backend.created, backend.llm.worker.num_steps, state, engine.cache.pins)
        tag = f'"{_digest(seen)}"'
        roots = None if tag == if_none_match else engine.cache.snapshot(max_nodes)
        return tag, state, [*backend.metrics.recent], roots

    tag, state, recent, roots = await backend.jobs.call(look)
    if roots is None:
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    response.headers["Cache-Control"] = "no-cache"

    def draw(tokenizer: Tokenizer | None) -> list[CacheNamespace]:
        return [
            CacheNamespace(namespace=_namespace(salt), tree=_node(root, tokenizer))
            for salt, root in roots.items()
        ]

    has_text = backend.llm.tokenizer is not None and not backend.options.hide_texts
    return CacheView(
        kind=type(engine.cache).__name__,
        stats=CacheStatistics(
            **asdict(state.stats),
            hit_rate=state.stats.hit_rate,
            pages=state.num_pages,
            free_pages=state.num_free,
            pinned_pages=state.num_pinned,
            page_size=engine.cache.page_size,
            running=state.num_running,
            waiting=state.num_waiting,
        ),
        namespaces=await backend.tokenize(draw) if has_text else draw(None),
        recent=[RecentRequest(**asdict(request)) for request in recent],
    )


@router.post("/v1/cache/flush")
async def flush_cache(backend: BackendDep) -> Flushed:
    """Forget all that is cached and zero the statistics; 409 while requests run or pins live."""

    def flush() -> None:
        backend.llm.prefixes.drop_yielding()
        backend.llm.engine.reset_cache()

    try:
        await backend.jobs.call(flush)
    except LeaseError:
        raise ApiError.conflict(
            "requests run or prefixes are pinned: flush when the ones have ended and the others "
            "are deleted"
        ) from None
    return Flushed()


def _node(node: CachedNode, tokenizer: Tokenizer | None) -> CacheNode:
    return CacheNode(
        id=node.id if node.id == ROOT else _digest(node.id),  # some are hashes of the text
        start=node.start,
        num_tokens=node.num_tokens,
        text=tokenizer.decode(node.tokens, special=True) if tokenizer else "",
        age=node.age,
        leases=node.leases,
        pins=node.pins,
        pinned=node.pinned,
        num_hidden=node.num_hidden,
        children=[_node(child, tokenizer) for child in node.children],
    )


def _namespace(salt: Hashable) -> str | None:
    return None if salt is None else _digest(salt)


def _digest(value: object) -> str:
    """A name for a salt, a node or a state that does not give it away; of this process only."""
    return hashlib.blake2b(str(value).encode(), digest_size=8, key=_KEY).hexdigest()


# Named prefixes of all salts.


@router.get("/v1/cache/prefixes")
async def list_prefixes(backend: BackendDep) -> CachePrefixList:
    """All pinned prefixes."""
    llm = backend.llm
    prefixes, pinned = await backend.jobs.call(
        lambda: (llm.prefixes.list(), llm.cache.pinned_pages)
    )
    return CachePrefixList(
        data=[
            CachePrefix(**dict(describe(prefix)), namespace=_namespace(prefix.cache_salt))
            for prefix in prefixes
        ],
        pinned_pages=pinned,
        budget_pages=llm.cache.pin_budget,
    )


@router.delete("/v1/cache/prefixes/{namespace}/{name}")
async def unpin_prefix(namespace: str, name: PrefixName, backend: BackendDep) -> DeletedPrefix:
    """Let a prefix be evicted like anything else."""
    prefixes = backend.llm.prefixes

    def unpin() -> bool:
        for prefix in prefixes.list():
            if (_namespace(prefix.cache_salt), prefix.name) == (namespace, name):
                prefixes.unpin(name, prefix.cache_salt)
                return True
        return False

    if not await backend.jobs.call(unpin):
        raise ApiError.not_found(f"no prefix named {name!r} is pinned in {namespace!r}")
    return DeletedPrefix(name=name)
