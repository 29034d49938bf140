"""The cache from outside: its tree and statistics, flushing it, and named prefixes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from radixcache.base import TokensLike
from radixcache.runtime.prefixes import NamedPrefix
from radixcache.runtime.server.backend import BackendDep, plain_messages
from radixcache.runtime.server.generation import finish
from radixcache.runtime.server.metrics import EngineState, Started
from radixcache.runtime.server.protocol import (
    CacheNamespace,
    CacheNode,
    CacheStatistics,
    CacheView,
    DeletedPrefix,
    Flushed,
    Prefix,
    PrefixList,
    PrefixName,
    PrefixRequest,
    RecentRequest,
)
from radixcache.runtime.text.tokenizer import Tokenizer
from radixcache.snapshot import CachedNode

router = APIRouter()


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

    def describe(tokenizer: Tokenizer | None) -> list[CacheNamespace]:
        return [
            CacheNamespace(
                namespace=None if salt is None else _digest(salt), tree=_node(root, tokenizer)
            )
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
        namespaces=await backend.tokenize(describe) if has_text else describe(None),
        recent=[RecentRequest(**asdict(request)) for request in recent],
    )


@router.post("/v1/cache/flush")
async def flush_cache(backend: BackendDep) -> Flushed:
    """Forget all that is cached and zero the statistics; 409 while requests run or pins live."""
    await backend.jobs.call(backend.llm.cache.reset)
    return Flushed()


def _node(node: CachedNode, tokenizer: Tokenizer | None) -> CacheNode:
    return CacheNode(
        id=node.id,
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


def _digest(value: object) -> str:
    """A name for a salt, or a state, that does not give it away."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]


# Named prefixes.


@router.post("/v1/prefixes")
async def pin_prefix(body: PrefixRequest, request: Request, backend: BackendDep) -> Prefix:
    """Compute a prefix and pin it; 409 if the name is taken or the budget is exceeded."""
    messages = None if body.messages is None else plain_messages(body.messages)
    tokens: TokensLike
    if messages is not None:
        tokens = await backend.tokenize(
            lambda t: t.encode(t.render_chat(messages, ask=False), special=False)
        )
    elif isinstance(body.prompt, str):
        text = body.prompt
        tokens = await backend.tokenize(lambda t: t.encode(text))
    else:
        tokens = body.prompt or []
    name, salt, lifetime = body.name, body.cache_salt, body.lifetime
    prefixes = backend.llm.prefixes
    job = await backend.jobs.submit(
        lambda: [prefixes.prepare(name, tokens, lifetime=lifetime, cache_salt=salt)],
        num_sequences=1,
        timeout=backend.options.request_timeout,
    )
    await finish(job, request)
    prefix = await backend.jobs.call(
        lambda: prefixes.keep(name, job.requests[0], lifetime=lifetime)
    )
    if messages is not None:
        backend.prefix_messages[prefix] = messages
    return _prefix(prefix)


@router.get("/v1/prefixes")
async def list_prefixes(backend: BackendDep) -> PrefixList:
    """All pinned prefixes."""
    llm = backend.llm
    prefixes, pinned = await backend.jobs.call(
        lambda: (llm.prefixes.list(), llm.cache.pinned_pages)
    )
    return PrefixList(
        data=[_prefix(prefix) for prefix in prefixes],
        pinned_pages=pinned,
        budget_pages=llm.cache.pin_budget,
    )


@router.get("/v1/prefixes/{name}")
async def get_prefix(name: PrefixName, backend: BackendDep) -> Prefix:
    """One pinned prefix."""
    return _prefix(await backend.find_prefix(name))


@router.delete("/v1/prefixes/{name}")
async def unpin_prefix(name: PrefixName, backend: BackendDep) -> DeletedPrefix:
    """Let a prefix be evicted like anything else."""
    prefix = await backend.find_prefix(name)
    await backend.jobs.call(lambda: backend.llm.prefixes.unpin(prefix.name))
    return DeletedPrefix(name=name)


def _prefix(prefix: NamedPrefix) -> Prefix:
    expires = prefix.expires
    return Prefix(
        name=prefix.name,
        num_tokens=len(prefix.tokens),
        salted=prefix.cache_salt is not None,
        expires_in=None if expires is None else max(0.0, expires - time.monotonic()),
    )
