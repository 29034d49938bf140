"""Routes of named prefixes; a client sees those of its own salt."""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter, Request

from radixcache.runtime.engine.named_prefixes import NamedPrefix
from radixcache.runtime.server.api.exchange import find_prefix, finish
from radixcache.runtime.server.http.bodies import BodyRoute
from radixcache.runtime.server.protocol.answers import DeletedPrefix, Prefix, PrefixList
from radixcache.runtime.server.protocol.fields import CacheSalt, PrefixName
from radixcache.runtime.server.protocol.openai import PrefixRequest
from radixcache.runtime.server.serving import ContextDep, client_of
from radixcache.tokens import TokensLike

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/prefixes")
async def pin_prefix(body: PrefixRequest, request: Request, context: ContextDep) -> Prefix:
    """Compute a prefix and pin it; 409 if the salt uses the name for another prefix, or has no
    pages left to pin."""
    client = client_of(request, body.cache_salt)
    tokens: TokensLike = body.prompt if isinstance(body.prompt, list) else ()
    if not isinstance(body.prompt, list):
        tokens = await context.tokenizing.run(body.encode, client)
    name, salt, lifetime = body.name, body.cache_salt, body.lifetime
    prefixes = context.llm.prefixes
    job = await context.jobs.submit(
        lambda: [prefixes.prepare(name, tokens, lifetime=lifetime, cache_salt=salt, client=client)],
        num_sequences=1,
        client=client,
        timeout=context.options.request_timeout,
    )
    await finish(job, request)
    messages = None if body.messages is None else [m.plain() for m in body.messages]
    keep = partial(prefixes.keep, lifetime=lifetime, messages=messages)
    return describe(await context.jobs.call(lambda: keep(name, job.requests[0])))


@router.get("/v1/prefixes")
async def list_prefixes(context: ContextDep, cache_salt: CacheSalt = None) -> PrefixList:
    """The pinned prefixes of a salt."""
    llm = context.llm
    prefixes, pinned = await context.jobs.call(
        lambda: (llm.prefixes.list(), llm.cache.pins.num_pages_of(cache_salt))
    )
    return PrefixList(
        data=[describe(prefix) for prefix in prefixes if prefix.cache_salt == cache_salt],
        pinned_pages=pinned,
        budget_pages=llm.cache.pins.share,
    )


@router.get("/v1/prefixes/{name}")
async def get_prefix(name: PrefixName, context: ContextDep, cache_salt: CacheSalt = None) -> Prefix:
    """One pinned prefix."""
    return describe(await find_prefix(context, name, cache_salt))


@router.delete("/v1/prefixes/{name}")
async def unpin_prefix(
    name: PrefixName, context: ContextDep, cache_salt: CacheSalt = None
) -> DeletedPrefix:
    """Unpin a prefix."""
    await find_prefix(context, name, cache_salt)
    await context.jobs.call(lambda: context.llm.prefixes.unpin(name, cache_salt))
    return DeletedPrefix(name=name)


def describe(prefix: NamedPrefix) -> Prefix:
    """A pinned prefix, as its own salt may see it."""
    expires = prefix.expires
    return Prefix(
        name=prefix.name,
        num_tokens=len(prefix.tokens),
        salted=prefix.cache_salt is not None,
        expires_in=None if expires is None else max(0.0, expires - time.monotonic()),
    )
