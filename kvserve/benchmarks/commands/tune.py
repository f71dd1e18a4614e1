"""``kvserve tune``: which of Kara's windows, ratios and periods suit a card, a pool and requests.

Every setting is simulated on the same requests, with the real scheduler (``simulator``) and
modelled costs (``cost_model``). Accuracy is not modelled: `kvserve eval` measures it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any

from kvserve.benchmarks.reports.report import Column, Report, Row, measure_and_publish
from kvserve.benchmarks.setup.options import add_report_arguments, at_least, check_complete, number
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec, policy_spec
from kvserve.benchmarks.simulator.break_even import break_even, event_s_per_token, mean_held
from kvserve.benchmarks.simulator.cost_model import Queries
from kvserve.benchmarks.simulator.scenario import Scenario, add_scenario_arguments, read_scenario
from kvserve.benchmarks.simulator.simulator import Simulation
from kvserve.engine.cache.query_log import LogForm
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.log import ConfigError
from kvserve.progress import progress
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.periodic import Periodic
from kvserve.scheduler.triggers.pruning import Pruned

_WORTH_IT = 1.03  # the smallest gain for which a setting is recommended
_SETTINGS = (
    *("window", "ratio", "period", "query_source", "buffer", "num_requests", "input_len_mean"),
    *("input_len_cap", "output_len_mean", "output_len_cap", "len_sigma", "seed", "max_num_seqs"),
    *("max_num_batched_tokens", "block_size"),
)
_DESCRIPTION = """\
Which of Kara's windows, ratios and periods suit a card, a pool and lengths of requests. Every
combination is simulated on the same requests: the real scheduler, modelled times, no weights and
no GPU. "vs none" is what the simulation gives, "estimate" what the break-even formula says of a
full pool in steady state. Accuracy is not modelled: `kvserve eval` measures it.

example:
  kvserve tune --shape llama-3.1-8b --device h100 --kv-cache-memory 40GiB --output-len-mean 3000"""
_COLUMNS = (
    Column("policy", "policy", left=True),
    Column("output tok/s", "output_tok_s", ",.0f"),
    Column("vs none", "ratio_to_none", ".2f"),
    Column("estimate", "estimated_ratio", ".2f"),
    Column("mean running", "mean_running", ".0f"),
    Column("held/logical", "held_over_logical", ".2f"),
    Column("pool in use", "mean_pool_usage", ".0%"),
    Column("preemptions", "preemptions", ",d"),
    Column("time in events", "event_share", ".1%"),
    Column("itl p50 ms", "itl_p50_ms", ".1f"),
    Column("itl p99 ms", "itl_p99_ms", ".1f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    count = at_least(1)
    add_scenario_arguments(parser)
    grid = parser.add_argument_group("the grid: every combination is simulated")
    words = "W, generated tokens per window (default: 256 512 768)"
    windows = [256, 512, 768]
    grid.add_argument("--window", nargs="+", type=count, default=windows, metavar="N", help=words)
    words = "r, share of a window's older tokens that is kept (default: 0.2 0.3 0.5)"
    ratios = [0.2, 0.3, 0.5]
    grid.add_argument(
        "--ratio", nargs="+", type=number(0, 1), default=ratios, metavar="X", help=words
    )
    words = "decode steps between two checks for full windows (default: 32 128)"
    grid.add_argument("--period", nargs="+", type=count, default=[32, 128], metavar="N", help=words)
    words = "where the windows' queries come from (default: log)"
    sources = ("log", "recompute")
    grid.add_argument("--query-source", nargs="+", choices=sources, default=["log"], help=words)
    words = "U, newest tokens of a window, always kept (default: 32)"
    grid.add_argument("--buffer", type=at_least(0), default=32, metavar="N", help=words)
    words = "one more row, as in snapkv:trigger=threshold,budget=1025,threshold=1280"
    grid.add_argument(
        "--policy", type=policy_spec, action="append", default=[], metavar="SPEC", help=words
    )
    add_report_arguments(parser)
    parser.set_defaults(fail=parser.error)


def run(args: argparse.Namespace) -> int:
    return measure_and_publish(Tuning(args, read_scenario(args), chosen_rows(args)), args)


def chosen_rows(args: argparse.Namespace) -> list[PolicySpec]:
    """``none``, every combination of the grid, and the further rows."""
    specs = [NO_COMPRESSION]
    grid = ("window", "ratio", "period", "query_source")
    for values in product(*(getattr(args, name) for name in grid)):
        fields = {**dict(zip(grid, values, strict=True)), "buffer": args.buffer}
        try:
            specs.append(PolicySpec("kara").with_fields(**fields))
        except PolicyError as error:
            args.fail(f"--{error.argument}: {error}")
    check_complete(args, args.policy)
    for spec in args.policy:
        if isinstance(make_policy(spec.as_dict).event_trigger, Pruned):
            args.fail(f"--policy: {spec.name} prunes inside a forward, which is not simulated")
    return specs + [spec for spec in args.policy if spec not in specs]


def event_queries(policy: Policy, spec: ModelSpec) -> Queries:
    """Where a policy's events get their queries."""
    reduction = policy.query_reduction or policy.recomputed_reduction
    if reduction is None:
        return Queries("none")
    count = policy.event_trigger.num_queries
    return Queries(
        "log" if policy.query_reduction else "recompute",
        spec.num_heads if reduction == "heads" else spec.num_kv_heads,
        len(policy.query_places(count)) / count,
    )


class Tuning:
    """The runs of one command; the first is ``none``."""

    def __init__(
        self, args: argparse.Namespace, scenario: Scenario, specs: Sequence[PolicySpec]
    ) -> None:
        self._args = args
        self._scenario = scenario
        self._specs = specs
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        for spec in progress(self._specs, hidden=self._args.disable_tqdm, unit="run"):
            self._rows.append(self._row(spec))

    def report(self) -> Report:
        args, scenario = self._args, self._scenario
        settings = {name: getattr(args, name) for name in _SETTINGS}
        settings |= {"model": scenario.model, "pool_tokens": scenario.pool_tokens}
        settings |= {"lengths": args.lengths and str(args.lengths)}
        about = [
            "SIMULATED, not measured: real scheduler, modelled costs. Accuracy is not modelled.",
            *scenario.describe(),
        ]
        rows = sorted(self._rows, key=lambda row: -row["output_tok_s"])
        device = {"type": "simulated", "name": scenario.device}
        return Report("tune", about, _COLUMNS, rows, settings, notes(rows), device=device)

    def _row(self, spec: PolicySpec) -> dict[str, Any]:
        policy, scenario = make_policy(spec.as_dict), self._scenario
        queries = event_queries(policy, scenario.cost.spec)
        log_tokens = self._log_tokens(policy, queries)
        scheduler = scenario.scheduler(log_tokens)
        lengths = scenario.prompts, scenario.outputs
        try:
            run = Simulation(scheduler, policy.event_trigger, scenario.cost, queries, *lengths)
        except ValueError as error:
            raise ConfigError(f"--kv-cache-tokens: under {spec.label} {error}") from None
        figures = run.run()
        first = self._rows[0] if self._rows else figures
        row = {"policy": spec.label, "policy_args": spec.as_dict, **figures}
        if policy.granularity is not Granularity.MODEL:
            row["lengths"] = policy.granularity.value
        row["ratio_to_none"] = figures["output_tok_s"] / first["output_tok_s"]
        if isinstance(policy.event_trigger, Periodic):
            log = scenario.block_size / log_tokens if policy.event_trigger.logs else 0.0
            row |= self._estimate(policy.event_trigger, queries, log)
        return row

    def _log_tokens(self, policy: Policy, queries: Queries) -> int:
        """Tokens whose logged queries fill one block."""
        layout, device = self._scenario.layout, self._scenario.cost.device
        dtype = policy.logged_dtype
        if dtype == "auto":
            dtype = "fp8" if device.fp8 else "model"
        heads = queries.heads if queries.source == "log" else layout.num_kv_heads
        try:
            form = self._scenario.cost.form
            return LogForm(heads, dtype).block_tokens(layout, form, device.dtype_bytes)
        except ValueError as error:
            raise ConfigError(f"--block-size: {error}") from None

    def _estimate(self, trigger: Periodic, queries: Queries, log: float) -> dict[str, Any]:
        """The break-even formula's estimate for a row; ``log`` as in ``mean_held``."""
        scenario = self._scenario
        lengths = scenario.prompts, scenario.outputs
        held_0, held_1 = mean_held(*lengths, None, 0.0), mean_held(*lengths, trigger, log)
        found = break_even(
            scenario.cost,
            scenario.pool_tokens,
            scenario.max_num_seqs,
            held_0,
            held_1,
            *event_s_per_token(scenario.cost, trigger, queries, held_1),
        )
        return {
            "estimated_ratio": found.gain,
            "saved_ms_per_step": 1e3 * found.saved_s,
            "paid_ms_per_step": 1e3 * found.paid_s,
            "memory_bound": found.memory_bound,
        }


# ---- notes --------------------------------------------------------------------------------------


def notes(rows: Sequence[Row]) -> list[str]:
    """Each ratio's fastest setting with its break-even, then the advice; ``rows`` by throughput."""
    if not any(row["policy"] == NO_COMPRESSION.name for row in rows):
        return []
    best: dict[float, Row] = {}
    for row in rows:
        if "saved_ms_per_step" in row and "ratio" in row["policy_args"]:
            best.setdefault(row["policy_args"]["ratio"], row)
    found = [_advice(ratio, best[ratio]) for ratio in sorted(best, reverse=True)]
    if any(row["ratio_to_none"] >= _WORTH_IT for row in best.values()):
        found.append(
            "Take the largest ratio whose gain you need, and measure on your tasks what it and the "
            "window do to accuracy: kvserve eval --policy ..."
        )
    else:
        found.append("Compression does not pay here: take --policy none.")
    for row in rows:
        if row["cut_short"]:
            found.append(
                f"{row['policy']}: {row['cut_short']} requests ended early: each did not fit the "
                "pool even alone"
            )
        if "lengths" in row:
            found.append(
                f"{row['policy']}: simulated as if all layers and heads held their mean; its block "
                "tables, and the half empty block at the end of each, are not modelled"
            )
    return found


def _advice(ratio: float, row: Row) -> str:
    saved, paid = row["saved_ms_per_step"], row["paid_ms_per_step"]
    bound = "memory-bound" if row["memory_bound"] else "not memory-bound"
    verdict = "" if row["ratio_to_none"] >= _WORTH_IT else ": does not pay"
    return (
        f"ratio {ratio:g}: {row['policy']}, {row['ratio_to_none']:.2f} times none{verdict}; "
        f"break-even ({bound}): {saved:.2f} ms saved per step {'>' if saved > paid else '<='} "
        f"{paid:.2f} ms paid for events"
    )
