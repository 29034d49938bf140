"""Serve's part of routing: sends each request where its first argument says, and reports members.

The deployment's one `Router` has chosen the replica before. Serve pickles this module by value, so
it has no state of its own.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from radixcache.runtime.router import members


class Sender(RequestRouter):
    """Sends a request to the replica named by its first argument.

    If that is not running, another replica gets it, which does not answer to the wrong name.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        members.MEMBERS.change(frozenset(replica.replica_id.unique_id for replica in replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        name = pending_request.args[0] if pending_request is not None else ""
        named = [r for r in candidate_replicas if r.replica_id.unique_id == name]
        return [named or candidate_replicas]
