"""Host time of the scheduler: ``schedule`` and ``update`` per step, without a model.

    python bench/scheduler.py --save-result bench/results/DATE-scheduler-host-cost.json

The first rows are batches that only decode on an ample pool, by number of sequences and by tokens
held. The last rows are a full pool of 335k tokens with 4,000 requests waiting, as on a loaded
server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness.datasets.workload import lognormal_lengths
from bench.harness.reports.report import Column, Report, measure_and_publish
from bench.harness.setup.options import add_report_arguments, at_least
from kvserve.scheduler.layout import Granularity, KVLayout
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.periodic import Periodic
from kvserve.scheduler.triggers.trigger import EventKind, Never, Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd

LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
TRIGGERS: dict[str, Trigger] = {"none": Never(), "kara": Periodic(512, 32, 144, 32)}
UNEVEN: dict[str, Trigger] = {"adakv": AtPrefillEnd(Budget(ratio=Fraction(1, 2)), 32)}
"""Policies after whose events lengths differ between lanes; for layouts finer than ``model``."""
CYCLE = 512  # steps within which every sequence has an event of Kara
LOG_TOKENS = 64
COLUMNS = (
    Column("policy", "policy", left=True),
    Column("pool", "pool", left=True),
    Column("prefix cache", "prefix_cache", left=True),
    Column("waiting", "waiting", ",d"),
    Column("running", "running", ".0f"),
    Column("held per sequence", "held_per_sequence", ",.0f"),
    Column("schedule p50 µs", "schedule_p50_us", ".0f"),
    Column("update p50 µs", "update_p50_us", ".0f"),
    Column("p50 µs", "both_p50_us", ".0f"),
    Column("mean µs", "both_mean_us", ".0f"),
    Column("p99 µs", "both_p99_us", ".0f"),
    Column("events per step", "events_per_step", ".2f"),
)


def make_scheduler(
    layout: KVLayout, num_blocks: int, rows: int, max_len: int, cached: bool = True
) -> Scheduler:
    settings = SchedulerSettings(
        num_blocks=num_blocks + 1,
        max_num_seqs=rows,
        max_num_batched_tokens=16_384,
        max_model_len=max_len,
        log_block_tokens=LOG_TOKENS,
        prefix_caching=cached,
    )
    return Scheduler(layout, settings)


def add(scheduler: Scheduler, seq_id: int, prompt: int, output: int, policy: str) -> None:
    tokens = np.zeros(prompt, np.int32)
    tokens[0] = seq_id  # no two prompts begin alike
    trigger = (TRIGGERS | UNEVEN)[policy]
    kind = EventKind.UNEVEN if policy in UNEVEN else EventKind.EVEN
    scheduler.add(Sequence(seq_id, tokens, prompt, prompt + output, (), 0, trigger, kind))


def kept_counts(task: Events, rng: np.random.Generator) -> np.ndarray:
    """Random counts that observed events keep, around their plan's."""
    return rng.integers(1, 2 * task.plan.keep[:, None], task.old_lens.shape, np.int32)


def advance(scheduler: Scheduler, steps: int) -> np.ndarray:
    """Seconds of ``schedule`` and of ``update`` in each step: [steps, 2]."""
    seconds, rng = np.zeros((steps, 2)), np.random.default_rng(0)
    for step in range(steps):
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        tokens = np.zeros(len(output.sampled), np.int32)
        counts = [kept_counts(task, rng) for task in output.events.observations]
        sampled = time.perf_counter()
        scheduler.update(output, tokens, counts)
        seconds[step] = scheduled - started, time.perf_counter() - sampled
    return seconds


def decoding(layout: KVLayout, policy: str, running: int, held: int, steps: int) -> Scheduler:
    """``running`` sequences that started one after the other with prompts of ``held`` tokens."""
    more = 3 * CYCLE + steps
    blocks = 2 * running * layout.blocks_for(held + more)
    scheduler = make_scheduler(layout, blocks, running, held + more + 1)
    for seq_id in range(running):
        add(scheduler, seq_id, held, more, policy)
        advance(scheduler, CYCLE * (seq_id + 1) // running - CYCLE * seq_id // running)
    advance(scheduler, CYCLE)
    assert scheduler.rows.num_decoding == running
    return scheduler


def loaded(layout: KVLayout, policy: str, cached: bool) -> Scheduler:
    """A full pool and a long queue; requests end and are admitted all the time."""
    outputs = lognormal_lengths(np.random.default_rng(0), 4300, 3000, 0.7, 8192)
    scheduler = make_scheduler(layout, layout.blocks_for(335_000), 256, 250 + 8192, cached)
    for seq_id, output in enumerate(outputs.tolist()):
        add(scheduler, seq_id, 250, output, policy)
    advance(scheduler, 8 * CYCLE)
    return scheduler


def measured(prepare: Callable[[], Scheduler], steps: int, repeat: int) -> dict[str, Any]:
    """Host time of ``steps`` steps. A step does the same in every repetition, so its shortest time
    counts: any excess is not the scheduler's."""
    seconds = np.full((steps, 2), np.inf)
    for _ in range(repeat):
        scheduler = prepare()
        events = scheduler.totals.compactions_total
        seconds = np.minimum(seconds, advance(scheduler, steps))
    n = scheduler.rows.num_rows
    scheduled, updated = 1e6 * np.percentile(seconds, 50, axis=0)
    both = 1e6 * seconds.sum(axis=1)
    return {
        "waiting": len(scheduler.waiting),
        "running": n,
        "held_per_sequence": float(scheduler.blocks.kv_lens[:, :n].mean()),
        "schedule_p50_us": float(scheduled),
        "update_p50_us": float(updated),
        "both_p50_us": float(np.percentile(both, 50)),
        "both_p99_us": float(np.percentile(both, 99)),
        "both_mean_us": float(both.mean()),
        "events_per_step": (scheduler.totals.compactions_total - events) / steps,
    }


class HostCost:
    """The runs of one command."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        args = self._args
        silent = True if args.disable_tqdm else None
        layout = replace(LAYOUT, granularity=Granularity(args.kv_layout))
        policies = [*TRIGGERS, *(() if args.kv_layout == "model" else UNEVEN)]
        batches = list(product(policies, args.num_seqs, args.held))
        pools = list(product(TRIGGERS, (False, True)))
        with tqdm(total=len(batches) + len(pools), disable=silent, unit="case") as bar:
            for policy, running, held in batches:
                facts = {"policy": policy, "pool": "room for all", "prefix_cache": "on"}
                prepare = partial(decoding, layout, policy, running, held, args.steps)
                self._rows.append(facts | measured(prepare, args.steps, args.repeat))
                bar.update()
            for policy, cached in pools:
                facts = {
                    "policy": policy,
                    "pool": "full",
                    "prefix_cache": "on" if cached else "off",
                }
                prepare = partial(loaded, layout, policy, cached)
                self._rows.append(facts | measured(prepare, args.steps, args.repeat))
                bar.update()

    def report(self) -> Report:
        args = self._args
        about = ["host time of schedule and update per step; no model, no device"]
        settings = {"num_seqs": args.num_seqs, "held": args.held, "kv_layout": args.kv_layout}
        settings |= {"steps": args.steps, "repeat": args.repeat, "kara": str(TRIGGERS["kara"])}
        program = "python bench/scheduler.py"
        return Report("scheduler", about, COLUMNS, self._rows, settings, program=program)


def main() -> int:
    parser = argparse.ArgumentParser(description="host cost of schedule and update")
    add_report_arguments(parser)
    count = at_least(1)
    for name, default, words in (
        ("num-seqs", [64, 128, 256, 512], "sequences that decode"),
        ("held", [512, 2048, 8192], "tokens of their prompts"),
    ):
        words += f" (default: {' '.join(map(str, default))})"
        parser.add_argument(f"--{name}", nargs="+", type=count, default=default, help=words)
    layouts = [granularity.value for granularity in Granularity]
    parser.add_argument("--kv-layout", choices=layouts, default="model", help="default: model")
    words = f"timed steps (default: {CYCLE})"
    parser.add_argument("--steps", type=count, default=CYCLE, metavar="N", help=words)
    words = "repetitions; a step's shortest time counts (default: 3)"
    parser.add_argument("--repeat", type=count, default=3, metavar="N", help=words)
    args = parser.parse_args()
    return measure_and_publish(HostCost(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
