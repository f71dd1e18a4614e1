"""The command line: flags, precedence, errors in one line, and what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvserve.config import EngineConfig
from kvserve.fields import read_size
from kvserve.server.cli import commands as cli
from kvserve.server.cli import serve
from kvserve.server.settings import reading
from kvserve.server.settings.args import Parser, UsageError
from kvserve.server.settings.serve_settings import ServeSettings


def settings(*argv: str) -> tuple[EngineConfig, ServeSettings]:
    parser = Parser(prog="kvserve serve")
    serve.add_arguments(parser)
    return reading.read_settings(parser.parse(argv))


# ---- flags ------------------------------------------------------------------------------------


KARA = {"window": 32, "ratio": "1/3", "align": "block", "protect_prompt": True, "buffer": 8}


@pytest.mark.parametrize(
    ("argv", "engine", "server"),
    [
        ((), {}, {}),
        (("m",), {"model": "m"}, {}),
        (("m", "--model", "m"), {"model": "m"}, {}),
        (
            (
                *("--model-path", "m", "--max-model-len=32k", "--kv-cache-memory", "1.5GiB"),
                *("--gpu-memory-utilization", "0.5", "--no-enable-chunked-prefill"),
                *("--cudagraph-capture-sizes", "8", "1k", "--dtype", "float16", "-tp", "1"),
                *("--seed", "-3", "--port", "0", "--shutdown-timeout", "2.5"),
            ),
            {"model": "m", "max_model_len": 32_000, "kv_cache_memory": 3 * 2**29}
            | {"gpu_memory_utilization": 0.5, "enable_chunked_prefill": False}
            | {"cudagraph_capture_sizes": (8, 1000), "dtype": "float16", "seed": -3},
            {"port": 0, "shutdown_timeout": 2.5},
        ),
        (
            (
                *("--request-policies", "kara", "snapkv", "--allow-request-policy", "listed"),
                *("--allowed-origins", "http://a", "http://b"),
            ),
            {"request_policies": ("kara", "snapkv"), "allow_request_policy": "listed"},
            {"allowed_origins": ("http://a", "http://b")},
        ),
        (
            (
                *("--disable-log-requests", "m", "--disable-log-stats", "--max_num_seqs=3"),
                *("--max-seq-len-to-capture", "8192", "--no-enable-lora", "--task", "generate"),
                *("--api-server-count=1", "--kv-cache-dtype", "fp8_e4m3", "--max_model_len", "64"),
                *("--cpu_offload_gb", "0", "--no_enable_prefix_caching"),
                *("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "glm45"),
            ),
            {"model": "m", "max_num_seqs": 3, "kv_cache_dtype": "fp8", "max_model_len": 64}
            | {"enable_prefix_caching": False},
            {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
        ),
        (
            (
                *("--policy", "kara", "--policy.window", "32", "--policy.ratio=1/3"),
                *("--policy.align", "block", "--policy.protect-prompt", "true"),
                *("--policy-args", '{"buffer": 8}'),
            ),
            {"policy": "kara", "policy_args": KARA},
            {},
        ),
        (("--policy.window", "-1"), {"policy_args": {"window": -1}}, {}),
        (("--policy.decay", ".5"), {"policy_args": {"decay": 0.5}}, {}),
        (("--policy.decay", "-.5"), {"policy_args": {"decay": -0.5}}, {}),
    ],
)
def test_flags_are_settings(
    argv: tuple[str, ...], engine: dict[str, Any], server: dict[str, Any]
) -> None:
    assert settings(*argv) == (EngineConfig.from_flat(**engine), ServeSettings(**server))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("7", 7), ("32k", 32_000), ("32K", 32_768), ("32Ki", 32_768), ("1.5k", 1500)),
        *(("2GiB", 2**31), ("2G", 2**31), ("2GB", 2 * 10**9), ("512MiB", 2**29), ("1t", 10**12)),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1x", "0x10", "1 2"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        read_size(text)


# ---- precedence -------------------------------------------------------------------------------


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("port: 1\nseed: 1\nmax-num-seqs: 10\nserved_model_name: [a, b]\n")
    monkeypatch.setenv("KVSERVE_PORT", "2")
    monkeypatch.setenv("KVSERVE_SEED", "2")
    monkeypatch.setenv("KVSERVE_API_KEY", "k1, k2")
    monkeypatch.setenv("KVSERVE_ENFORCE_EAGER", "true")
    monkeypatch.setenv("KVSERVE_MAX_MODEL_LEN", "1k")
    config, server = settings("--config", str(path), "--port", "3")
    assert server.port == 3
    assert config.model.seed == 2
    assert config.scheduler.max_num_seqs == 10
    assert config.model.dtype == "auto"
    assert server.served_model_name == ("a", "b")
    assert server.api_key == ("k1", "k2")
    assert config.enforce_eager is True
    assert config.model.max_model_len == 1000
    monkeypatch.setenv("KVSERVE_CONFIG", str(path))
    assert settings()[0].scheduler.max_num_seqs == 10


def test_a_policy_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("policy: {name: kara, window: 768, buffer: 8}\n")
    config, _ = settings("--config", str(path), "--policy.window", "32")
    assert config.compression.policy == "kara"
    assert config.compression.policy_args == {"window": 32, "buffer": 8}
    config, _ = settings("--config", str(path), "--policy", "snapkv", "--policy.budget", "5")
    assert config.compression.policy_args == {"budget": 5}, "kara's window is not snapkv's"


@pytest.mark.parametrize(
    "content",
    [
        "policy: kara\npolicy.window: 32\npolicy.ratio: 1/3\npolicy.protect-prompt: true",
        "policy: {name: kara, window: 32, ratio: 1/3, protect-prompt: true}",
        "policy: kara\npolicy-args: {window: 32, ratio: 1/3, protect_prompt: true}",
        "policy_args: '{\"window\": 32}'\npolicy: {name: kara, ratio: 1/3}\n"
        "policy.protect_prompt: yes",
    ],
)
def test_a_policys_fields_in_a_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    config, _ = settings("--config", str(path))
    fields = {"window": 32, "ratio": "1/3", "protect_prompt": True}
    assert (config.compression.policy, config.compression.policy_args) == ("kara", fields)


def test_a_policys_fields_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("policy: kara\npolicy.window: 768\npolicy.buffer: 8\npolicy.period: 64\n")
    monkeypatch.setenv("KVSERVE_POLICY_WINDOW", "64")
    monkeypatch.setenv("KVSERVE_POLICY_PROTECT_PROMPT", "true")
    config, _ = settings("--config", str(path), "--policy.buffer", "16")
    fields = {"window": 64, "buffer": 16, "period": 64, "protect_prompt": True}
    assert config.compression.policy_args == fields
    monkeypatch.setenv("KVSERVE_POLICY", "snapkv")
    config, _ = settings("--config", str(path))
    assert config.compression.policy_args == {"window": 64, "protect_prompt": True}
    monkeypatch.setenv("KVSERVE_POLICY_ARGS", '{"window": 32}')
    with pytest.raises(UsageError, match="window is given twice: "):
        settings()


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("MAX_NUM_SEQ", "unknown setting 'max_num_seq'; did you mean max_num_seqs?"),
        ("ENABLE_LORA", "enable_lora is not supported"),
        ("WINDOW", "unknown setting 'window'"),
    ],
)
def test_a_wrong_variable(variable: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"KVSERVE_{variable}", "1")
    with pytest.raises(UsageError) as caught:
        settings()
    assert str(caught.value).startswith(f"KVSERVE_{variable}: {expected}")


def test_variables_that_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVE_PORT", "tcp://10.0.0.1:8000")  # Kubernetes, of a service's name
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_80_TCP_ADDR", "WEB_SERVICE_PORT"):
        monkeypatch.setenv(f"KVSERVE_{name}", "80")
    assert settings()[1].port == 8000
    monkeypatch.setenv("KVSERVE_MAX_NUM_SEQS", "many")
    with pytest.raises(UsageError, match="KVSERVE_MAX_NUM_SEQS: 'many' is not a whole number"):
        settings()


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-num-seq", "3"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--frobnicate"], "unknown flag --frobnicate"),
        (["--max_num_seq", "3"], "unknown flag --max_num_seq; did you mean --max-num-seqs?"),
        (["-O3"], "-O3 is not supported: see --cudagraph-capture-sizes and --enforce-eager"),
        (["-cc.mode=3", "m"], "-cc.mode is not supported: see --cudagraph-capture-sizes"),
        (["--enable-reasoning"], "--enable-reasoning is not supported: see --reasoning-parser"),
        (["--enable-lora", "m"], "--enable-lora is not supported: LoRA adapters are not built"),
        (["--no-disable-log-requests"], "is not supported: requests are logged only with --enable"),
        (["--max-seq-len-to-capture", "4096"], "is not supported: graphs hold any length"),
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--port", "99999"], "--port: '99999' is not an integer of at most 65535"),
        (["--dtype", "int4"], "--dtype: 'int4' is not one of auto, float32"),
        (["--max-model-len", "long"], "--max-model-len/--context-length: 'long' is not a whole"),
        (["--max-model-len"], "expected one argument"),
        (["--block-size", "0"], "--block-size/--page-size: '0' is not an integer of at least 1"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype: 'int4' is not one of auto, int8, k8v4"),
        (["--policy.window"], "--policy.window needs a value"),
        (["--policy.", "3"], "--policy.: name a field"),
        (["--policy-args", "{"], "--policy-args: '{' is not JSON"),
        (["--policy-args", "[1]"], "--policy-args: '[1]' is not a JSON object"),
        (["--policy-args", '{"a": 1, "a": 2}'], "'a' is given twice"),
        (["--policy.window", "1", "--policy.window", "2"], "window is given twice: 1 and 2"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--config", "/nowhere.yaml"], "--config: cannot read /nowhere.yaml"),
        (["m", "n"], "unexpected argument 'n'"),
        (["m", "--model", "n"], "the model is given twice: 'm' and --model 'n'"),
        (["--allowed-origins", '["http://a"]'], "give the values one after the other"),
    ],
)
def test_a_wrong_flag_or_value(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvserve serve: error: ") and err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("prot: 1", "unknown setting 'prot'; did you mean port?"),
        ("hf-token: a", "hf_token is not supported: set HF_TOKEN in the environment"),
        ("port: many", "port: 'many' is not a whole number"),
        ("port: [1]", "port: [1] is not a single value"),
        ("served-model-name: {a: 1}", "is not a list"),
        ("- port", "must hold settings"),
        ("port: {", "is not YAML"),
        ("port: 1\nseed: 2\nport: 1", "line 3: port is given twice"),
        ("policy: {name: kara, window: 1, window: 2}", "line 1: window is given twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 1", "max_num_seqs is given twice"),
        ("policy: {name: kara, window: 1}\npolicy.window: 2", "window is given twice: 1 and 2"),
        ('policy-args: \'{"window": 1, "window": 2}\'', "'window' is given twice"),
    ],
)
def test_a_wrong_file(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        settings("--config", str(path))
    assert expected in str(caught.value) and str(path) in str(caught.value)


# ---- commands ---------------------------------------------------------------------------------


def test_the_exit_status_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, status in ((["--version"], 0), (["version"], 0), (["frobnicate"], 2)):
        monkeypatch.setattr(sys, "argv", ["kvserve", *argv])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == status


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["chat", "--port", "8300"], "unknown flag --port; give --url http://HOST:PORT"),
        (["complete", "--base-url=http://a"], "unknown flag --base-url; give --url http://HOST"),
        (["inspect", "--prompt", "a", "--max-new-tokens", "9"], "follow the prompt as --contin"),
        (["inspect", "--max_new_tokens=9"], "follow the prompt as --contin"),
        (["serve", "--max-tokens", "9"], "a request says it (max_tokens)"),
        (["bench", "serve", "--url", "http://a"], "give --base-url http://HOST:PORT"),
        (["eval", "--task", "x"], "unknown flag --task; give --tasks NAME"),
        (["polices"], "unknown command 'polices'; did you mean policies?"),
    ],
)
def test_a_flag_of_another_command_has_a_hint(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(argv) == 2
    assert expected in capsys.readouterr().err


def test_another_bench_in_the_working_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "bench.py").touch()
    command = [sys.executable, "-m", "kvserve", "tune", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("kvserve tune: error: kvserve's package bench is not found")
    (tmp_path / "bench.py").unlink()
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


def test_half_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench"]) == 2
    assert (
        "'bench' needs one of: bench frontier, bench latency, bench policies"
        in capsys.readouterr().err
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A sub-command that only notes its arguments."""
    seen: list[Any] = []
    module: Any = types.ModuleType("fake_command")

    def add_arguments(parser: Parser) -> None:
        parser.add_argument("--rows", type=int, default=1)
        parser.add_argument("--policy-args", type=json.loads, default={})

    def run(args: Any) -> int:
        if args.rows < 0:
            raise module.error("cannot do\nthat")
        seen.append(args)
        return args.rows

    module.add_arguments, module.run = add_arguments, run
    monkeypatch.setitem(sys.modules, "fake_command", module)
    for name in ("serve", "bench throughput", "eval"):
        monkeypatch.setitem(cli.COMMANDS, name, cli.Command("fake_command", "fake"))
    return seen


def test_dispatch(command: list[Any]) -> None:
    for argv in (["bench", "throughput"], ["eval"], ["serve"], []):
        assert cli.run([*argv, "--rows", "3", "--policy.window", "5"]) == 3
    assert [args.policy_args for args in command] == [{"window": 5}] * 4


def test_failures_are_one_line(command: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    from kvserve.log import ConfigError, EngineDeadError, RequestError

    for kind in (ConfigError, EngineDeadError, RequestError):
        sys.modules["fake_command"].error = kind  # type: ignore[attr-defined]
        assert cli.run(["eval", "--rows", "-1"]) == 1
        assert capsys.readouterr().err == "kvserve eval: error: cannot do that\n"


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVE_API_KEY", "secret")
    monkeypatch.setenv("KVSERVE_SEED", "5")
    assert cli.run(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kvserve"] == "0.1.0" and facts["torch"] and facts["KVSERVE_SEED"] == "5"
    assert "secret" not in str(facts)
    assert cli.run(["collect-env"]) == 0
    assert "python" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kvserve.server.cli.commands import run\n"
        "run(['--help'])\n"
        "run(['serve', '--port', 'x'])\n"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'transformers', 'numpy'}\n"
        "assert not heavy & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
