"""Commands of the pages: every flag exists, and what needs no GPU and no network runs.

``make test`` reads them with the program's own parsers and runs the quick ones; ``make test-long``
runs all others, the measurements with few prompts (``small.py``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.commands.evaluate import check_arguments
from kvserve.config import EngineConfig
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.policies.registry import make_policy
from kvserve.server.cli import commands
from kvserve.server.settings.reading import read_settings
from tests.docs.pages import ALL_FENCES, NEEDS, ROOT, SERVED, Fence
from tests.docs.small import small
from tests.waiting import WAIT

COMMANDS = [(fence, words) for fence in ALL_FENCES for words in fence.commands]
OURS = [(fence, words[1:]) for fence, words in COMMANDS if words[0] == "kvserve"]
QUICK = ("policies", "collect-env", "inspect")
CLIENTS = ("chat", "complete", "bench serve")


def where(item: tuple[Fence, list[str]]) -> str:
    fence, words = item
    return f"{fence.page}:{fence.line} {' '.join(words)[:40]}"


def split(words: list[str]) -> tuple[str, list[str]]:
    name, rest = commands._split(list(words))
    return name, rest


def run_here(words: list[str]) -> None:
    assert commands.run(words) == 0, f"kvserve {' '.join(words)}"


def test_the_pages_have_commands() -> None:
    assert len(OURS) > 20
    assert {fence.page for fence, _ in OURS} >= {"README.md", "docs/start.md", "docs/accuracy.md"}


def test_a_mark_says_what_it_needs() -> None:
    for fence in ALL_FENCES:
        place = f"{fence.page}:{fence.line}"
        assert fence.mark in {"", SERVED, *NEEDS}, place
        if fence.mark:
            assert fence.commands or fence.language == "python", f"{place} marks no command"


@pytest.mark.parametrize("item", OURS, ids=where)
def test_flags_are_those_of_the_program(item: tuple[Fence, list[str]]) -> None:
    name, argv = split(item[1])
    args = commands.parser_of(name).parse(argv)
    if name == "serve":
        config, _ = read_settings(args)
        make_policy({"name": config.compression.policy, **config.compression.policy_args})
    if name == "eval":
        check_arguments(args)


def test_the_sample_of_a_settings_file_is_read(tmp_path: Path) -> None:
    samples = [fence for fence in ALL_FENCES if fence.language == "yaml"]
    assert [fence.page for fence in samples] == ["docs/reference.md"]
    file = tmp_path / "server.yaml"
    for fence in samples:
        file.write_text(fence.body)
        config, _ = read_settings(commands.parser_of("serve").parse(["--config", str(file)]))
        policy = config.compression
        assert make_policy({"name": policy.policy, **policy.policy_args}).name == "kara"


@pytest.mark.parametrize(
    "item", [i for i in COMMANDS if i[1][0] == "make" and not i[0].mark], ids=where
)
def test_make_has_the_target(item: tuple[Fence, list[str]]) -> None:
    targets = [word for word in item[1][1:] if "=" not in word]
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True)
    assert targets and done.returncode == 0, done.stderr


@pytest.mark.parametrize("item", [i for i in OURS if i[1][0] in QUICK], ids=where)
def test_quick_commands_run(
    item: tuple[Fence, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(item[1])
    assert capsys.readouterr().out


def runs(item: tuple[Fence, list[str]]) -> bool:
    name, _ = split(item[1])
    return not item[0].mark and name not in (*QUICK, *CLIENTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("item", [i for i in OURS if runs(i)], ids=where)
def test_commands_run(
    item: tuple[Fence, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name, argv = split(item[1])
    if name == "serve":
        config, _ = read_settings(commands.parser_of(name).parse(argv))
        start_small(config)
    else:
        run_here([*name.split(), *small(name, argv, tmp_path)])


def start_small(config: EngineConfig) -> None:
    """An engine with these settings on the model that ships: what a server starts first."""
    policy = config.compression
    core = EngineCore(
        EngineConfig.from_flat(
            model="kvserve/tiny",
            policy=policy.policy,
            policy_args=policy.policy_args,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            max_num_seqs=4,
        )
    )
    assert core.info.policy_name == policy.policy


BENCHES = [
    (fence, words)
    for fence, words in COMMANDS
    if words[0] in ("python", "python3") and fence.mark != "needs a GPU"
]


@pytest.mark.slow
@pytest.mark.parametrize("item", BENCHES, ids=where)
def test_scripts_know_their_flags(item: tuple[Fence, list[str]]) -> None:
    """Measurements that take minutes or other engines: started for their help alone."""
    words = item[1][1:]
    script = words[:2] if words[0] == "-m" else words[:1]
    done = subprocess.run(
        [sys.executable, *script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    for flag in (word for word in words if word.startswith("--")):
        assert flag in done.stdout, flag
