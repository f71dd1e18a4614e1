"""What the routes share: the engine they talk to, the server's own settings, and its phase."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

import kvserve
from kvserve.config import EngineConfig
from kvserve.log import ConfigError, RequestError
from kvserve.server.parsers.chat_format import ChatFormat, find_format
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.beside import within
from kvserve.server.state.engine_protocol import Engine, OpenRequest, PromptTokenizer
from kvserve.server.state.errors import ApiError, too_many, unavailable
from kvserve.server.state.metrics import Metrics, Phase

if TYPE_CHECKING:
    from kvserve.server.state.tracing import Tracer

TEMPLATE_SECONDS = 20.0
"""For all that is tried of a chat template, which takes a fraction of a second: at the start, or of
one that a request brings."""


@dataclass
class ServerState:
    """Phases: loading (not ``ready``), ready, ``draining``. Only a ready server admits requests."""

    engine: Engine
    config: EngineConfig
    settings: ServeSettings
    tracer: Tracer | None = None
    ready: bool = False
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    generations: set[OpenRequest] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.served_names = self.settings.served_model_name or (self.config.model.model,)
        self.chat_template = _read_template(self.settings.chat_template)
        names, mirror = self.served_names, self.settings.vllm_metrics
        self.metrics = Metrics(self.engine, self.config, names[0], lambda: self.phase, vllm=mirror)
        self.default_sampling: dict[str, Any] = {}
        self.chat = ChatFormat()
        others = {k: v for k, v in asdict(self.config).items() if k != "compression"}
        self._config_digest = hashlib.sha256(_canonical(others))

    @property
    def phase(self) -> Phase:
        if self.engine.dead_error is not None:
            return "dead"
        if not self.ready:
            return "loading"
        return "draining" if self.draining else "ready"

    def mark_ready(self) -> None:
        """Admit requests from now on. ``ConfigError`` if the model lacks what a flag needs."""
        self.check_tokenizer()
        self.default_sampling = dict(self.engine.info.default_sampling)
        self.ready = True

    def check_tokenizer(self) -> None:
        """Raises ``ConfigError`` if the tokenizer lacks what a flag needs."""
        settings = self.settings
        parsers = settings.tool_call_parser, settings.reasoning_parser
        find = partial(find_format, self.engine.tokenizer, self.chat_template, *parsers)
        try:
            self.chat = within(TEMPLATE_SECONDS, find)
        except TimeoutError:
            raise ConfigError(
                f"--chat-template: the model's does not end within {TEMPLATE_SECONDS:g} s; "
                "give another"
            ) from None
        known = self.chat.harmony or self.chat.tools is not None
        if settings.enable_auto_tool_choice and not known:
            raise ConfigError(
                "--enable-auto-tool-choice: the chat template does not show how the model writes "
                "tool calls; name the format with --tool-call-parser"
            )

    def check_ready(self) -> None:
        if not self.ready:
            raise unavailable("the model is still loading", "loading")

    def check_health(self) -> None:
        self.check_ready()
        if self.engine.dead_error is not None:
            raise ApiError(503, f"the engine stopped: {self.engine.dead_error}", code="engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down", "draining")

    def check_runs(self) -> None:
        """503 while a signal has stopped the engine: requests are admitted, and wait for it."""
        if self.engine.suspended:
            raise unavailable("the engine's process is stopped (SIGCONT)", "engine_suspended")

    def check_model(self, model: str | None) -> str:
        """The model's name in the answer: ``model``, or the first served. 404 if not served."""
        names = self.served_names
        if model is not None and model not in names:
            raise ApiError(
                404,
                f"the model {model!r} does not exist; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return model or names[0]

    def check_trace(self, kv_trace: bool | None) -> None:
        """``RequestError`` if ``kv_trace`` is true and this server does not allow it."""
        if kv_trace and not self.settings.allow_kv_trace:
            raise RequestError(
                "kv_trace is off on this server (start it with --allow-kv-trace)",
                param="kv_trace",
                code="kv_trace_not_allowed",
            )

    def check_allowed(self, kv_policy: str | Mapping[str, Any] | None) -> None:
        """``RequestError`` if requests may not choose this policy. The engine checks the rest."""
        name = kv_policy.get("name") if isinstance(kv_policy, Mapping) else kv_policy
        compression = self.config.compression
        if name in (None, "none") or compression.allow_request_policy == "all":
            return
        allowed = ["none"]
        if compression.allow_request_policy == "listed":
            allowed += compression.request_policies
        if name not in allowed:
            raise RequestError(
                f"kv_policy: this server allows {', '.join(allowed)} "
                f"(--allow-request-policy {compression.allow_request_policy})",
                param="kv_policy",
                code="policy_not_allowed",
            )

    def check_queue(self, prompts: int, n: int, client: str) -> None:
        """429 if the queue has no room for ``n`` more sequences a prompt, 400 if it never has.

        An eighth more places are for clients that have fewer sequences than that: a client that
        fills the queue turns away itself, not others.
        """
        most = self.config.scheduler.max_num_seqs + self.settings.max_queued_requests
        count, name = prompts * n, "prompt" if prompts > most or n == 1 else "n"
        if count > most:
            said = f"{name}: {count} sequences at once, and this server queues at most {most}"
            raise RequestError(said, param=name)
        own = count + sum(each.num_sequences for each in self.generations if each.client == client)
        spare = max(most // 8, 1)
        room = most + spare if own <= spare else most
        if count + sum(generation.num_sequences for generation in self.generations) > room:
            raise too_many("the queue is full (--max-queued-requests)", "queue_full")

    def fingerprint(self, kv_policy: str | Mapping[str, Any] | None) -> str:
        """``system_fingerprint``: the same for equal settings and equal KV policies."""
        compression = self.config.compression
        if kv_policy is None:
            policy = {"name": compression.policy, **compression.policy_args}
        else:
            policy = {"name": kv_policy} if isinstance(kv_policy, str) else dict(kv_policy)
        digest = self._config_digest.copy()
        digest.update(_canonical(policy))
        return f"kvserve-{kvserve.__version__}-{digest.hexdigest()[:12]}"

    def require_tokenizer(self, param: str) -> PromptTokenizer:
        if self.engine.tokenizer is None:
            raise RequestError(
                f"{param}: this server has no tokenizer (--skip-tokenizer-init); send token ids "
                "to /v1/completions",
                param=param,
            )
        return self.engine.tokenizer


def _read_template(path: str | None) -> str | None:
    """A file's, or one that comes with the package, by its name."""
    if path is None:
        return None
    own = Path(kvserve.__file__).parent / "data" / "templates" / f"{path}.jinja"
    try:
        return (Path(path) if Path(path).exists() or not own.is_file() else own).read_text()
    except OSError as exc:
        raise ConfigError(f"--chat-template: cannot read {path}: {exc.strerror}") from None


def _canonical(settings: Mapping[str, Any]) -> bytes:
    return orjson.dumps(settings, default=str, option=orjson.OPT_SORT_KEYS)
