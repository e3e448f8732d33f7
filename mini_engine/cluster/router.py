"""The request router of Ray Serve, in every front: a host by the media key, the least busy replica on that host."""

import dataclasses

from ray.actor import ActorHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mini_engine.cluster.routing import ranked


@dataclasses.dataclass
class Attempt:
    """The argument of a lease. The front and its router share the object."""

    front: ActorHandle  # which takes the lease
    avoided: list[str]  # hosts that have failed
    tried: str | None = None  # the host that the router has chosen; None: no host has room


class HostAffineRouter(RequestRouter):
    """Ray's own routers know no media; its consistent hashing knows no hosts, only replicas, whose ids are random."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`. Serve takes the first rank with a replica that is not full, else asks again later."""
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # else Serve asks without a pause while all are full
        attempt: Attempt = pending_request.args[0]
        ranks: dict[str, list[RunningReplica]] = {}
        for replica in candidate_replicas:
            ranks.setdefault(replica.node_id, []).append(replica)
        load = self.replica_queue_len_cache.get
        loads = {host: sum(load(replica.replica_id) or 0 for replica in rank) for host, rank in ranks.items()}
        limits = {host: sum(replica.max_ongoing_requests for replica in rank) for host, rank in ranks.items()}
        order = ranked(pending_request.metadata.session_id, loads, attempt.avoided)
        attempt.tried = next((host for host in order if loads[host] < limits[host]), None)
        return [ranks[host] for host in order]
