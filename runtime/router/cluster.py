"""An application for `serve deploy` and KubeRay, on a cluster that is managed elsewhere.

Serve's proxies take the connections. The ingress is a deployment of one replica, on the head node,
since several would each know only a part of what is cached.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ray import serve

from radixcache.errors import InvalidRequest
from radixcache.runtime.router import deploy
from radixcache.runtime.router.prompts import load_prompts
from radixcache.runtime.server.settings import read_settings

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

_HEAD = "node:__internal_head__"
"""A resource of Ray's head node. The ingress runs there, beside Serve's proxy and controller, so
that no other node's death ends it."""

_MEANINGLESS = {"host", "port", "config", "kv_events_config"}


def build(settings: dict[str, Any]) -> Application:
    """The application of `serve_config.yaml`, whose `args` are flags of `radixcache serve`.

    Raises:
        InvalidRequest: a value makes no sense, or not here.
    """
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    if wrong := given.keys() & _MEANINGLESS:
        raise InvalidRequest(f"{min(wrong)} is not for a replica of a cluster")
    engine, options = read_settings(given)
    resources = deploy.resources_of(1, on_gpu=engine.device != "cpu")
    key = secrets.token_bytes(32)
    replicas = deploy.bind(engine, options, resources, key)

    def make_app() -> Any:
        name, app = deploy.REPLICA, serve.get_replica_context().app_name
        handle, prompts = serve.get_deployment_handle(name, app), load_prompts(engine.model)
        return deploy.make_app(handle, prompts, options, "", key)

    ingress: Any = serve.ingress(make_app)(_Ingress)
    deployment = serve.deployment(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=deploy.NO_LIMIT,
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
    )
    return deployment(ingress).bind(replicas)


class _Ingress:
    def __init__(self, replicas: DeploymentHandle) -> None:
        """The argument makes Serve deploy the replicas, too."""
