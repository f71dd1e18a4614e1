"""Profiles a decode step and an event: ``python -m bench.gpu --profile``.

Runs torch.profiler over one step that only decodes and one that begins with events, under Kara's
default on the limited pool. Each gives a table by time on the device and a trace for
chrome://tracing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu_runs.jobs import JOBS, KARA, Job
from bench.gpu_runs.row import build
from bench.machine import ROOT, write_json
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.sampling_params import SamplingParams
from kvserve.scheduler.messages.output import SchedulerOutput

_ROWS, _KERNELS = 40, 30
_SKIPPED = 2  # the first steps of a kind set things up


class Watch:
    """Profiles the third step with events that an engine launches, and the decode step behind it,
    over rows of the same lengths."""

    def __init__(self, engine: LLMEngine, folder: Path, stem: str) -> None:
        self.found: dict[str, Any] = {}
        self._runner = engine.core.runner
        self._launch = self._runner.launch
        self._folder, self._stem = folder, stem
        self._seen = {"decode": 0, "event": 0}
        self._cuda = torch.cuda.is_available()
        self._runner.launch = self._watched  # type: ignore[method-assign]

    @property
    def done(self) -> bool:
        return len(self.found) == len(self._seen)

    def _watched(self, output: SchedulerOutput) -> Any:
        kind = "event" if output.events.compactions else "decode"
        alone = output.num_tokens == output.num_decoding > 0
        self._seen[kind] += alone
        due = self._seen["event"] == _SKIPPED + 1 if kind == "event" else "event" in self.found
        if not alone or not due or kind in self.found:
            return self._launch(output)
        if self._cuda:
            torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._cuda]
        with profile(activities=activities) as profiler:
            step = self._launch(output)
            if self._cuda:
                torch.cuda.synchronize()
        self._save(kind, profiler, output)
        return step

    def _save(self, kind: str, profiler: Any, output: SchedulerOutput) -> None:
        order = "device_time_total" if self._cuda else "cpu_time_total"
        averages = profiler.key_averages()
        path = self._folder / f"{self._stem}-{kind}"
        path.with_suffix(".txt").write_text(averages.table(sort_by=order, row_limit=_ROWS))
        profiler.export_chrome_trace(str(path.with_suffix(".trace.json")))
        # On a GPU kernels alone: the operators that launched them have their times once more.
        times = [
            (
                row.key,
                row.count,
                row.self_device_time_total if self._cuda else row.self_cpu_time_total,
            )
            for row in averages
            if not self._cuda or row.device_type is DeviceType.CUDA
        ]
        times.sort(key=lambda row: -row[2])
        self.found[kind] = {
            "rows": output.num_decoding,
            "events": sum(len(task.rows) for task in output.events.compactions),
            "microseconds": sum(time for *_, time in times),
            "kernels": [
                {"name": name, "calls": calls, "microseconds": time}
                for name, calls, time in times[:_KERNELS]
            ],
        }


def profiled(job: Job, device: str, folder: Path, stem: str) -> dict[str, Any]:
    """Runs ``job`` until a step of each kind has been profiled."""
    engine = build(job, device)
    watch = Watch(engine, folder, stem)
    generator = torch.Generator().manual_seed(0)
    vocabulary = engine.core.info.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=job.cap, ignore_eos=True)
    for i in range(job.seqs):
        prompt = torch.randint(2, vocabulary, (job.prompt,), generator=generator).tolist()
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests and not watch.done:
        engine.step()
    return watch.found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="profile a decode step and an event")
    default = ROOT / "build" / "bench-gpu.json"
    parser.add_argument("--save-result", type=Path, default=default, metavar="FILE")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(arguments)
    job = next(job for job in JOBS if job.policy == KARA)
    job = replace(job.small() if args.smoke else job, sigma=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder, stem = args.save_result.parent, f"{args.save_result.stem}-profile"
    folder.mkdir(parents=True, exist_ok=True)
    found = profiled(job, device, folder, stem)
    write_json(folder / f"{stem}.json", {"job": job.name, **found})
    for kind, what in found.items():
        top = ", ".join(f"{k['name'][:40]} {k['microseconds']:.0f} us" for k in what["kernels"][:5])
        print(f"{kind}: {what['microseconds']:.0f} us; {top}")
    return int(len(found) < 2)


if __name__ == "__main__":
    raise SystemExit(main())
