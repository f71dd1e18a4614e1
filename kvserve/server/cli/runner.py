"""Starts and runs the server.

The socket already answers health checks while the engine loads. Then a table says what is on, what
is off and why. On SIGTERM, Ctrl-C or a terminal's end running requests get time to finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import uvicorn

from kvserve import __version__
from kvserve.config import EngineConfig
from kvserve.folders import install
from kvserve.log import ConfigError, EngineDeadError, logger, say
from kvserve.server.cli.listening import address_of, listen, warn_if_open
from kvserve.server.http.app import create_app
from kvserve.server.http.http_protocol import LimitedHttpProtocol
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.engine_protocol import Engine
from kvserve.server.state.errors import unavailable
from kvserve.server.state.heap import freeze_heap
from kvserve.server.state.server_state import ServerState
from kvserve.server.state.tracing import Tracer
from kvserve.signals import AT_ONCE, heeded
from kvserve.stats import EngineStats

_CLOSE_TIMEOUT = 5
"""Seconds to send the rest of the answers once every request has ended."""

_LOG_INTERVAL = 10.0
"""Seconds between two log lines, while the model loads and then."""
_WIDEST_STATE = 40
_OTHER_FILES = 128
"""Open files that are not connections: weights, sockets to the engine, logs."""
_LEAST_FILES = 64
_PROBES = ("/health", "/ping", "/metrics")

Row = tuple[str, str, str]


def make_engine(config: EngineConfig) -> Engine:
    """One engine in its own process, or several replicas. ``ConfigError`` if these lack Ray."""
    if config.parallel.data_parallel_size > 1:
        try:
            from kvserve.server.replicas.replicated_engine import LocalReplicas
        except ImportError as error:
            raise ConfigError(
                f"--data-parallel-size above 1 runs on Ray Serve ({error}): {install('ray')}"
            ) from None
        return LocalReplicas(config)
    from kvserve.engine.frontend.async_engine import AsyncEngine

    return AsyncEngine(config)


def serve(config: EngineConfig, settings: ServeSettings) -> int:
    """Serve until a signal; the exit status is 0. Raises ``ConfigError`` if it cannot start."""
    protocol = LimitedHttpProtocol.limited(
        settings.read_timeout,
        settings.write_timeout,
        _connections_that_fit(settings.max_connections),
        tls_context(settings),
    )
    # Bind first: a port in use shows before minutes of loading, and health checks get a 503.
    with listen(settings) as listener:
        warn_if_open(settings)
        state = ServerState(make_engine(config), config, settings)
        if settings.otlp_traces_endpoint is not None:
            state.tracer = Tracer(settings.otlp_traces_endpoint, state.served_names[0])
        try:
            import uvloop
        except ImportError:
            asyncio.run(_serve(state, listener, protocol))
        else:
            uvloop.run(_serve(state, listener, protocol))
    if state.tracer is not None:
        state.tracer.shutdown()
    return 0


async def _serve(
    state: ServerState, listener: socket.socket, protocol: type[LimitedHttpProtocol]
) -> None:
    server = DrainingServer(state, protocol)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(state.engine.start())
    background: list[asyncio.Task[None]] = []
    try:
        await _tell_while_loading(state, serving, loading)
        if not loading.done():
            serving.result()
            logger.info("stopped before the model was loaded")
            return
        loading.result()
        state.mark_ready()
        freeze_heap()
        _announce(state, listener)
        background.append(asyncio.create_task(_log_statistics(state)))
        background.append(asyncio.create_task(_watch(state, server)))
        await serving
        if state.engine.dead_error is not None:
            raise EngineDeadError(f"the engine stopped: {state.engine.dead_error}")
    finally:
        for task in (*background, loading):
            task.cancel()
        server.should_exit = True
        await asyncio.wait((serving, loading))
        if loading.done() and not loading.cancelled() and loading.exception() is None:
            await state.engine.shutdown()


class DrainingServer(uvicorn.Server):
    """uvicorn, but signals let running requests finish first, and the exit status is 0."""

    def __init__(self, state: ServerState, protocol: type[LimitedHttpProtocol]) -> None:
        settings = state.settings
        _share_log(settings.uvicorn_log_level, not settings.disable_uvicorn_access_log)
        super().__init__(
            uvicorn.Config(
                create_app(state),
                http=protocol,
                ws="none",  # a library of WebSockets would take connections out of these limits
                lifespan="off",
                log_config=None,
                access_log=not settings.disable_uvicorn_access_log,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT,
            )
        )
        self._state = state
        self._timeout = settings.shutdown_timeout
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = heeded()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._draining is None:
            self._state.draining = True
            self._draining = asyncio.create_task(self._drain())
        elif number in AT_ONCE:
            logger.warning("stopping at once")
            self._draining.cancel()
            self._end_requests()
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        if self._state.generations:
            logger.info(
                "shutting down: %d running requests get %.0f s to finish "
                "(signal again to stop at once)",
                len(self._state.generations),
                self._timeout,
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while self._state.generations and loop.time() < deadline:
            await asyncio.sleep(0.05)
        self._end_requests()
        self.should_exit = True

    def _end_requests(self) -> None:
        for generation in list(self._state.generations):
            generation.fail(unavailable("the server is shutting down", "draining"))


async def _tell_while_loading(
    state: ServerState, serving: asyncio.Task[None], loading: asyncio.Task[None]
) -> None:
    """Wait until the model is loaded or the server is stopped. Log every ten seconds what is being
    done; check the tokenizer as soon as there is one."""
    started, tasks = time.monotonic(), (serving, loading)
    told, checked = 1, False
    while not (serving.done() or loading.done()):
        await asyncio.wait(tasks, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
        if not checked and state.engine.tokenizer is not None:
            state.check_tokenizer()
            checked = True
        seconds = time.monotonic() - started
        if seconds > told * _LOG_INTERVAL and not loading.done():
            logger.info("still loading, for %.0f s: %s", seconds, state.engine.stage)
            told += 1


def _connections_that_fit(wanted: int) -> int:
    """``wanted``, or fewer if the limit of open files is lower. Raises that limit if it may;
    ``ConfigError`` if nothing could start under it."""
    try:
        import resource
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        with contextlib.suppress(ValueError, OSError):
            most = wanted + _OTHER_FILES if hard == resource.RLIM_INFINITY else hard
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
            soft = max(soft, most)
    if soft < _LEAST_FILES:
        raise ConfigError(
            f"the system allows {soft} open files (ulimit -n), and a server needs {_LEAST_FILES}"
        )
    if wanted <= soft - _OTHER_FILES:
        return wanted
    most = max(soft - _OTHER_FILES, 1)
    logger.warning(
        "--max-connections %d is lowered to %d: the system allows %d open files", wanted, most, soft
    )
    return most


async def _watch(state: ServerState, server: DrainingServer) -> None:
    """End the server when the engine has died, so that a supervisor can start a new one."""
    while state.engine.dead_error is None:
        await asyncio.sleep(0.5)
    await asyncio.sleep(1.0)  # open requests get their error first
    server.should_exit = True


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """What HTTPS is served with, if it is. ``ConfigError`` if its files cannot be read."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as exc:  # SSLError is an OSError
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile, --ssl-ca-certs: {exc}") from None
    return context


def _share_log(level: str, access: bool) -> None:
    """uvicorn's records in kvserve's format, on stderr."""
    for name, lowest in (("uvicorn.error", level), ("uvicorn.access", "info")):
        child = logging.getLogger(name)
        child.handlers = logger.handlers if access or name != "uvicorn.access" else []
        child.propagate = False
        child.setLevel(lowest.upper())
    logging.getLogger("uvicorn.access").addFilter(_is_no_probe)


def _is_no_probe(record: logging.LogRecord) -> bool:
    """``False`` for health checks and scrapes: they come every second and would hide requests."""
    return not isinstance(record.args, tuple) or record.args[2] not in _PROBES


# ---- what the user sees -----------------------------------------------------------------------


async def _log_statistics(state: ServerState) -> None:
    """Log a line of statistics every ten seconds, unless the engine is idle."""
    old, before, known = EngineStats(), time.monotonic(), Counter[str]()
    while True:
        await asyncio.sleep(_LOG_INTERVAL)
        new, now, prefix = state.engine.stats, time.monotonic(), state.metrics.prefix
        found, seconds = prefix - known, now - before
        prompt = new.prompt_tokens_total - old.prompt_tokens_total
        generated = new.generation_tokens_total - old.generation_tokens_total
        if prompt or generated or new.num_running or new.num_waiting:
            logger.info(
                "prompt %.1f tok/s, generation %.1f tok/s, Running: %d, Waiting: %d, "
                "KV usage: %.1f%%, prefix hits: %.1f%%, tokens held/logical: %d/%d, "
                "blocks released: %d",
                prompt / seconds,
                generated / seconds,
                new.num_running,
                new.num_waiting,
                100 * new.kv_cache_usage,
                100 * found["hits"] / max(found["queries"], 1),
                new.tokens_held,
                new.tokens_logical,
                new.blocks_released_total - old.blocks_released_total,
            )
        old, before, known = new, now, prefix


def _announce(state: ServerState, listener: socket.socket) -> None:
    """The start-up table, then the address."""
    address = address_of(state.settings, listener)
    rows = [*state.engine.info.summary, *_server_rows(state)]
    names = ", ".join(state.served_names)
    say(
        f"{table(('feature', 'state', 'why'), rows)}\n"
        f"kvserve {__version__} serves {names} on {address}{state.settings.root_path}\n"
    )


def _server_rows(state: ServerState) -> list[Row]:
    settings, compression = state.settings, state.config.compression
    form, keys, file = state.chat, settings.api_key, settings.api_key_file
    given = [f"{len(keys)} given"] * bool(keys) + [f"those in {file}"] * (file is not None)
    reasoning = "off" if form.reasoning is None else form.reasoning.name
    tools = form.tools.name if form.tools else "required and named"
    shown = (
        "--tool-call-parser" if settings.tool_call_parser else "as the chat template writes calls"
    )
    overrides = {"all": "on", "none": "off"}.get(
        compression.allow_request_policy, ", ".join(compression.request_policies)
    )
    return [
        ("kv_policy in requests", overrides, "--allow-request-policy"),
        ("api keys", _on(settings.has_keys), ", and ".join(given) or "--api-key is not given"),
        ("live page", _on(settings.ui), "/" if settings.ui else "--no-ui"),
        ("kv_trace in requests", _on(settings.allow_kv_trace), "--allow-kv-trace"),
        ("metrics", "on", "/metrics" + (", also as vllm:*" if settings.vllm_metrics else "")),
        ("reasoning", "harmony" if form.harmony else reasoning, "--reasoning-parser"),
        ("tools", "harmony" if form.harmony else tools, shown),
        ("queue", f"{settings.max_queued_requests} sequences", "--max-queued-requests"),
        ("traces", settings.otlp_traces_endpoint or "off", "--otlp-traces-endpoint"),
        ("drain on SIGTERM", f"{settings.shutdown_timeout:g} s", "--shutdown-timeout"),
    ]


def _on(value: object) -> str:
    return "on" if value else "off"


def table(head: Row, rows: Sequence[Row]) -> str:
    """Rows in columns as wide as their content; a very long state shifts its own reason only."""
    lines = [head, *rows]
    names = max(len(name) for name, _, _ in lines)
    states = max(len(state) for _, state, _ in lines if len(state) <= _WIDEST_STATE)
    return "\n".join(
        f"{name:{names}}  {state:{states}}  {why}".rstrip() for name, state, why in lines
    )
