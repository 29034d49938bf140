"""The app of an ingress: access control, routes about the replicas, and all others to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any, cast

from fastapi import Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from radixcache.runtime.router.ingress import Ingress, portable
from radixcache.runtime.server import guards
from radixcache.runtime.server.admin.queries import QUERY
from radixcache.runtime.server.http import errors
from radixcache.runtime.server.http.access import ADMINISTRATOR
from radixcache.runtime.server.http.errors import ApiError
from radixcache.runtime.server.observe.metrics import exposition

PATIENCE = 5.0
"""Seconds that a replica has for its metrics, so that one that hangs does not block the others'."""


def create_app(ingress: Ingress) -> FastAPI:
    """The server in front of the replicas; `app.state.context` is the ingress."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with ingress.running():
            yield

    app = FastAPI(
        lifespan=lifespan,
        dependencies=[QUERY],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.context = app.state.frontend = ingress
    app.get("/health")(_health)
    app.get("/metrics", dependencies=[ADMINISTRATOR])(_metrics)
    app.get("/v1/replicas", dependencies=[ADMINISTRATOR])(_replicas)
    app.mount("", ingress)
    errors.install(app)
    guards.install(app, ingress.options)
    return app


def _ingress_of(request: Request) -> Ingress:
    return cast(Ingress, request.app.state.context)


_Ingress = Annotated[Ingress, Depends(_ingress_of)]


async def _health(ingress: _Ingress) -> dict[str, str]:
    """Whether the server takes requests; 503 if not."""
    if ingress.draining or not ingress.alive:
        raise ApiError(503, "the server is shutting down, or no replica is running")
    return {"status": "ok"}


async def _replicas(ingress: _Ingress) -> dict[str, Any]:
    """The replicas, and where the last requests went and why, the newest first.

    Queued tokens have yet to be computed, as far as the ingress knows. A request went where its
    cost was least, unless it goes on from a response.
    """
    booked = [s._asdict() for s in ingress.router.standings([])]
    return {
        "replicas": [
            asdict(ingress.replicas[one["replica"]])
            | {name: one[name] for name in ("queued_tokens", "requests")}
            for one in booked
        ],
        "recent": [
            {
                **vars(decision),
                "prompt_tokens": decision.standings[0].num_tokens,
                "standings": [s._asdict() for s in decision.standings],
            }
            for decision in reversed(ingress.decisions)
        ],
    }


async def _metrics(request: Request, ingress: _Ingress) -> PlainTextResponse:
    """The metrics of all replicas, each sample with its `replica`, and what is queued on each."""
    families: dict[str, Metric] = {}
    scope = portable(request.scope)
    for name, messages in (await ingress.ask_all(scope, b"", PATIENCE)).items():
        text = b"".join(message.get("body", b"") for message in messages).decode()
        for family in text_string_to_metric_families(text):
            kept = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                labels = {**sample.labels, "replica": name}
                families.setdefault(family.name, kept).add_sample(sample.name, labels, sample.value)
    for what in ("queued_tokens", "requests"):
        gauge = GaugeMetricFamily(
            f"radixcache_router_{what}", f"{what} booked on a replica", labels=["replica"]
        )
        for standing in ingress.router.standings([]):
            gauge.add_metric([str(standing.replica)], getattr(standing, what))
        families[gauge.name] = gauge
    return PlainTextResponse(exposition(families.values()), media_type=CONTENT_TYPE_LATEST)
