"""Serve's part of routing: sends each request where its first argument says, and reports members.

The deployment's one `Router` has chosen the replica before. Serve pickles this module by value, so
it has no state of its own.
"""

from __future__ import annotations

import time

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from radixcache.runtime.router import members

PATIENCE = 2.0
"""Seconds for which Serve may ask a silent replica whether it has room. One whose node has died is
silent until Ray gives the node up, a busy one for a moment."""


class Sender(RequestRouter):
    """Sends a request to the replica named by its first argument.

    If that is not running, or silent, another replica gets it, which does not answer to the wrong
    name, so that the ingress chooses again.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        members.MEMBERS.change(frozenset(replica.replica_id.unique_id for replica in replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        name, waited = "", 0.0
        if pending_request is not None:
            name, waited = pending_request.args[0], time.time() - pending_request.created_at
        named = [r for r in candidate_replicas if r.replica_id.unique_id == name]
        others = [r for r in candidate_replicas if r.replica_id.unique_id != name]
        return [named] if named and waited < PATIENCE else [named, others]
