"""Held-token routing against round robin, simulated: `docs/replicas.md`.

    python bench/router.py --save-result bench/results/DATE-router.json

Every replica is the real scheduler under a cost model; the router is the server's.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from kvserve.benchmarks.reports.report import Column, Report, Row, measure_and_publish
from kvserve.benchmarks.setup.lengths import lognormal_lengths
from kvserve.benchmarks.setup.options import add_report_arguments, at_least
from kvserve.benchmarks.simulator.cost_model import DEVICES, LARGE_SHAPES, CostModel, Queries
from kvserve.benchmarks.simulator.simulator import Simulation
from kvserve.engine.models.spec import parse_spec
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import Sequence as Request
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.scheduler.triggers.periodic import Periodic
from kvserve.scheduler.triggers.trigger import Never, Trigger
from kvserve.server.replicas.routing import HeldTokenRouter

SHAPE, DEVICE = "llama-3.1-8b", "h100"
BLOCK, POOL_TOKENS, MAX_NUM_SEQS = 16, 120_000, 128
PREFIXES, PREFIX, SKEW = 16, 2048, 1.1  # for each replica; tokens; exponent of their popularity
QUESTION, ANSWER, SIGMA, CAP = 200, 600, 0.7, 4096
TICK = 0.05  # seconds between two updates of what replicas hold
ROUTERS = (ROUND_ROBIN, HELD) = ("round robin", "held tokens, prefixes")
POLICIES: dict[str, tuple[Trigger, Queries]] = {
    "none": (Never(), Queries("none")),
    "kara": (Periodic(384, 32, 106, 32, logs=True), Queries("log", 8)),
}


@dataclass(frozen=True)
class Traffic:
    """``arrivals`` in seconds, ``prompts`` as token ids, ``outputs`` in tokens."""

    arrivals: IntArray
    prompts: list[IntArray]
    outputs: IntArray


def traffic(replicas: int, requests: int, rate: float, seed: int) -> Traffic:
    """Poisson arrivals; prompts begin with one of many system prompts, some of them popular."""
    rng = np.random.default_rng(seed)
    number = PREFIXES * replicas
    weights = np.arange(1, number + 1) ** -SKEW
    chosen = rng.choice(number, requests, p=weights / weights.sum())
    prefixes = rng.integers(0, 2**30, (number, PREFIX), np.int32)
    questions = lognormal_lengths(rng, requests, QUESTION, SIGMA, CAP)
    return Traffic(
        rng.exponential(1 / rate, requests).cumsum(),
        [
            np.concatenate([prefixes[i], rng.integers(0, 2**30, length, np.int32)])
            for i, length in zip(chosen, questions.tolist(), strict=True)
        ],
        lognormal_lengths(rng, requests, ANSWER, SIGMA, CAP),
    )


class Replica(Simulation):
    """A simulation whose requests arrive over time.

    ``first_token`` (seconds) and ``cached`` (tokens) cover all requests; an item is filled in when
    its request has its first token.
    """

    def __init__(
        self, policy: str, cost: CostModel, first_token: IntArray, cached: IntArray
    ) -> None:
        spec = cost.spec
        layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK)
        settings = SchedulerSettings(
            num_blocks=POOL_TOKENS // BLOCK + 1,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=2048,
            max_model_len=PREFIX + 2 * CAP,
            log_block_tokens=4 * BLOCK,
        )
        scheduler = Scheduler(layout, settings)
        nothing: IntArray = np.zeros(0, np.int32)
        self._trigger, queries = POLICIES[policy]
        super().__init__(scheduler, self._trigger, cost, queries, nothing, nothing)
        self._last_token = np.full(len(first_token), np.nan)
        self._first_token = first_token
        self._cached = cached

    def add(self, index: int, tokens: IntArray, output: int) -> None:
        length = len(tokens)
        self.scheduler.add(Request(index, tokens, length, length + output, (), 0, self._trigger))

    def play_until(self, time: float) -> None:
        """Run steps until the clock is at ``time``, or past it at the end of the last step."""
        while self.now < time and self.scheduler.has_work:
            self.step()
        self.now = max(self.now, time)

    def report(self, router: HeldTokenRouter) -> None:
        """Tell the router what running requests hold, as the server's streams do."""
        lens = self.scheduler.blocks.kv_lens[0, :, 0]
        for seq in self.scheduler.running:
            if not np.isnan(self._first_token[seq.seq_id]):
                router.holds(str(seq.seq_id), int(lens[seq.row]))

    def _record(self, output: SchedulerOutput, seconds: float) -> None:
        for seq in output.sampled:
            if np.isnan(self._first_token[seq.seq_id]):
                self._first_token[seq.seq_id] = self.now
                self._cached[seq.seq_id] = seq.num_cached_tokens
        super()._record(output, seconds)


@dataclass(frozen=True)
class Job:
    """``requests`` and ``rate`` (a second) are for each replica."""

    replicas: int
    rate: float
    policy: str
    router: str
    seed: int
    requests: int


def play(job: Job) -> dict[str, Any]:
    """One run's figures."""
    count = job.requests * job.replicas
    load = traffic(job.replicas, count, job.rate * job.replicas, job.seed)
    cost = CostModel(parse_spec(LARGE_SHAPES[SHAPE], SHAPE), DEVICES[DEVICE])
    first_token, cached = np.full(count, np.nan), np.zeros(count)
    names = [str(i) for i in range(job.replicas)]
    replicas = [Replica(job.policy, cost, first_token, cached) for _ in names]
    router, taken = HeldTokenRouter(), 0
    now = 0.0
    while taken < count or any(replica.scheduler.has_work for replica in replicas):
        now += TICK
        for replica in replicas:
            ended = len(replica.finished)
            replica.play_until(now)
            if job.router == HELD:
                for seq in replica.finished[ended:]:
                    router.ended(str(seq.seq_id))
                replica.report(router)
        while taken < count and load.arrivals[taken] < now:
            prompt = load.prompts[taken]
            name = names[taken % len(names)]
            if job.router == HELD:
                router.add(str(taken), prompt)
                name = router.rank(str(taken), names)[0]
                router.send(str(taken), name)
            replicas[int(name)].add(taken, prompt, int(load.outputs[taken]))
            taken += 1
    waits = (first_token - load.arrivals) * 1e3
    return {
        "ttft_p50_ms": float(np.percentile(waits, 50)),
        "ttft_p99_ms": float(np.percentile(waits, 99)),
        "cache_hits": float(cached.sum() / sum(map(len, load.prompts))),
        "preemptions": sum(replica.scheduler.num_preemptions for replica in replicas),
        "simulated_s": now,
    }


class Table:
    """Every router under every policy; means over the seeds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._jobs = [
            Job(replicas, rate, policy, router, seed, args.num_requests)
            for replicas, rate, policy, router, seed in product(
                args.replicas, args.rate, POLICIES, ROUTERS, range(args.seeds)
            )
        ]
        self._done: dict[Job, dict[str, Any]] = {}

    def measure(self) -> None:
        silent = True if self._args.disable_tqdm else None
        with ProcessPoolExecutor(self._args.jobs) as pool:
            runs = zip(self._jobs, pool.map(play, self._jobs), strict=True)
            for job, figures in tqdm(runs, total=len(self._jobs), disable=silent, unit="run"):
                self._done[job] = figures

    def report(self) -> Report:
        args = self._args
        about = [
            f"{SHAPE} on {DEVICE}, pools of {POOL_TOKENS:,} tokens, {args.num_requests} requests "
            f"for each replica, {args.seeds} seeds",
            f"prompts begin with one of {PREFIXES} x replicas prefixes of {PREFIX} tokens, Zipf "
            f"{SKEW}; {QUESTION} further tokens and {ANSWER} of output on average, log-normal",
            "simulated: nothing here was measured",
        ]
        columns = [
            Column("replicas", "replicas"),
            Column("requests/s each", "rate", "g"),
            Column("policy", "policy", left=True),
            Column("router", "router", left=True),
            Column("TTFT p50 ms", "ttft_p50_ms", ",.0f"),
            Column("TTFT p99 ms", "ttft_p99_ms", ",.0f"),
            Column("prompt tokens cached", "cache_hits", ".0%"),
            Column("preemptions", "preemptions", ".0f"),
        ]
        settings = {"rate": args.rate, "requests": args.num_requests, "seeds": args.seeds}
        settings |= {"pool_tokens": POOL_TOKENS, "prefixes": PREFIXES, "prefix": PREFIX}
        settings |= {"skew": SKEW, "question": QUESTION, "answer": ANSWER, "tick": TICK}
        device = {"type": "simulated", "name": DEVICE}
        program = "python bench/router.py"
        return Report(
            "router", about, columns, self._rows(), settings, device=device, program=program
        )

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        args = self._args
        for key in product(args.replicas, args.rate, POLICIES, ROUTERS):
            jobs = [job for job in self._jobs if astuple(job)[:4] == key and job in self._done]
            if len(jobs) == args.seeds:
                runs = [self._done[job] for job in jobs]
                means = {name: mean(run[name] for run in runs) for name in runs[0]}
                row = dict(zip(("replicas", "rate", "policy", "router"), key, strict=True))
                rows.append({**row, **means})
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="routing to replicas, simulated")
    add_report_arguments(parser)
    count = at_least(1)
    parser.add_argument(
        "--replicas", nargs="+", type=count, default=[8, 64], metavar="N", help="default: 8 64"
    )
    words = "requests a second for each replica (default: 6 9)"
    parser.add_argument(
        "--rate", nargs="+", type=float, default=[6.0, 9.0], metavar="X", help=words
    )
    words = "for each replica (default: 150)"
    parser.add_argument("--num-requests", type=count, default=150, metavar="N", help=words)
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="default: 1")
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="processes")
    args = parser.parse_args()
    return measure_and_publish(Table(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
