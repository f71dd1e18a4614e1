"""The suite behind docs/benchmarks.md: commands that are understood, results that are shown."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench.report import measurement as measuring
from bench.report import measurements, page
from bench.report.measurement import Measurement
from bench.report.measurements import SUITE
from kvserve.benchmarks.setup.policy_spec import policy_spec
from kvserve.server.cli import commands as cli


@pytest.mark.parametrize("measurement", SUITE, ids=lambda each: each.name)
def test_commands_are_understood(measurement: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    words, ran = measurement.argv(measuring.RESULTS / "r.json"), []
    if measurement.module is None:
        name, _ = cli._split(words)
        module = importlib.import_module(cli.COMMANDS[name].module)
        monkeypatch.setattr(module, "run_benchmark", lambda kind, *_, **__: ran.append(kind))
        assert cli.run(words) == 0 and len(ran) == 1
    else:
        assert importlib.import_module(measurement.module).make_parser().parse_args(words)
    assert ("--save-plots" in words) == measurement.plots


def test_decoding_policies_hold_equally_many_entries() -> None:
    """The prompt and a share of the trace, whether a policy counts the prompt or not."""
    for retention, kept in ((0.2, 67), (0.6, 200)):
        bounds = [
            policy_spec(text).fields["budget"] for text in measurements.decoding_policies(retention)
        ]
        assert bounds == [kept] * 6 + [191 + kept] * 2


def test_sections_show_the_newest_complete_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(rate: float, complete: bool = True) -> dict[str, Any]:
        return {
            "complete": complete, "date": "today", "threads": 1, "commit": "abc",
            "benchmark": "throughput",
            "device": {"type": "cpu", "name": "chip"}, "about": ["pool of 9 blocks"],
            "versions": {"torch": "2", "kvserve": "1"}, "notes": ["kara: it paid"],
            "columns": ["policy", "output_tok_s"], "command": "kvserve as it was run",
            "rows": [{"policy": "none", "output_tok_s": rate}],
        }  # fmt: skip

    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    command = "bench throughput --shape '4m'"
    trial = Measurement("trial", "A trial", "What it is.", command, minutes=1)
    said = page.section(trial)
    assert said.endswith("```\nkvserve bench throughput --shape '4m'\n```\n\nNot measured yet.")
    for day, document in (("01", result(5.0)), ("02", result(7.0)), ("03", result(9.0, False))):
        (tmp_path / f"2026-12-{day}-trial.json").write_text(json.dumps(document))
    shown = page.section(trial)
    assert "| none   |          7.0 |" in shown and "- kara: it paid" in shown
    assert "```\nkvserve as it was run\n```" in shown
    assert shlex.split(trial.command) == trial.argv(measuring.ROOT / "x.json")[:-2]
    peers = Measurement("p", "P", "P.", "--repeat 2", minutes=1, module="bench.cpu_peers")
    assert "```\npython -m bench.cpu_peers --repeat 2\n```" in page.section(peers)
    assert [column.title for column in peers.table(["batch", "vllm"])] == ["batch", "vLLM CPU"]
