"""`kvserve bench frontier` and `kvserve tune --frontier`: what is joined, and what is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.commands.frontier import joined
from kvserve.server.cli import commands as cli

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
    return list(joined(found, speeds))


def test_rows_are_joined_and_beaten_ones_are_off_the_frontier() -> None:
    found = {(row["policy"], row["kv_cache_dtype"]): row for row in rows()}
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
    file = tmp_path / "frontier.json"
    document = {"rows": rows(), "about": ["a model"], "device": {"name": "a CPU"}}
    file.write_text(json.dumps(document))
    assert cli.run(["tune", "--frontier", str(file), *bounds]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--device and --model"),
        (("--kl", "0.1"), "--frontier FILE"),
        (("--frontier", "absent.json"), "needs --kl, --bytes or --speed"),
        (("--frontier", "absent.json", "--kl", "1"), "No such file"),
        (("--frontier", "pyproject.toml", "--kl", "1"), "no result of"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert cli.run(["tune", *flags]) in (1, 2)
    assert message in capsys.readouterr().err


def test_nothing_within_the_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "frontier.json"
    file.write_text(json.dumps({"rows": rows(), "about": [], "device": {"name": "a CPU"}}))
    assert cli.run(["tune", "--frontier", str(file), "--kl", "0.0001", "--bytes", "0.1"]) == 1
    assert "nothing that was measured" in capsys.readouterr().err


@pytest.mark.slow
def test_it_measures_a_model(tmp_path: Path) -> None:
    file = tmp_path / "frontier.json"
    flags = ["--model", "kvserve/tiny-long", "--dtype", "float32", "--num-texts", "2"]
    flags += ("--text-len", "400", "--num-prompts", "12", "--output-len", "200")
    flags += ("--policy", "kara:window=64,buffer=16", "--other", "streaming_llm:period=32")
    flags += ("--disable-tqdm", "--save-result", str(file), "--save-plots", str(tmp_path))
    assert cli.run(["bench", "frontier", *flags]) == 0
    found = json.loads(file.read_text())["rows"]
    assert len(found) == 7 and all(row["ratio_to_first"] > 0 for row in found)
    assert (tmp_path / "frontier.png").stat().st_size > 1000
