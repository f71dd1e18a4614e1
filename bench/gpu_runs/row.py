"""A row of bench/gpu.py: an engine and its figures.

Run as ``python -m bench.gpu_runs.row JOB FILE``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_runs.engines import EngineErrors
from bench.gpu_runs.jobs import BLOCK, CONFIGS, JOBS, Job
from bench.harness.datasets.workload import Prompts, lognormal_lengths
from bench.harness.measuring.measure import play
from bench.harness.setup.policy_spec import policy_spec
from bench.machine import write_json
from kvserve.config import EngineConfig
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.models.transformer import Transformer
from kvserve.entry_format import entry_format
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats

_SMOKE_SIZES, _SIZES = (1, 4, 8), (128, 192, 224, 240, 256)
"""Of graphs: each takes two captures, and more of them seconds of a lent GPU."""
_LATE = 3.0


class Until:
    """An engine that ends all running requests, as they are, at a deadline.

    ``late_tok_s``: tokens a second in the last third, when the pool is full.
    """

    def __init__(self, engine: LLMEngine, seconds: float) -> None:
        self._engine = engine
        self._deadline, self._last = time.monotonic() + seconds, seconds / _LATE
        self._open: dict[str, RequestOutput] = {}
        self._late, self._cut = 0, False

    @property
    def late_tok_s(self) -> float:
        return self._late / self._last

    @property
    def has_unfinished_requests(self) -> bool:
        return self._engine.has_unfinished_requests and (
            bool(self._open) or time.monotonic() < self._deadline
        )

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams
    ) -> None:
        self._engine.add_request(request_id, prompt, params)

    def step(self) -> list[RequestOutput]:
        left = self._deadline - time.monotonic()
        if left > 0:
            changed = self._engine.step()
            if left <= self._last:
                self._late += len(changed)
            self._open |= {output.request_id: output for output in changed}
            for output in changed:
                if output.finished:
                    del self._open[output.request_id]
            return changed
        cut, self._open, self._cut = list(self._open.values()), {}, True
        for output in cut:
            output.finished = True
        return cut

    def stats(self) -> EngineStats:
        """Those that were cut off do not run, too."""
        stats = self._engine.stats()
        return replace(stats, num_running=0) if self._cut else stats


def settings_of(job: Job, device: str) -> dict[str, Any]:
    """The settings of a row's engine, which has random weights."""
    spec = policy_spec(job.policy)
    settings: dict[str, Any] = {
        "model": str(CONFIGS / job.model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "policy": spec.name,
        "policy_args": spec.fields,
        "device": device,
        "block_size": BLOCK if device == "cuda" else 16,
        "max_num_seqs": job.seqs,
        "max_num_batched_tokens": max(2048, job.seqs),
        "max_model_len": job.prompt + job.cap,
        "enforce_eager": job.eager,
        "async_scheduling": job.overlaps,
        "enable_prefix_caching": False,
        "kv_cache_dtype": job.form,
    }
    if not job.eager:
        sizes = [size for size in _SIZES if size <= job.seqs] or [job.seqs]
        settings["cudagraph_capture_sizes"] = _SMOKE_SIZES if device == "cpu" else sizes
    if job.pool is not None:
        settings["kv_cache_memory"] = job.pool * bytes_per_token(job.model, device)
    return settings


def build(job: Job, device: str) -> LLMEngine:
    """The engine of a row."""
    return LLMEngine(EngineConfig.from_flat(**settings_of(job, device)))


def bytes_per_token(model: str, device: str, form: str = "auto") -> int:
    """Bytes of a token's keys and values, in ``form`` or the dtype that ``device`` uses."""
    raw = json.loads((CONFIGS / model / "config.json").read_text())
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    itemsize = 2 if device == "cuda" else 4
    layers = raw["num_hidden_layers"]
    entry = entry_format(form, itemsize).entry_bytes(head_dim, layers)
    return int(raw["num_key_value_heads"] * entry)


def step_bytes(model: Transformer) -> int:
    """Bytes of the weights that a decode step reads. The embedding is left out, because only a few
    of its rows are read, unless it is also the head."""
    read = sum(p.numel() * p.itemsize for p in model.parameters())
    if model.head is not model.embedding:
        read -= model.embedding.nbytes
    return read


def measure(job: Job, device: str, seconds: float) -> dict[str, Any]:
    """A row's figures. Requests are the same in all rows of one traffic. ``of_bandwidth`` counts
    weights and entries; not the log, remainders, nor newest entries beside few bits."""
    rng = np.random.default_rng(0)
    limits = lognormal_lengths(rng, job.requests, job.mean, job.sigma, job.cap).tolist()
    began = time.monotonic()
    engine = build(job, device)
    core = engine.core
    prompts = rng.integers(2, core.info.vocab_size, (job.requests, job.prompt)).tolist()
    play(engine, Prompts(prompts[:2], [8, 8], ignore_eos=True))  # one-time setup
    started = time.monotonic() - began
    workload = Prompts(prompts, limits, ignore_eos=True)
    until = Until(engine, seconds)
    with EngineErrors() as errors:
        figures = play(until, workload, job.name).figures
    finished = sum(n for reason, n in figures["finish_reasons"].items() if reason is not None)
    held = figures["mean_held_tokens"] * bytes_per_token(job.model, device, job.form)
    graphs, copy = core.runner.graphs, copy_bandwidth(device)
    if errors.newest is not None:  # the engine went on, but its figures mean nothing
        figures["error"] = errors.newest
    return figures | {
        "late_tok_s": until.late_tok_s,
        "finished": f"{finished} of {job.requests}",
        "graph_steps": 0 if graphs is None else graphs.replays,
        "of_bandwidth": (step_bytes(core.runner.model) + held)
        / copy
        * 1000
        / figures["itl_p50_ms"],
        "event_share": figures["compaction_s"] / figures["wall_s"],
        "copy_bytes_s": copy,
        "start_s": started,
        "blocks": core.info.num_blocks,
        "startup": core.described().summary,
    }


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.ones(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(8):
        wait()
        started = time.perf_counter()
        target.copy_(source)
        wait()
        times.append(time.perf_counter() - started)
    return 2 * source.numel() / sorted(times)[4]


def main() -> int:
    parser = argparse.ArgumentParser(description="one row of bench/gpu.py")
    parser.add_argument("job")
    parser.add_argument("file", type=Path)
    parser.add_argument("--row-seconds", type=float, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    jobs = {job.name: job for job in (job.small() if args.smoke else job for job in JOBS)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_json(args.file, measure(jobs[args.job], device, args.row_seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
