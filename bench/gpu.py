"""The engine on a GPU: policies against `none` on one pool, random weights of published shapes.

    make bench-gpu ARGS="--save-result bench/results/DATE-gpu-H200.json"

Needs a CUDA device, torch, Triton, numpy, tokenizers, safetensors and transformers, and nothing
else that kvserve depends on. A row is written (JSON, and a Markdown table beside it) as soon as it
is there. Each call ends within ten minutes: run it again, with the same file, until it says that
all is done. Then come the kernels (bench/kernels.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_jobs import BLOCK, CONFIGS, JOBS, NONE, Job
from kvserve.benchmarks.measure import play
from kvserve.benchmarks.policy_spec import policy_spec
from kvserve.benchmarks.simulator import lognormal_lengths
from kvserve.benchmarks.workload import Prompts
from kvserve.config import EngineConfig
from kvserve.engine.llm_engine import LLMEngine
from kvserve.engine.models.transformer import Transformer
from kvserve.outputs import EngineStats, RequestOutput
from kvserve.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
ROW_SECONDS, CALL_SECONDS = 270.0, 540.0
FIGURES = (
    *("output_tok_s", "ratio_to_none", "itl_p50_ms", "itl_p99_ms", "mean_running"),
    *("held_over_logical", "compactions", "preemptions", "steps", "graph_steps", "of_bandwidth"),
    *("finished", "error"),
)
_SMOKE_SIZES = (1, 4, 8)


class Until:
    """An engine that ends what still runs at a deadline, as it is then."""

    def __init__(self, engine: LLMEngine, seconds: float) -> None:
        self._engine = engine
        self._deadline = time.monotonic() + seconds
        self._open: dict[str, RequestOutput] = {}

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
        if time.monotonic() < self._deadline:
            changed = self._engine.step()
            self._open |= {output.request_id: output for output in changed}
            for output in changed:
                if output.finished:
                    del self._open[output.request_id]
            return changed
        cut, self._open = list(self._open.values()), {}
        for output in cut:
            output.finished = True
        return cut

    def stats(self) -> EngineStats:
        return self._engine.stats()


class Models:
    """Engines one after the other; those of one model share its weights."""

    def __init__(self) -> None:
        self._name = ""
        self._model: Transformer | None = None

    def engine(self, job: Job, device: str) -> LLMEngine:
        gc.collect()
        if self._name != job.model:
            self._name, self._model = job.model, None
            gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
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
        }
        if device == "cpu" and not job.eager:
            settings["cudagraph_capture_sizes"] = _SMOKE_SIZES
        if job.pool is not None:
            settings["kv_cache_memory"] = job.pool * bytes_per_token(job.model, device)
        engine = LLMEngine(EngineConfig.from_flat(**settings), self._model)
        self._model = engine.core.runner.model
        return engine


def bytes_per_token(model: str, device: str) -> int:
    """Keys and values of one token, in the dtype that ``device`` gets."""
    raw = json.loads((CONFIGS / model / "config.json").read_text())
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    itemsize = 2 if device == "cuda" else 4
    return int(2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * head_dim * itemsize)


def measure(job: Job, models: Models, device: str, copy: float, seconds: float) -> dict[str, Any]:
    """One row. Requests are the same in all rows of one traffic."""
    rng = np.random.default_rng(0)
    limits = lognormal_lengths(rng, job.requests, job.mean, job.sigma, job.cap).tolist()
    engine = models.engine(job, device)
    core = engine.core
    vocabulary = core.info.vocab_size
    prompts = rng.integers(2, vocabulary, (job.requests, job.prompt)).tolist()
    play(engine, Prompts(prompts[:2], [8, 8], ignore_eos=True))  # kernels are compiled
    workload = Prompts(prompts, limits, ignore_eos=True)
    figures = play(Until(engine, seconds), workload, job.name).figures
    finished = sum(n for reason, n in figures["finish_reasons"].items() if reason is not None)
    weights = sum(p.numel() * p.itemsize for p in core.runner.model.parameters())
    held = figures["mean_held_tokens"] * bytes_per_token(job.model, device)
    graphs = core.runner.graphs
    return figures | {
        "finished": f"{finished} of {job.requests}",
        "graph_steps": 0 if graphs is None else graphs.replays,
        "of_bandwidth": (weights + held) / copy * 1000 / figures["itl_p50_ms"],
        "blocks": core.info.num_blocks,
        "startup": core.info.summary,
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


def machine(device: str) -> dict[str, str]:
    """The device, and the versions of what runs on it."""
    import transformers

    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton_version,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """Of the checkout, or what KVSERVE_COMMIT says where only files were copied."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return os.environ.get("KVSERVE_COMMIT", "unknown")
    return done.stdout.strip() or os.environ.get("KVSERVE_COMMIT", "unknown")


class Results:
    """What was found so far; on paper after every row."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.found: dict[str, Any] = {"machine": machine(device), "rows": {}}
        if path.exists():
            before = json.loads(path.read_text())
            if before["machine"] != self.found["machine"]:
                raise SystemExit(f"{path}: of another machine, commit or versions")
            self.found = before

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = self.found["rows"]
        return rows

    def add(self, job: Job, row: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.rows[job.name] = {"policy": job.policy, "traffic": job.traffic, "date": now, **row}
        base = {row["traffic"]: row for row in self.rows.values() if row["policy"] == NONE}
        for row in self.rows.values():
            first = base.get(row["traffic"], {})
            if "output_tok_s" in row and "output_tok_s" in first:
                row["ratio_to_none"] = row["output_tok_s"] / first["output_tok_s"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(self.table())

    def table(self) -> str:
        """Markdown, a part for each traffic."""
        about = ", ".join(f"{name} {value}" for name, value in self.found["machine"].items())
        lines = [f"Random weights; {about}.", ""]
        for traffic in dict.fromkeys(row["traffic"] for row in self.rows.values()):
            lines += [f"**{traffic}**", "", "| policy | " + " | ".join(FIGURES) + " |"]
            lines += ["|---" * (len(FIGURES) + 1) + "|"]
            for row in self.rows.values():
                if row["traffic"] == traffic:
                    cells = (_cell(row.get(figure)) for figure in FIGURES)
                    lines.append(f"| {row['policy']} | " + " | ".join(cells) + " |")
            lines.append("")
        return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the engine on a GPU, policy by policy")
    words = "JSON; a table is written beside it (default: build/bench-gpu.json)"
    default = ROOT / "build" / "bench-gpu.json"
    parser.add_argument("--save-result", type=Path, default=default, metavar="FILE", help=words)
    words = f"begin no row that may not end within so long (default: {CALL_SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, metavar="S", help=words)
    words = "at most so long for a row; what it has generated by then is counted"
    parser.add_argument("--row-seconds", type=float, default=ROW_SECONDS, metavar="S", help=words)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to try the command")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.smoke:
        sys.stderr.write("bench/gpu.py: torch sees no CUDA device; --smoke tries the command\n")
        return 2
    began = time.monotonic()
    results, models, copy = Results(args.save_result, device), Models(), copy_bandwidth(device)
    jobs = [job.small() for job in JOBS] if args.smoke else list(JOBS)
    for job in jobs:
        if job.name in results.rows:
            continue
        if time.monotonic() - began + args.row_seconds > args.seconds and results.rows:
            left = sum(job.name not in results.rows for job in jobs)
            sys.stdout.write(f"{left} rows left: run the same command again\n")
            return 0
        try:
            row = measure(job, models, device, copy, args.row_seconds)
        except Exception as error:  # the other rows are still worth having
            traceback.print_exc()
            row = {"error": repr(error)}
        results.add(job, row)
        shown = (f"{name} {_cell(results.rows[job.name].get(name))}" for name in FIGURES[:4])
        sys.stdout.write(f"{job.name}: {', '.join(shown)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"all {len(jobs)} rows are done: {args.save_result.with_suffix('.md')}\n")
    if device == "cpu":
        return 0
    kernels = args.save_result.with_name(args.save_result.stem + "-kernels.json")
    left = max(60.0, args.seconds - (time.monotonic() - began) - 60)
    options = ["--save-result", str(kernels), "--seconds", f"{left:.0f}"]
    return subprocess.run([sys.executable, "-m", "bench.kernels", *options], cwd=ROOT).returncode


if __name__ == "__main__":
    raise SystemExit(main())
