"""What the routes share: the engine they talk to, the server's own settings, and its phase."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

import kvserve
from kvserve.config import EngineConfig
from kvserve.log import ConfigError, RequestError, logger
from kvserve.outputs import EngineStats, RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.server.errors import ApiError, unavailable
from kvserve.server.metrics import Metrics
from kvserve.server.reasoning import CLOSE, ReasoningParser

if TYPE_CHECKING:
    from kvserve.server.generation import Generation
    from kvserve.server.tracing import Tracer


class Tokenizer(Protocol):
    def describe(self) -> dict[str, Any]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int]: ...


class Engine(Protocol):
    """The part of ``AsyncEngine`` that the server uses."""

    @property
    def summary(self) -> list[tuple[str, str, str]]: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def policy_name(self) -> str: ...
    @property
    def default_sampling(self) -> Mapping[str, Any]: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def stats_by_engine(self) -> Mapping[str, EngineStats]: ...
    @property
    def dead_error(self) -> BaseException | None: ...
    async def start(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]: ...
    async def shutdown(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP side; the engine's are in ``EngineConfig``."""

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    guard_metrics: bool = True
    vllm_metrics: bool = True
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    root_path: str = ""
    docs: bool = True
    max_body_bytes: int = 64 * 2**20
    ping_interval: float = 15.0
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    auto_tools: bool = False
    log_requests: bool = False
    max_queued: int = 4096
    """Sequences beyond those that can run at once."""


@dataclass
class ServerState:
    """Phases: loading (not ``ready``), ready, ``draining``. Only a ready server admits requests."""

    engine: Engine
    config: EngineConfig
    options: ServerOptions
    tracer: Tracer | None = None
    ready: bool = False
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    generations: set[Generation] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine, self.config, self.options)
        self.default_sampling: dict[str, Any] = {}
        self.reasoning: ReasoningParser | None = None
        settings = {k: v for k, v in asdict(self.config).items() if k != "compression"}
        self._config_digest = hashlib.sha256(_canonical(settings))

    def mark_ready(self) -> None:
        """The engine has started. ``ConfigError`` where the model lacks what a flag asks for."""
        if self.options.reasoning_parser is not None:
            self.reasoning = self._reasoning_parser(self.options.reasoning_parser)
        _check_names(self.config.compression.request_policies)
        self.default_sampling = _usable_defaults(self.engine.default_sampling)
        self.ready = True

    def check_ready(self) -> None:
        if not self.ready:
            raise unavailable("the model is still loading", "loading")

    def check_health(self) -> None:
        self.check_ready()
        if self.engine.dead_error is not None:
            raise ApiError(503, f"the engine stopped: {self.engine.dead_error}", code="engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down", "draining")

    def check_model(self, model: str | None) -> str:
        """The name that the answer carries: the one asked for, or the first that is served."""
        names = self.options.served_names
        if model is not None and model not in names:
            raise ApiError(
                404,
                f"the model {model!r} does not exist; this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return model or names[0]

    def check_policy(self, kv_policy: str | Mapping[str, Any] | None) -> None:
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

    def check_queue(self, count: int) -> None:
        """Room for ``count`` more sequences."""
        most = self.config.scheduler.max_num_seqs + self.options.max_queued
        if count > most:
            raise RequestError(
                f"prompt: {count} sequences at once are more than this server queues ({most})",
                param="prompt",
            )
        if count + sum(generation.num_sequences for generation in self.generations) > most:
            raise ApiError(
                429,
                "the queue is full (--max-queued-requests)",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def fingerprint(self, kv_policy: str | Mapping[str, Any] | None) -> str:
        """``system_fingerprint``: equal settings and the same KV policy give equal ones."""
        compression = self.config.compression
        if kv_policy is None:
            policy = {"name": compression.policy, **compression.policy_args}
        else:
            policy = {"name": kv_policy} if isinstance(kv_policy, str) else dict(kv_policy)
        digest = self._config_digest.copy()
        digest.update(_canonical(policy))
        return f"kvserve-{kvserve.__version__}-{digest.hexdigest()[:12]}"

    def _reasoning_parser(self, name: str) -> ReasoningParser:
        tokenizer = self.engine.tokenizer
        ids = [] if tokenizer is None else tokenizer.encode(CLOSE, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"--reasoning-parser: {CLOSE} must be one token of the tokenizer, and is {len(ids)}"
            )
        return ReasoningParser(name, ids[0])

    def require_tokenizer(self, param: str) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError(
                f"{param}: this server has no tokenizer (--skip-tokenizer-init); send token ids "
                "to /v1/completions",
                param=param,
            )
        return self.engine.tokenizer


def _check_names(policies: Sequence[str]) -> None:
    if not policies:
        return
    from kvserve.engine.policies.registry import policy_names

    if unknown := sorted(set(policies) - set(policy_names())):
        names = ", ".join(policy_names())
        raise ConfigError(f"--request-policies: unknown policy {unknown[0]!r}; there are {names}")


def _canonical(settings: Mapping[str, Any]) -> bytes:
    return orjson.dumps(settings, default=str, option=orjson.OPT_SORT_KEYS)


def _usable_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's sampling defaults without those that would make every request fail."""
    usable = dict(defaults)
    while True:
        try:
            SamplingParams(**usable)
            return usable
        except RequestError as exc:
            if exc.param not in usable:
                raise
            logger.warning("generation_config.json: %s is left out: %s", exc.param, exc)
            del usable[exc.param]
