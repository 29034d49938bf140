"""Starts Ray, the replicas, and the ingress in this process, for `radixcache serve --replicas`."""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from radixcache.errors import InvalidRequest, ModelError, first_sentence
from radixcache.runtime.engine.args import EngineArgs
from radixcache.runtime.model.host import cgroups
from radixcache.runtime.router import sender
from radixcache.runtime.router.app import create_app
from radixcache.runtime.router.calls import Calls
from radixcache.runtime.router.ingress import Ingress
from radixcache.runtime.router.prompts import Prompts, load_prompts
from radixcache.runtime.router.replica import Replica
from radixcache.runtime.router.scaling import by_queued_tokens
from radixcache.runtime.server.admin import cache
from radixcache.runtime.server.args import ServerArgs
from radixcache.runtime.server.http.serve import serve as listen_and_serve

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

REPLICA = "replica"

NO_LIMIT = 100_000
"""Most running requests of a replica for Serve; the app has limits of its own for clients."""

_UPSCALE_SECONDS, _DOWNSCALE_SECONDS = 5.0, 300.0

_HEALTH_SECONDS = 10.0
"""A replica that does not answer within this, three times in a row, is replaced."""

_STARTS = 3
"""How often replicas are started that die meanwhile; one that fails is not started again."""

_DEATH = re.compile("^Actor(Died|Unavailable)Error", re.MULTILINE)
_CLASS = re.compile(r"^(radixcache\.[\w.]+|[\w.]*Error): ")

_log = logging.getLogger("radixcache")


def bind(
    engine: EngineArgs,
    options: ServerArgs,
    resources: Mapping[str, float],
    key: bytes,
) -> Application:
    """The deployment of the replicas, as many as `options` say.

    Args:
        resources: `num_cpus` and `num_gpus` of each replica.
        key: turns salts into names, the same in all replicas.
    """
    low, high = options.replicas or (1, 1)
    count: dict[str, Any] = {"num_replicas": low}
    if low != high:
        policy = AutoscalingPolicy(
            policy_function=f"{by_queued_tokens.__module__}:{by_queued_tokens.__name__}"
        )
        count["autoscaling_config"] = AutoscalingConfig(
            min_replicas=low,
            max_replicas=high,
            policy=policy,
            upscale_delay_s=_UPSCALE_SECONDS,
            downscale_delay_s=_DOWNSCALE_SECONDS,
        )
        del count["num_replicas"]
    deployment = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=NO_LIMIT,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{sender.__name__}.{sender.Sender.__name__}"
        ),
        ray_actor_options=dict(resources),
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=_HEALTH_SECONDS / 2,
        health_check_timeout_s=_HEALTH_SECONDS,
        max_constructor_retry_count=1,  # for the first replicas; replacements keep trying
        **count,
    )(Replica)
    if engine.model is not None and Path(engine.model).exists():  # replicas run elsewhere
        engine = replace(engine, model=str(Path(engine.model).resolve()))
    if engine.kv_dir is not None:
        engine = replace(engine, kv_dir=Path(engine.kv_dir).expanduser().absolute())
    return deployment.bind(engine, replace(options, access_log=False), key)


@contextmanager
def deployed(
    engine: EngineArgs,
    options: ServerArgs,
    key: bytes,
    name: str,
) -> Iterator[DeploymentHandle]:
    """Replicas on the Ray cluster of RAY_ADDRESS, or on one that is started for them here.

    An application of that `name` on the cluster is replaced.

    Raises:
        InvalidRequest: there is no cluster at that address, or this machine has too few GPUs.
        ModelError: the replicas do not start.
    """
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    most = (options.replicas or (1, 1))[1]
    cores = max(1, int(min(os.cpu_count() or 1, cgroups.cpu_quota() or inf)) // most)
    # Ray's logs have what replicas print; a failed start is reported in one sentence.
    ray_options: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False}
    if "RAY_ADDRESS" in os.environ:
        _check_address(os.environ["RAY_ADDRESS"])
    else:
        # Alone, Ray would look for a cluster that was started on this machine.
        ray_options |= {"address": "local", "num_cpus": cores * most + 1}
        ray_options |= {"include_dashboard": False}
    try:
        _join(ray_options)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if "RAY_ADDRESS" in os.environ:
            cores = cores_each(most, nodes)
        on_gpu = engine.device != "cpu" and any(node.get("GPU") for node in nodes)
        resources = resources_of(cores, on_gpu)
        if (found := room(nodes, resources)) < (low := (options.replicas or (1, 1))[0]):
            each, kind = (resources["num_gpus"], "GPU") if on_gpu else (cores, "core")
            each_has = f"{each} {kind}{'s' * (each > 1)}"
            lacking = f"there is room for {found} of {low} replicas, each with {each_has}"
            if "RAY_ADDRESS" not in os.environ:
                raise InvalidRequest(lacking)
            _log.warning("%s: waiting for more nodes", lacking)
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        application = bind(engine, options, resources, key)
        for left in reversed(range(_STARTS)):
            # Else Serve replaces those of an ingress that was killed one by one.
            with suppress(TimeoutError):  # they may take long to shut down
                serve.delete(name)
            try:
                handle = serve.run(application, name=name, route_prefix=None, logging_config=quiet)
                break
            except RuntimeError:
                message = serve.status().applications[name].deployments[REPLICA].message
                if not (_DEATH.search(message) and left):
                    raise ModelError(f"no replica starts: {_reason(message)}") from None
                _log.warning("a replica has died while it started, or its node has: starting again")
        # It tells of each try to reach a replica; the ingress tells of those that do not answer.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        yield handle
    finally:
        if ray.is_initialized():  # else this would start Ray
            with suppress(Exception):  # Serve may not have started
                serve.delete(name)
        ray.shutdown()


def resources_of(cores: int, on_gpu: bool) -> dict[str, float]:
    """The resources of one replica."""
    return {"num_cpus": 1 if on_gpu else cores, "num_gpus": int(on_gpu)}


def room(nodes: Sequence[Mapping[str, float]], resources: Mapping[str, float]) -> int:
    """How many replicas nodes with these numbers of `CPU` and `GPU` have room for."""
    each = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    return sum(min(int(node.get(kind, 0) // n) for kind, n in each.items() if n) for node in nodes)


def cores_each(count: int, nodes: Sequence[Mapping[str, float]]) -> int:
    """The most cores that each of `count` replicas can have; 1 if there is no room for all."""
    most = int(max((node.get("CPU", 0) for node in nodes), default=0))
    fits = (n for n in range(most, 1, -1) if room(nodes, {"num_cpus": n, "num_gpus": 0}) >= count)
    return next(fits, 1)


def _check_address(address: str) -> None:
    """`InvalidRequest` if nothing listens there; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), 5).close()
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"RAY_ADDRESS must be HOST:PORT of a cluster, or auto, not {address}: "
            f"{first_sentence(error)}"
        ) from None


def _join(ray_options: dict[str, Any]) -> None:
    """Start Ray, or join the cluster; `InvalidRequest` if that fails."""
    try:
        ray.init(**ray_options)
    except (ConnectionError, RuntimeError, RayError) as error:
        if "RAY_ADDRESS" not in os.environ:
            raise
        raise InvalidRequest(
            f"the Ray cluster at {os.environ['RAY_ADDRESS']} cannot be joined: "
            f"{first_sentence(error.__cause__ or error)}"
        ) from None


def _reason(message: str) -> str:
    """What to say of replicas that do not start: their own error, without its class."""
    if _DEATH.search(message):
        return "each dies while it starts; Ray's logs may say why"
    return _CLASS.sub("", message.strip().rpartition("\n")[2])


def make_app(
    handle: DeploymentHandle, prompts: Prompts, options: ServerArgs, note: str, key: bytes
) -> FastAPI:
    """The ingress of running replicas."""
    cache.share_key(key)  # so that salts have the same names as on the replicas
    return create_app(Ingress(Calls(handle), options, prompts, note))


def run(engine: EngineArgs, options: ServerArgs, listener: socket.socket) -> None:
    """Serve until a signal ends it."""
    prompts, key = load_prompts(engine.model), secrets.token_bytes(32)
    # Unique to this ingress, and the same if it is killed and restarted.
    name = f"radixcache-{platform.node()}-{listener.getsockname()[1]}"
    with deployed(engine, options, key, name) as handle:
        low, high = options.replicas or (1, 1)
        count = f"{low}" if low == high else f"{low} to {high}"
        app = make_app(handle, prompts, options, f"{count} replicas, run by Ray Serve", key)
        listen_and_serve(app, listener, options.shutdown_timeout)
