"""One replica under Ray Serve: its engine, its requests, and how Serve picks it for a request.

Only this module and `replicated_engine.py` import Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.engine.messages import EngineInfo, PolicyOffer
from kvserve.log import ConfigError, configure_logging, logger
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.server.replicas.replica_stream import OutputWriter
from kvserve.server.replicas.routing import HeldTokenRouter
from kvserve.stats import EngineStats

DEPLOYMENT = "engine"
MANY = 2**20
"""Serve's limit on requests at once. It is high because our server has its own limit."""

_PIECE_S = 0.02
"""Seconds between two pieces of a stream, since Ray takes some milliseconds for each. The first is
sent at once."""

_HEALTH_S = 1.0
_STOP_S = 10.0


@dataclass
class Ticket:
    """One request on its way to a replica. Pickling leaves out the router, which stays here."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    router: HeldTokenRouter | None

    def __reduce__(self) -> tuple[Any, ...]:
        return Ticket, (self.request_id, self.token_ids, self.params, None)


class EngineReplica:
    """The deployment: an engine in a child process of the replica."""

    async def __init__(self, config: EngineConfig, log_level: int) -> None:  # type: ignore[misc]
        configure_logging(log_level)
        self._engine = AsyncEngine(config)
        self._refused: ConfigError | None = None
        try:
            await self._engine.start()
        except ConfigError as error:
            self._refused = error  # ``describe`` raises it; raised here, Serve would retry

    async def describe(self) -> EngineInfo:
        if self._refused is not None:
            raise self._refused
        return self._engine.info

    async def generate(self, ticket: Ticket) -> AsyncGenerator[RequestOutput, None]:
        writer = OutputWriter(_rank())
        outputs = self._engine.generate(ticket.token_ids, ticket.params, ticket.request_id)
        try:
            async for output in outputs:
                yield writer.take_new(output)
                if not output.finished:
                    await asyncio.sleep(_PIECE_S)
        finally:
            await outputs.aclose()

    async def stats(self) -> tuple[str, EngineStats]:
        return _rank(), self._engine.stats

    async def offers(self) -> list[PolicyOffer]:
        return await self._engine.offers()

    async def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        if self._engine.dead_error is not None:
            raise self._engine.dead_error

    async def __del__(self) -> None:
        if self._refused is None:
            await self._engine.shutdown()


def _rank() -> str:
    """This replica's number, as a label. A replica that replaces a dead one gets its number."""
    return str(serve.get_replica_context().rank.rank)


class HeldTokenRequestRouter(RequestRouter):
    """Plugs ``HeldTokenRouter`` into Serve. Runs where the deployment's handle is."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        ticket = _ticket(pending_request)
        if ticket is None or ticket.router is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = ticket.router.rank(ticket.request_id, list(by_name))
        if ranked:
            # Count it before the replica answers: otherwise a burst would all go to this one.
            ticket.router.send(ticket.request_id, ranked[0])
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        ticket = _ticket(pending_request)
        if ticket is not None and ticket.router is not None:
            ticket.router.send(ticket.request_id, replica_id.unique_id)


def _ticket(pending: PendingRequest | None) -> Ticket | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Ticket) else None


def engines(config: EngineConfig, cpus: int, gpus: int) -> serve.Application:
    """The engines as an application for ``serve.run``. All ranks of a replica run on one node."""
    parallel = config.parallel
    scale: dict[str, Any] = {"num_replicas": parallel.data_parallel_size}
    if parallel.autoscaling_config:
        first = {"initial_replicas": parallel.data_parallel_size}
        scale = {"autoscaling_config": {**first, **parallel.autoscaling_config}}
    deployment = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=MANY,
        logging_config={"log_level": "WARNING"},
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=_STOP_S,
        request_router_config={"request_router_class": HeldTokenRequestRouter},
        **scale,
    )
    alone = replace(parallel, data_parallel_size=1, autoscaling_config={})
    return deployment.bind(replace(config, parallel=alone), logger.getEffectiveLevel())
