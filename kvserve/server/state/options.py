"""The settings that the routes use."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from kvserve.config import EngineConfig
from kvserve.log import ConfigError
from kvserve.server.settings.serve_settings import ServeSettings


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the HTTP side; the engine's are in ``EngineConfig``."""

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    guard_metrics: bool = True
    vllm_metrics: bool = True
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ("*",)
    """Names that ``Host`` may say of a server without keys, beside addresses and its own name."""
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    root_path: str = ""
    docs: bool = True
    ui: bool = True
    allow_kv_trace: bool = False
    max_body_bytes: int = 16 * 2**20
    ping_interval: float = 15.0
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    auto_tools: bool = False
    log_requests: bool = False
    max_queued: int = 4096
    """The most sequences that wait, in addition to those that run."""

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None


def server_options(config: EngineConfig, settings: ServeSettings) -> ServerOptions:
    """Those of ``settings``, under the names that routes know them by."""
    names = {item.name for item in fields(ServerOptions)} & vars(settings).keys()
    renamed = {
        "served_names": settings.served_model_name or (config.model.model,),
        "api_keys": settings.api_key,
        "guard_metrics": not settings.open_metrics,
        "allowed_hosts": ("*",) if settings.uds else (settings.host, *settings.allowed_hosts),
        "root_path": settings.root_path.rstrip("/"),
        "max_body_bytes": settings.max_body_size,
        "chat_template": _read_template(settings.chat_template),
        "tool_parser": settings.tool_call_parser,
        "auto_tools": settings.enable_auto_tool_choice,
        "max_queued": settings.max_queued_requests,
        "log_requests": settings.enable_log_requests,
    }
    return ServerOptions(**{name: getattr(settings, name) for name in names} | renamed)


def _read_template(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text()
    except OSError as exc:
        raise ConfigError(f"--chat-template: cannot read {path}: {exc.strerror}") from None
