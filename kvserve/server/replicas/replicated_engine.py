"""Replicas of the engine on Ray Serve, behind one HTTP server.

On one machine `kvserve serve` starts them (``LocalReplicas``), on a cluster `serve run` does
(``build``). The replicas run `engine_replica.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvserve.config import EngineConfig
from kvserve.engine.frontend.llm_engine import load_tokenizer
from kvserve.engine.frontend.tokenizer import Tokenizer, tokenize
from kvserve.engine.messages import EngineInfo, PolicyOffer
from kvserve.log import ConfigError, EngineDeadError, RequestError, configure_logging, logger
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.server.http.app import create_app
from kvserve.server.replicas.engine_replica import DEPLOYMENT, MANY, Ticket, engines
from kvserve.server.replicas.replica_stream import OutputReader, held_tokens, total
from kvserve.server.replicas.routing import HeldTokenRouter
from kvserve.server.settings.reading import check_policies, settings_from
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.errors import unavailable
from kvserve.server.state.heap import freeze_heap
from kvserve.server.state.server_state import ServerState
from kvserve.stats import EngineStats

_APP = "kvserve"
_SERVES = (
    *("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "shutdown_timeout"),
    *("otlp_traces_endpoint", "uvicorn_log_level", "disable_uvicorn_access_log"),
)
_STATS_S = 1.0
_OBJECT_STORE_BYTES = 256 * 2**20  # pieces are small and travel inline


class ReplicatedEngine:
    """Several engines behind the interface of one. Serve adds, removes and replaces replicas."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.dead_error: BaseException | None = None
        self.suspended = False
        """Serve asks each replica for its health, and replaces one that does not answer."""
        self.stage = "starting replicas"
        self.stats_by_engine: Mapping[str, EngineStats] = {}
        self._router = HeldTokenRouter()
        self._handle: DeploymentHandle
        self._info: EngineInfo | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._reset: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the replicas of the application that this process is part of."""
        await self._connect(serve.get_deployment_handle(DEPLOYMENT))

    async def _connect(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        try:
            self._info = await handle.describe.remote()
        except ConfigError as error:
            raise ConfigError(str(getattr(error, "cause", error))) from None
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.config.model)
        await self._read_stats()
        self._watcher = asyncio.create_task(self._watch())

    @property
    def stats(self) -> EngineStats:
        return total(self.stats_by_engine.values())

    @property
    def info(self) -> EngineInfo:
        """An engine's, with a row about the replicas in its start-up table."""
        if self._info is None:
            raise RuntimeError("no replica has been connected")
        running = f"{len(self.stats_by_engine)} on Ray Serve"
        row = "replicas", running, "--data-parallel-size"
        return replace(self._info, summary=[*self._info.summary, row])

    async def offers(self) -> list[PolicyOffer]:
        """Those of one replica; all are alike."""
        found: list[PolicyOffer] = await self._handle.offers.remote()
        return found

    async def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """As ``AsyncEngine.generate``. A 503 if the replica that has the request is lost."""
        if self._reset is not None:
            await asyncio.shield(self._reset)
        _, token_ids = tokenize(self.tokenizer, prompt)
        reader = OutputReader(token_ids)
        self._router.add(request_id, token_ids)
        ticket = Ticket(request_id, token_ids, sampling_params, self._router)
        pieces = self._handle.options(stream=True).generate.remote(ticket)
        try:
            async for piece in pieces:
                output = reader.join(piece)
                self._router.holds(request_id, held_tokens(output))
                yield output
        except RequestError as error:
            raise getattr(error, "cause", error) from None  # drops Ray's traceback from the message
        except (RayError, RayServeException, EngineDeadError) as error:
            logger.warning("%s: its replica failed: %s", request_id, _first_line(error))
            raise unavailable("the replica that had this request stopped", "engine_dead") from None
        finally:
            self._router.forget(request_id)
            pieces.cancel()

    @property
    def pool(self) -> None:
        """``None``: the pool is shown for a single engine only."""
        return None

    def watch_pool(self, on: bool) -> None:
        """Do nothing: there are no views of the pool, and statistics are read every second."""

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache of every replica. Later requests wait until that is done."""
        self._router.forget_prefixes()
        self._reset = asyncio.create_task(self._reset_all())

    async def _reset_all(self) -> None:
        """A replica that cannot be told keeps its cache: later requests go on without it."""
        try:
            sent = self._handle.broadcast("reset_prefix_cache")
            told = await sent.results_async(return_exceptions=True)
        except Exception as error:  # any of Ray's: no request may end by it
            told = [error]
        for answer in told:
            if isinstance(answer, BaseException):
                logger.warning("a prefix cache was not reset: %s", _first_line(answer))

    async def shutdown(self) -> None:
        for task in (self._watcher, self._reset):
            if task is not None:
                task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_STATS_S)
            try:
                await self._read_stats()
            except (RayError, RayServeException) as error:  # no replica is up; Serve starts one
                logger.warning("no statistics: %s", _first_line(error))

    async def _read_stats(self) -> None:
        answers = await self._handle.broadcast("stats").results_async(return_exceptions=True)
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        self.stats_by_engine = dict(sorted(told))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# ---- one machine --------------------------------------------------------------------------------


class LocalReplicas(ReplicatedEngine):
    """Starts a private Ray on this machine, and stops it at shutdown."""

    async def start(self) -> None:
        """Raises ``ConfigError`` if the replicas cannot run, ``EngineDeadError`` if Serve fails."""
        cpus, gpus = _resources(self.config)
        try:
            await asyncio.to_thread(_start_ray, _most(self.config) * cpus)
            for number in (signal.SIGTERM, signal.SIGINT):  # Ray overrode our handlers
                signal.signal(number, signal.getsignal(number))
            await self._connect(await asyncio.to_thread(_deploy, self.config, cpus, gpus))
        except BaseException:
            await asyncio.to_thread(ray.shutdown)
            raise

    async def shutdown(self) -> None:
        await super().shutdown()
        await asyncio.to_thread(_end)


def _most(config: EngineConfig) -> int:
    """The most replicas that may run at once."""
    parallel = config.parallel
    return max(parallel.data_parallel_size, int(parallel.autoscaling_config.get("max_replicas", 1)))


def _resources(config: EngineConfig) -> tuple[int, int]:
    """CPUs and GPUs of each replica on this machine."""
    ranks, most = config.parallel.tensor_parallel_size, _most(config)
    if not _wants_gpus(config, torch.cuda.is_available()):
        return max(ranks, (os.cpu_count() or 1) // most), 0
    if torch.cuda.device_count() < most * ranks:
        raise ConfigError(
            f"--data-parallel-size: {most} replicas of {ranks} ranks need {most * ranks} GPUs; "
            f"there are {torch.cuda.device_count()}"
        )
    return 1, ranks


def _start_ray(cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level="warning",
    )
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})


def _deploy(config: EngineConfig, cpus: int, gpus: int) -> DeploymentHandle:
    try:
        return serve.run(engines(config, cpus, gpus), name=_APP, route_prefix=None)
    except RuntimeError as error:
        raise EngineDeadError(f"the replicas did not start: {error}") from None


def _wants_gpus(config: EngineConfig, available: bool) -> bool:
    return config.device == "cuda" or (config.device == "auto" and available)


def _end() -> None:
    serve.shutdown()
    ray.shutdown()


# ---- a cluster ----------------------------------------------------------------------------------


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for ``serve run``: our FastAPI app as ingress, and the engines behind it.

    ``args`` are settings of ``kvserve serve`` by name. Raises ``ConfigError`` for those of the
    address, TLS, draining, uvicorn's log and traces, which are up to Ray Serve here.
    """
    config, settings = settings_from(args)
    for name in _SERVES:
        if getattr(settings, name) != getattr(ServeSettings(), name):
            raise ConfigError(f"{name}: not under `serve run`, where Ray Serve is the HTTP server")
    configure_logging(settings.log_level)
    ranks = config.parallel.tensor_parallel_size
    on_gpus = _wants_gpus(config, ray.cluster_resources().get("GPU", 0) > 0)
    replicas = engines(config, 1 if on_gpus else ranks, ranks if on_gpus else 0)

    def app() -> FastAPI:
        return _ingress(config, settings)

    ingress = serve.deployment(
        serve.ingress(app)(),
        name="ingress",
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},  # leaves all CPUs to the engines
    )
    return ingress.bind(replicas)


def _ingress(config: EngineConfig, settings: ServeSettings) -> FastAPI:
    """The application. It admits requests once a replica has answered."""
    configure_logging(settings.log_level)
    check_policies(config.compression)
    engine = ReplicatedEngine(config)
    state = ServerState(engine, config, settings)
    app = create_app(state)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await engine.start()
        state.mark_ready()
        freeze_heap()
        yield
        await engine.shutdown()

    app.router.lifespan_context = lifespan
    return app
