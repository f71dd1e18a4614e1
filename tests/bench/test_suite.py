"""The suite behind docs/benchmarks.md: results are shown, and their commands understood."""

from __future__ import annotations

import importlib

import pytest

from bench.report import page
from bench.report.measurements import PLOTS, SUITE, Measurement
from kvserve.server.cli import commands as cli


@pytest.mark.parametrize("measurement", SUITE, ids=lambda each: each.name)
def test_commands_are_understood(measurement: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = measurement.words
    if program == "kvserve":
        name, rest = cli._split(words)
        module, ran = importlib.import_module(cli.COMMANDS[name].module), []
        monkeypatch.setattr(module, "run_benchmark", lambda kind, *_: ran.append(kind))
        assert cli.run([*name.split(), *rest]) == 0 and len(ran) == 1
    else:
        assert words[0] == "-m"
        assert importlib.import_module(words[1]).make_parser().parse_args(words[2:])
    assert not {"--save-result", "--save-plots", "--disable-tqdm"} & {*words}


@pytest.mark.parametrize("measurement", SUITE, ids=lambda each: each.name)
def test_results_are_shown(measurement: Measurement) -> None:
    section = page.section(measurement)
    result = measurement.newest()
    assert section.startswith(f"## {measurement.title}\n") and result["date"] in section
    assert sum(line.startswith("| ") for line in section.splitlines()) >= len(result["rows"]) + 2
    assert bool(page.pictures(measurement)) == measurement.plots
    assert not measurement.plots or (PLOTS / measurement.name).is_dir()
