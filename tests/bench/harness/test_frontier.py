"""`kvserve bench frontier` and `kvserve tune --frontier`: what is joined, and what is chosen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.harness.commands.frontier import joined, usual_file
from kvserve.server.cli import commands as cli
from kvserve.server.cli import serve
from kvserve.server.settings.args import Parser, UsageError
from kvserve.server.settings.reading import read_settings

_POINTS = {  # policy, dtype: bytes, KL, tok/s
    ("none", "auto"): (1.0, 0.0, 100.0),
    ("none", "k8v4"): (0.41, 0.008, 180.0),
    ("none", "k4v4"): (0.31, 0.05, 190.0),
    ("kara:ratio=0.3", "auto"): (0.45, 0.10, 160.0),
    ("kara:ratio=0.3", "k8v4"): (0.19, 0.11, 240.0),
}


def rows() -> list[Any]:
    found, speeds = [], []
    for (policy, dtype), (of_full, kl, rate) in _POINTS.items():
        fields = {"name": "kara", "ratio": 0.3} if ":" in policy else {"name": policy}
        row: dict[str, Any] = {"policy": policy, "policy_args": fields, "kv_cache_dtype": dtype}
        speeds.append(row | {"output_tok_s": rate, "ratio_to_first": rate / 100})
        rest = dict.fromkeys(("mean_held_bytes", "kl_error", "nll_lost", "nll_lost_error"), 0.0)
        found.append(row | rest | {"of_full": of_full, "kl": kl, "facts": 1.0, "same": 1, "n": 8})
    every: list[Any] = list(joined(found, speeds))
    peer = every[1] | {"policy": "vLLM", "policy_args": None, "kl": 0.0, "ratio_to_first": 9.0}
    unmeasured = every[1] | {"kl": 0.0, "ratio_to_first": None}
    return [*every, peer, unmeasured]


def saved(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"rows": rows(), "about": ["a model"], "device": {"name": "a CPU"}}
    file.write_text(json.dumps(document))
    return file


def test_rows_are_joined_and_beaten_ones_are_off_the_frontier() -> None:
    found = {(row["policy"], row["kv_cache_dtype"]): row for row in rows()[:-2]}
    assert {each: row["ratio_to_first"] for each, row in found.items()} == {
        each: rate / 100 for each, (*_, rate) in _POINTS.items()
    }
    beaten = [each for each, row in found.items() if not row["frontier"]]
    assert beaten == [("kara:ratio=0.3", "auto")]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (("--kl", "0.01"), "--policy none --kv-cache-dtype k8v4"),
        (("--kl", "0.2"), "--policy kara --policy.ratio 0.3 --kv-cache-dtype k8v4"),
        (("--bytes", "0.35"), "--policy none --kv-cache-dtype k4v4"),
        (("--speed", "2"), "--policy kara --policy.ratio 0.3 --kv-cache-dtype k8v4"),
        (("--speed", "1.85", "--kl", "0.06"), "--policy none --kv-cache-dtype k4v4"),
    ],
)
def test_tune_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bounds: tuple[str, ...], expected: str
) -> None:
    file = saved(tmp_path / "frontier.json")
    assert cli.run(["tune", "--frontier", str(file), *bounds]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == expected


def settings_of(*argv: str) -> tuple[str, dict[str, Any], str, str]:
    parser = Parser()
    serve.add_arguments(parser)
    config, _ = read_settings(parser.parse(argv))
    found = config.compression
    dtype = config.cache.kv_cache_dtype
    return found.policy, dict(found.policy_args), dtype, found.policy_reason


def test_auto_takes_the_fastest_setting_that_was_measured_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual = usual_file("./models/mine")
    assert usual is not None
    saved(usual), saved(tmp_path / "other.json")
    auto = "--model", "./models/mine", "--policy", "auto"
    said = "chosen by auto for a KL of at most 0.05: KL 0.0500, 0.31 of the full cache's bytes, "
    said += "1.90 times its output tokens per second (a CPU)"
    assert settings_of(*auto) == ("none", {}, "k4v4", said)
    more = settings_of(*auto, "--policy.kl", "0.2")
    assert more[:3] == ("kara", {"ratio": 0.3}, "k8v4")
    assert settings_of(*auto, "--kv-cache-dtype", "k8v4")[2] == "k8v4"
    other = "--policy", "auto", "--policy.frontier", str(tmp_path / "other.json")
    assert settings_of(*other)[2] == "k4v4"
    for argv, message in (
        (("--policy", "auto"), "kvserve bench frontier --model kvserve/tiny` does"),
        ((*auto, "--policy.lk", "1"), "--policy.lk: auto has kl and frontier alone"),
        ((*auto, "--policy.kl", "0"), "--policy.kl must be a number above 0, got 0"),
        ((*auto, "--policy.kl", "0.001", "--kv-cache-dtype", "k4v4"), "within these bounds"),
        ((*auto, "--policy.frontier", "absent.json"), "absent.json: No such file"),
        ((*auto, "--policy.frontier", "5"), "--policy auto: 5: No such file"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            settings_of(*argv)


@pytest.mark.slow
def test_it_measures_a_model(tmp_path: Path) -> None:
    file = tmp_path / "frontier.json"
    flags = ["--model", "kvserve/tiny-long", "--dtype", "float32", "--num-texts", "2"]
    flags += ("--text-len", "400", "--num-prompts", "12", "--output-len", "200")
    flags += ("--policy", "kara:window=64,buffer=16", "--policy", "kara:window=64,buffer=16@k8v4")
    flags += ("--other", "streaming_llm:period=32")
    flags += ("--disable-tqdm", "--save-result", str(file), "--save-plots", str(tmp_path))
    assert cli.run(["bench", "frontier", *flags]) == 0
    found = json.loads(file.read_text())["rows"]
    assert all(row["ratio_to_first"] > 0 for row in found)
    dtypes = ["auto", "int8", "k8v4", "k4v4", "3bit", "auto", "k8v4", "auto"]
    assert [row["kv_cache_dtype"] for row in found] == dtypes
    assert (tmp_path / "frontier.png").stat().st_size > 1000
