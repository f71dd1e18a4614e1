"""``kvserve bench throughput``: policies compared on one pool or on several, in one process.

The main figure is total output tokens over wall time; the scheduler's counters stand beside it.
Every run has a fresh engine and a warm-up that does not count. With ``--repeat`` the rows
alternate, so that both sides of a ratio were measured at about the same time. The first policy is
what the others of its pool are compared with: put ``none`` first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from math import ceil
from statistics import median
from typing import Any

from bench.harness.datasets.datasets import (
    DATASETS,
    add_dataset_arguments,
    check_dataset,
    dataset_options,
    read_dataset,
)
from bench.harness.datasets.workload import DEFAULT_BLOCK_SIZE, blocks_at_once, random_prompts
from bench.harness.measuring.benchmark import Benchmark, run_benchmark
from bench.harness.measuring.measure import CLOCKS, Figures, accuracy, held_bytes, play
from bench.harness.reports.plots import plot_rows
from bench.harness.reports.report import Report, Row, columns
from bench.harness.setup.options import (
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    at_least,
    check_matplotlib,
    chosen_policies,
    number,
)
from bench.harness.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.config import KV_CACHE_DTYPES, SchedulerConfig

_COLUMNS = columns(
    *("pool_blocks", "pool_share", "max_num_seqs"),
    *("policy", "kv_cache_dtype", "prefix_caching", "speculation"),
    *("output_tokens", "wall_s"),
    *("output_tok_s", "spread", "ratio_to_first", "mean_running", "peak_running"),
    *("mean_pool_usage", "held_over_logical", "mean_held_bytes", "allocated_bytes_at_end"),
    *("blocks_released", "compactions", "event_ms", "early_compactions", "evicted_tokens"),
    "preemptions",
    *("swaps", "prompt_cached", "draft_tokens", "accepted_share", "steps", "itl_p50_ms"),
    "itl_p99_ms",
    *("exact_match", "interval_95", "correct_prefix"),
)
_WAYS = ("kv_cache_dtype", "prefix_caching", "speculation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, shapes=True)
    words = "throughput, by pool or against accuracy where that is graded,"
    add_report_arguments(parser, plots=words)
    add_dataset_arguments(parser)
    words = "random prompts run first, not counted (default: 1)"
    parser.add_argument("--num-warmups", type=at_least(0), default=1, metavar="N", help=words)
    words = "wall: wall-clock seconds; cpu: CPU seconds of this process, for a busy machine; "
    words += "with --threads 1 both agree on an idle one (default: wall)"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=words)
    words = "runs of each row, in turns; the median one is shown (default: 1)"
    parser.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help=words)
    words = "run every policy without and with --speculative-config, alternating"
    parser.add_argument("--compare-speculation", action="store_true", help=words)
    pool = parser.add_mutually_exclusive_group()
    add_pool_argument(pool)
    pool.add_argument(
        "--pool-shares",
        "--pool-share",
        nargs="+",
        type=number(0),
        metavar="X",
        help="pool sizes as shares of the demand: blocks of all requests together, at full length "
        "and uncompressed; every row runs on each of them",
    )
    seqs = SchedulerConfig().max_num_seqs
    parser.add_argument(
        "--max-num-seqs",
        dest="sequence_limits",
        nargs="+",
        type=at_least(1),
        default=[seqs],
        metavar="N",
        help=f"most sequences running at once; every row runs with each (default: {seqs})",
    )
    words = "run every policy with prefix caching on and off, alternating"
    parser.add_argument("--compare-prefix-caching", action="store_true", help=words)
    parser.add_argument(
        "--compare-kv-cache-dtypes",
        nargs="+",
        metavar="DTYPE",
        choices=KV_CACHE_DTYPES,
        help="run every policy with its cache held in each of these, alternating, pools of equal "
        f"bytes: some of {', '.join(KV_CACHE_DTYPES)} (needs --pool-shares); for one policy alone "
        "write NAME@DTYPE",
    )


def run(args: argparse.Namespace) -> int:
    check_matplotlib(args)
    policies = chosen_policies(args)
    check_dataset(args)
    if args.compare_speculation and not args.speculative_config:
        args.fail("--compare-speculation needs --speculative-config: how tokens are guessed")
    if args.compare_prefix_caching and args.enable_prefix_caching is not None:
        args.fail("--compare-prefix-caching runs both sides of --enable-prefix-caching: give one")
    if _several_types(args, policies) and not args.pool_shares:
        args.fail("caches in other types: pools of as many bytes need --pool-shares X")
    return run_benchmark(Throughput, args, policies)


def _several_types(args: argparse.Namespace, policies: Sequence[PolicySpec]) -> bool:
    """Whether rows say what their cache is held in."""
    return bool(args.compare_kv_cache_dtypes) or any(spec.kv_cache_dtype for spec in policies)


@dataclass
class Contestant:
    """One row: a policy, what else tells it from others, and the figures of each run."""

    spec: PolicySpec
    facts: dict[str, Any]
    settings: dict[str, Any]
    runs: list[Figures] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [run["output_tok_s"] for run in self.runs]

    def row(self, base: Contestant) -> dict[str, Any]:
        """The figures of the run with median throughput.

        The ratio is the median over turns, so that both of its sides saw the same load on the
        machine. Values of all runs are in ``..._all``.
        """
        by_rate = sorted(self.runs, key=lambda run: run["output_tok_s"])
        ratios = [rate / other for rate, other in zip(self.rates, base.rates, strict=False)]
        row = {
            "policy": self.spec.label,
            "policy_args": self.spec.as_dict,
            **self.facts,
            **by_rate[(len(by_rate) - 1) // 2],
            "ratio_to_first": median(ratios),
            "ratio_to_first_all": ratios,
            "output_tok_s_all": self.rates,
            "spread": _spread(self.rates, ",.0f"),
            "ratio_spread": None if self is base else _spread(ratios, ".2f"),
        }
        if row.get("compactions"):
            row["event_ms"] = 1000 * row.get("compaction_s", 0.0) / row["compactions"]
        return row


def _spread(values: Sequence[float], style: str) -> str | None:
    return f"{min(values):{style}}–{max(values):{style}}" if len(values) > 1 else None


class Throughput(Benchmark):
    """A grid of cells (sequence limit, pool size), each with every policy; runs take turns.

    A pool that is a share of the demand has as many bytes under every policy, in blocks of its own
    layout and dtype.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        args, checkpoint = self.args, self.checkpoint
        vocab = checkpoint.spec.vocab_size
        self._tokenizer = checkpoint.tokenizer() if DATASETS[args.dataset].text else None
        workload = self._workload = read_dataset(args, vocab, self._tokenizer)
        first = workload.prompt(0, [])
        assert first is not None
        lengths = [(len(first), workload.max_tokens(0))] * args.num_warmups
        self._warmup = random_prompts(lengths, vocab, args.seed + 1)
        self._block_size = args.block_size or DEFAULT_BLOCK_SIZE
        self._demand = blocks_at_once(workload, self._block_size)
        self._pools: list[int | None] = [args.num_gpu_blocks_override]
        self._same_bytes = bool(args.pool_shares and not args.num_gpu_blocks_override)
        if self._same_bytes:
            sizes = {max(2, ceil(share * self._demand)) for share in args.pool_shares}
            self._pools = sorted(sizes)
        limits = sorted(set(args.sequence_limits))
        varies = len(limits) * len(self._pools) > 1
        self._cells = [
            [each for spec in self.policies for each in self._sides(spec, limit, blocks, varies)]
            for limit, blocks in product(limits, self._pools)
        ]
        for each in chain.from_iterable(self._cells):
            self.engines.check(each.spec, block_size=self._block_size, **each.settings)

    def _sides(
        self, spec: PolicySpec, limit: int, blocks: int | None, varies: bool
    ) -> Iterator[Contestant]:
        """One contestant, or one for each way of running the policy that a ``--compare-...`` flag
        asks for."""
        ways: list[dict[str, str]] = [{}]
        if self.args.compare_prefix_caching:
            ways = [{"prefix_caching": side} for side in ("off", "on")]
        if _several_types(self.args, self.policies):
            held = self.as_held([spec])
            ways = [way | {"kv_cache_dtype": dtype} for way in ways for _, dtype in held]
            spec = held[0][0]
        if self.args.compare_speculation:
            ways = [way | {"speculation": side} for way in ways for side in ("off", "on")]
        cell = {"pool_blocks": blocks, "pool_share": self._share(blocks), "max_num_seqs": limit}
        for way in ways:
            settings: dict[str, Any] = {"max_num_seqs": limit, "num_gpu_blocks_override": blocks}
            if "prefix_caching" in way:
                settings["enable_prefix_caching"] = way["prefix_caching"] == "on"
            if "kv_cache_dtype" in way:
                settings["kv_cache_dtype"] = way["kv_cache_dtype"]
            if way.get("speculation") == "off":
                settings["speculative_config"] = {}
            yield Contestant(spec, way | (cell if varies else {}), settings)

    def _share(self, blocks: int | None) -> float | None:
        return None if blocks is None else blocks / self._demand

    def measure(self) -> None:
        repeat = self.args.repeat
        for turn, cell in product(range(repeat), self._cells):
            for each in cell:
                facts = (f"{name} {value}" for name, value in each.facts.items())
                title = ", ".join([each.spec.label, *facts])
                title += f" {turn + 1}/{repeat}" if repeat > 1 else ""
                each.runs.append(self.run_once(each.spec, title, **each.settings))

    def run_once(self, spec: PolicySpec, title: str, **settings: Any) -> Figures:
        """The figures of one run on an engine of its own, behind a warm-up of random prompts."""
        if self._same_bytes:  # the null block's, too
            blocks = settings.pop("num_gpu_blocks_override") + 1
            settings["kv_cache_memory"] = blocks * self._block_bytes
        settings |= {"block_size": self._block_size, "skip_tokenizer_init": self._tokenizer is None}
        engine = self.engines.build(spec, **settings)
        if len(self._warmup):
            play(engine, self._warmup)
        shown, clock = not self.args.disable_tqdm, CLOCKS[self.args.clock]
        played = play(engine, self._workload, title, shown, clock)
        return {
            **played.figures,
            **held_bytes(engine, played.figures),
            **accuracy(self._workload, played.answers),
        }

    @cached_property
    def _block_bytes(self) -> int:
        """Bytes of a block of the full cache in the model's dtype."""
        engine = self.engines.build(
            NO_COMPRESSION,
            kv_cache_dtype="auto",
            num_gpu_blocks_override=2,
            block_size=self._block_size,
            skip_tokenizer_init=True,
        )
        return engine.core.runner.cache.kv.nbytes // (engine.stats().blocks_total + 1)

    def report(self) -> Report:
        args = self.args
        rows = []
        for cell in self._cells:
            ran = [each for each in cell if each.runs]
            rows += [each.row(ran[0]) for each in ran]
        settings = self.settings("pool_shares", "dataset", "num_prompts", "repeat", "clock")
        settings |= {"max_num_seqs": args.sequence_limits, "block_size": self._block_size}
        settings |= {"demand_blocks": self._demand, **dataset_options(args)}
        if self._pools[0] is not None:
            settings["num_gpu_blocks_override"] = self._pools[0]
        demand = f"demand of {self._demand:,} blocks of {self._block_size} tokens"
        about = [
            f"{self._describe()} on {self.checkpoint.name}, "
            f"at most {' or '.join(map(str, args.sequence_limits))} running",
            *(
                f"pool sized from memory; {demand}"
                if blocks is None
                else f"pool of {blocks:,} blocks, {self._share(blocks):.2f} of the {demand}"
                for blocks in self._pools
            ),
        ]
        plots = plot_rows(rows, args.save_plots) if args.save_plots and rows else []
        return Report("throughput", about, _COLUMNS, rows, settings, notes(rows), plots=plots)

    def _describe(self) -> str:
        """The traffic in words; with the lengths of answers, unless these end by themselves."""
        args, workload = self.args, self._workload
        text = f"{args.num_prompts} x {args.dataset} (seed {args.seed})"
        if args.clock == "cpu":
            text = f"per second of CPU time, on a busy machine: {text}"
        if not workload.ignore_eos:
            return text
        limits = [workload.max_tokens(index) for index in range(len(workload))]
        low, high, mean = min(limits), max(limits), sum(limits) / len(limits)
        spread = f"{low:,} to {high:,} tokens, {mean:,.0f} on average"
        if low == high:
            spread = f"{high:,} tokens"
        prompt = len(workload.prompt(0, []) or [])
        return f"{text}, prompts of {prompt:,} tokens, answers of {spread},"


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes that a reader must not overlook: one for each way of running a policy."""
    found: list[str] = []
    lines: dict[str, list[Row]] = {}
    for row in rows:
        told = [
            row["policy"],
            *(f"{name.replace('_', ' ')} {row[name]}" for name in _WAYS if name in row),
        ]
        lines.setdefault(", ".join(told), []).append(row)
    for label, line in lines.items():
        compresses = line[0]["policy_args"]["name"] != NO_COMPRESSION.name
        ratios = [row["ratio_to_first"] for row in line]
        if compresses and not any(row["compactions"] for row in line):
            found.append(f"{label}: no event; its budget was never reached")
        elif len(line) > 1 and ratios != [1.0] * len(line):
            said = ", ".join(f"{_where(row)} {row['ratio_to_first']:.2f}" for row in line)
            found.append(f"{label}: times the first row of its cell: {said}")
        elif len(line) == 1 and ratios[0] < 1:
            found.append(f"{label}: {ratios[0]:.2f} of the first row; it did not pay here")
        for row in line:
            if row["cut_short"]:
                found.append(
                    f"{label}: {row['cut_short']} requests ended early: each did not fit the pool "
                    "even alone"
                )
    return found


def _where(row: Row) -> str:
    share = row["pool_share"]
    return f"at {row['max_num_seqs']}:" if share is None else f"on a pool of {share:.2f}:"
