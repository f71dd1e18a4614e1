"""``kvserve serve``: its flags, and the settings they become."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve.config import SECTIONS, EngineConfig, setting
from kvserve.log import ConfigError, configure_logging
from kvserve.server.args import Flag, UsageError, flags_of, read_names, resolve

EXAMPLE = """\
examples:
  kvserve serve kvserve/tiny
  kvserve --model kvserve/tiny --policy kara --policy.window 128 --policy.buffer 16
  kvserve --config server.yaml --port 9000

Every flag may also be an environment variable (--max-num-seqs: KVSERVE_MAX_NUM_SEQS) or a line of a
YAML file (max-num-seqs: 64; policy: {name: kara, window: 128}). The command line wins over the
environment, the environment over the file. --policy.FIELD VALUE sets a field of the policy;
`kvserve policies` lists them. Sizes: 32k is 32,000; 32K and 32Ki are 32,768; 2GiB is 2 x 1024^3.
"""

# Named here, not where they are built: ``--help`` loads nothing of the server.
REASONING_PARSERS = ("deepseek_r1", "qwen3")
TOOL_PARSERS = ("hermes", "internlm", "llama3_json", "mistral")
_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The HTTP side of ``kvserve serve``; the engine's settings are in ``EngineConfig``."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    served_model_name: tuple[str, ...] = setting(
        (), "names clients may use, the first in answers (default: --model)"
    )
    api_key: tuple[str, ...] = setting(
        (), "keys clients must send as 'Authorization: Bearer KEY' (default: none needed)"
    )
    open_metrics: bool = setting(False, "serve /metrics without a key")
    vllm_metrics: bool = setting(True, "repeat the common metrics under vllm's names")
    chat_template: str | None = setting(
        None, "file with a Jinja chat template, instead of the tokenizer's"
    )
    trust_request_chat_template: bool = setting(
        False, "let requests bring a chat_template, which may run as long as it likes"
    )
    reasoning_parser: str | None = setting(
        None, "tell reasoning from content in chat answers", choices=REASONING_PARSERS
    )
    tool_call_parser: str | None = setting(
        None, "how the model writes tool calls", choices=TOOL_PARSERS
    )
    enable_auto_tool_choice: bool = setting(
        False, "let the model decide to call tools (needs --tool-call-parser)"
    )
    max_queued_requests: int = setting(
        4096, "most sequences that wait beyond --max-num-seqs; further requests get a 429"
    )
    uds: str | None = setting(None, "Unix domain socket to listen on instead of --host and --port")
    ssl_keyfile: str | None = setting(None, "private key, to serve HTTPS")
    ssl_certfile: str | None = setting(None, "certificate, to serve HTTPS")
    ssl_ca_certs: str | None = setting(None, "certificates of the authorities that sign clients'")
    shutdown_timeout: float = setting(
        25.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C"
    )
    root_path: str = setting("", "path prefix under which a proxy publishes the server")
    allowed_origins: tuple[str, ...] = setting(
        (), "origins whose web pages may call the server (CORS; '*' is any)"
    )
    allow_credentials: bool = setting(False, "let those pages send cookies")
    allowed_methods: tuple[str, ...] = setting(("*",), "methods that they may use")
    allowed_headers: tuple[str, ...] = setting(("*",), "headers that they may send")
    max_body_size: int = setting(64 * 2**20, "largest request body in bytes (accepts 64MiB)")
    docs: bool = setting(True, "serve the API's documentation at /docs")
    otlp_traces_endpoint: str | None = setting(
        None, "where OpenTelemetry spans go, one per request (extra otel)"
    )
    log_level: str = setting("info", "verbosity of kvserve's log", choices=_LEVELS)
    uvicorn_log_level: str = setting(
        "warning", "verbosity of the HTTP server's log", choices=_LEVELS
    )
    enable_log_requests: bool = setting(False, "log each request's id, sizes and sampling")
    disable_uvicorn_access_log: bool = setting(False, "no log line per HTTP request")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.shutdown_timeout < 0:
            raise ConfigError("--shutdown-timeout must not be negative")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
        if self.max_queued_requests < 0:
            raise ConfigError("--max-queued-requests must not be negative")
        if not all(self.api_key):
            raise ConfigError("--api-key must not be empty")


def engine_flags() -> dict[str, list[Flag]]:
    """Flags by section, in the order of ``EngineConfig``."""
    return {**{name: flags_of(kind) for name, kind in SECTIONS.items()}, "": flags_of(EngineConfig)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kvserve [serve] [MODEL] [FLAGS]"
    parser.epilog = EXAMPLE
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="same as --model")
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with settings"
    )
    for section, flags in {"server": flags_of(ServeSettings), **engine_flags()}.items():
        group = parser.add_argument_group(section or "execution")
        for flag in flags:
            flag.add_to(group)


def run(args: argparse.Namespace) -> int:
    config, settings = read_settings(args)
    configure_logging(settings.log_level)
    from kvserve.server.runner import serve

    return serve(config, settings)


def read_settings(args: argparse.Namespace) -> tuple[EngineConfig, ServeSettings]:
    """All settings from flags, environment and file; ``UsageError`` names what is wrong."""
    given = vars(args).copy()
    model = given.pop("model_tag")
    if model is not None and given.setdefault("model", model) != model:
        raise UsageError(f"the model is given twice: {model!r} and --model {given['model']!r}")
    values = resolve(_flags(), given)
    try:
        return _build(values)
    except ConfigError as exc:
        raise UsageError(str(exc)) from None


def settings_from(values: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    """All settings from names and values as in a file; ``ConfigError`` names what is wrong."""
    return _build(read_names(_flags(), values, "settings"))


def _flags() -> list[Flag]:
    engine = (flag for flags in engine_flags().values() for flag in flags)
    return [*flags_of(ServeSettings), *engine]


def _build(values: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    server = {flag.name for flag in flags_of(ServeSettings)}
    return (
        EngineConfig.from_flat(**{k: _plain(v) for k, v in values.items() if k not in server}),
        ServeSettings(**{k: _plain(v) for k, v in values.items() if k in server}),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
