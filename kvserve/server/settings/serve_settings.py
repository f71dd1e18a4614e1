"""The settings of the HTTP server; its flags are made from them."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve.fields import check_limits, setting
from kvserve.log import ConfigError

# Listed here and not only where they are built, so that ``--help`` need not load the server.
REASONING_PARSERS = ("deepseek_r1", "openai_gptoss", "qwen3")
REASONING_PARSER_SYNONYMS = {
    **dict.fromkeys(("ernie45", "kimi_k2", "minimax_m2", "step3"), "deepseek_r1"),
    **dict.fromkeys(("deepseek_v3", "glm45", "glm47", "holo2", "mimo"), "qwen3"),
    **dict.fromkeys(("nemotron_v3", "olmo3", "step3p5"), "qwen3"),
}
TOOL_PARSERS = (
    *("deepseek_v3", "gemma4", "hermes", "hunyuan_a13b", "kimi_k2", "llama3_json", "minimax_m2"),
    *("mistral", "olmo3", "openai", "pythonic"),
)
TOOL_PARSER_SYNONYMS = {
    **dict.fromkeys(("apertus", "cohere", "cohere_command3", "cohere_command4"), "hermes"),
    **dict.fromkeys(("ernie45", "gigachat3", "glm45", "glm47", "granite", "granite4"), "hermes"),
    **dict.fromkeys(("hy_v3", "internlm", "jamba", "mimo", "minimax", "nemotron"), "hermes"),
    **dict.fromkeys(("phi4_mini_json", "poolside_v1", "qwen3_coder", "qwen3_xml"), "hermes"),
    **dict.fromkeys(("seed_oss", "step3p5"), "hermes"),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "minicpm5"), "minimax_m2"),
    **{"deepseek_v31": "deepseek_v3", "functiongemma": "gemma4"},
    **{"lfm2": "pythonic", "llama4_pythonic": "pythonic"},
    **{"llama4_json": "llama3_json", "xlam": "llama3_json"},
}
"""vLLM's names of what one of these reads."""
_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The HTTP side of ``kvserve serve``; the engine's settings are in ``EngineConfig``.

    Raises ``ConfigError``, which names the flag, if a value is out of range.
    """

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = setting(8000, "port to listen on; 0 takes a free one", least=0, most=2**16 - 1)
    served_model_name: tuple[str, ...] = setting(
        (), "names clients may use, the first in answers (default: --model)"
    )
    api_key: tuple[str, ...] = setting(
        (),
        "keys clients must send as 'Authorization: Bearer KEY' (default: none needed); all users "
        "of this machine can read a command line: better --api-key-file or KVSERVE_API_KEY",
    )
    api_key_file: str | None = setting(
        None, "file with more keys, one a line (# begins a comment); read again when it changes"
    )
    open_metrics: bool = setting(False, "serve /metrics without a key")
    vllm_metrics: bool = setting(True, "repeat the common metrics under vllm's names")
    chat_template: str | None = setting(
        None,
        "file with a Jinja chat template, instead of the tokenizer's; 'hermes' comes with kvserve: "
        "tools for models of ChatML whose own writes none",
    )
    trust_request_chat_template: bool = setting(
        False, "let requests send a chat_template, a program; loops end after 20 s"
    )
    reasoning_parser: str | None = setting(
        None,
        "format of the model's reasoning; chat answers then have it apart from content",
        choices=REASONING_PARSERS,
        synonyms=REASONING_PARSER_SYNONYMS,
    )
    tool_call_parser: str | None = setting(
        None,
        "how the model writes tool calls (default: as its chat template writes them)",
        choices=TOOL_PARSERS,
        synonyms=TOOL_PARSER_SYNONYMS,
    )
    enable_auto_tool_choice: bool = setting(
        False, "do not start if it is not known how the model writes tool calls"
    )
    max_queued_requests: int = setting(
        4096, "most sequences waiting beyond --max-num-seqs; further requests get a 429", least=0
    )
    uds: str | None = setting(None, "Unix domain socket to listen on instead of --host and --port")
    ssl_keyfile: str | None = setting(None, "private key, to serve HTTPS")
    ssl_certfile: str | None = setting(None, "certificate, to serve HTTPS")
    ssl_ca_certs: str | None = setting(
        None, "certificates of authorities; clients must show one that these have signed"
    )
    shutdown_timeout: float = setting(
        25.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C", least=0
    )
    root_path: str = setting("", "path prefix under which a proxy publishes the server")
    allowed_origins: tuple[str, ...] = setting(
        (), "origins whose web pages may call the server (CORS; '*' is any)"
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names under which clients reach a server without --api-key, beside addresses, localhost "
        "and its own name ('*': any, which lets web pages in by DNS rebinding)",
    )
    allow_credentials: bool = setting(False, "let pages of --allowed-origins send cookies")
    allowed_methods: tuple[str, ...] = setting(
        ("*",), "HTTP methods that pages of --allowed-origins may use"
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",), "headers that pages of --allowed-origins may send"
    )
    max_body_size: int = setting(
        16 * 2**20, "largest request body in bytes (accepts 16MiB)", least=1
    )
    read_timeout: float = setting(
        30.0, "seconds in which a client must send a request's head, and again its body", above=0
    )
    write_timeout: float = setting(
        30.0,
        "seconds after which a client that does not read its answer (1 KiB a second) is cut off",
        above=0,
    )
    max_connections: int = setting(
        4096,
        "most connections open at once; above it, the connection whose request is awaited longest "
        "is closed; if no request is awaited, the new connection gets a 503",
        least=1,
    )
    docs: bool = setting(True, "serve the API's documentation at /docs")
    ui: bool = setting(True, "serve the live page at /")
    allow_kv_trace: bool = setting(
        False, "let requests ask which positions are dropped (kv_trace: true)"
    )
    otlp_traces_endpoint: str | None = setting(
        None, "OTLP endpoint for OpenTelemetry spans, one per prompt (extra otel)"
    )
    log_level: str = setting("info", "verbosity of kvserve's log", choices=_LEVELS)
    uvicorn_log_level: str = setting(
        "warning", "verbosity of the HTTP server's log", choices=_LEVELS
    )
    enable_log_requests: bool = setting(False, "log each request's id, sizes and sampling")
    disable_uvicorn_access_log: bool = setting(False, "no log line per HTTP request")
    ping_interval: float = 15.0
    """Seconds after which a quiet stream has a comment; no flag."""

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile go together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs goes with --ssl-certfile and --ssl-keyfile")
        if self.uds is not None and (not self.uds or "\0" in self.uds):
            raise ConfigError(f"--uds must be the name of a file, not {self.uds!r}")
        if not all(self.api_key):
            raise ConfigError("--api-key must not be empty")
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key) or self.api_key_file is not None
