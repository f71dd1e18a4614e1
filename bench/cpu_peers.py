"""Output tokens per second of kvserve and of other CPU engines on one CPU, in turns.

    python -m bench.peers.install     # once: about a quarter of an hour
    python -m bench.cpu_peers --save-result bench/results/DATE-cpu-peers.json
    python -m bench.cpu_peers --traffic long --shapes 4m --dtypes bfloat16
    python -m bench.cpu_peers --traffic long --task long-chain-2000 --num-prompts 100
    python -m bench.cpu_peers --prompts edit --input-len 400 --output-len 400 --shapes 4m \
        --dtypes float32 --contestants kvserve_cpu_model kvserve_ngram vllm vllm_ngram

Each engine has a process of its own on the same CPU, with one thread, the same random weights and
the same prompts, and is warmed up. The engines take turns; a ratio is the median over turns. Every
output is checked for its length, and the share of sequences with the same tokens as kvserve's is in
the JSON file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bench.harness.datasets.tasks import TASKS
from bench.harness.reports.report import Column, Report, Row, measure_and_publish
from bench.harness.setup.checkpoint import SHAPES, opened_checkpoint
from bench.harness.setup.options import (
    add_report_arguments,
    at_least,
    number,
)
from bench.harness.setup.policy_spec import NO_COMPRESSION, PolicySpec, policy_spec
from bench.peers.contestants import BASE, CONTESTANTS, Contestant
from bench.peers.copying import PROMPTS, copying_prompts, cycle, let_it_walk
from bench.peers.long_traffic import COLUMNS as LONG_COLUMNS
from bench.peers.long_traffic import LongCase, LongTraffic
from bench.peers.peer import PEERS, PeerError, PeerProcess
from kvserve.config import KV_CACHE_DTYPES
from kvserve.engine.models.hub import find_model

_WARMUP_TOKENS = 8


_LEFT_OUT = (
    *("kvserve_torch_layer", "kvserve_torch_head", "transformers_continuous"),
    *("kvserve_ngram", "vllm_ngram"),
)
DEFAULT = [name for name in CONTESTANTS if name not in _LEFT_OUT]
SHORT_COLUMNS = (
    Column("shape", "shape", left=True),
    Column("dtype", "dtype", left=True),
    Column("batch", "batch", "d"),
    *(Column(each.title, each.name, ",.0f") for each in CONTESTANTS.values()),
    Column("best peer", "best_peer", left=True),
    Column("kvserve / it", "vs_best_peer", ".2f"),
    *(
        Column(f"{layout.upper()} / MODEL", f"{layout}_vs_model", ".2f")
        for layout in ("layer", "head")
    ),
    Column("kvserve n-gram / plain", "kvserve_ngram_gain", ".2f"),
    Column("vLLM n-gram / plain", "vllm_ngram_gain", ".2f"),
    Column("kvserve / vLLM, n-gram", "ngram_vs_vllm", ".2f"),
)
COLUMNS = (*SHORT_COLUMNS, *LONG_COLUMNS)


class Comparison:
    """The runs of one command: shapes x dtypes x batches; in each, all engines take turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cpu = _chosen_cpu(args)
        self._missing: list[str] = []
        self._versions: dict[str, str] = {}
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._present: list[Contestant] = []
        for name in args.contestants:
            each = CONTESTANTS[name]
            missing = each.peer and PEERS[each.peer].missing
            if missing:
                self._missing.append(missing)
            else:
                self._present.append(each)

    def measure(self) -> None:
        args = self._args
        cases = len(args.shapes) * len(args.dtypes) * len(args.batches)
        silent = True if args.disable_tqdm else None
        total = cases * args.repeat * len(self._present)
        with tqdm(total=total, unit="run", disable=silent) as bar:
            for shape in args.shapes:
                with _random_checkpoint(shape, args.seed) as model:
                    if args.prompts != "random":
                        let_it_walk(model, self._cycle(shape))
                    for dtype in args.dtypes:
                        self._measure_with(shape, model, dtype, bar)

    def _cycle(self, shape: str) -> list[int]:
        args = self._args
        return cycle(SHAPES[shape]["vocab_size"], args.input_len, args.seed)

    def report(self) -> Report:
        args = self._args
        weights = "random weights"
        if args.prompts != "random":
            weights = f"weights that copy a prompt ({args.prompts})"
        about = [
            f"output tokens per second, {args.input_len} + {args.output_len} tokens, "
            f"{weights}, one thread on CPU {self._cpu}; medians of {args.repeat} runs in turns",
            ", ".join(f"{name} {version}" for name, version in self._versions.items()),
        ]
        names = ("prompts", "input_len", "output_len", "repeat", "seed")
        settings = {
            **{name: getattr(args, name) for name in names},
            "cpu": self._cpu,
            "versions": self._versions,
            "missing": self._missing,
        }
        notes = [*dict.fromkeys([*self._missing, *self._notes])]
        program = "python -m bench.cpu_peers"
        return Report(
            "cpu_peers", about, SHORT_COLUMNS, self._rows, settings, notes, program=program
        )

    def _measure_with(self, shape: str, model: Path, dtype: str, bar: tqdm) -> None:
        """One set of processes serves all batches."""
        args = self._args
        with ExitStack() as stack:
            processes = {}
            for each in self._present:
                bar.set_description(f"{shape} {dtype}, loading {each.name}")
                try:
                    process = each.start(self._cpu)
                    stack.callback(process.close)
                    self._versions |= process.load(
                        model=str(model),
                        dtype=dtype,
                        max_num_seqs=max(args.batches),
                        max_model_len=args.input_len + args.output_len,
                        **each.settings,
                    )
                except PeerError as error:
                    self._give_up(each, error, bar)
                    continue
                processes[each.name] = process
            for batch in args.batches:
                bar.set_description(f"{shape} {dtype}, batch {batch}")
                facts = {"shape": shape, "dtype": dtype, "batch": batch}
                self._rows.append(facts | self._case(processes, batch, facts, bar))

    def _case(
        self, processes: dict[str, PeerProcess], batch: int, facts: Row, bar: tqdm
    ) -> dict[str, Any]:
        args = self._args
        if args.prompts == "random":
            rng = np.random.default_rng(args.seed)
            vocab = SHAPES[str(facts["shape"])]["vocab_size"]
            prompts = rng.integers(3, vocab, (batch, args.input_len)).tolist()
        else:
            text, edited = self._cycle(str(facts["shape"])), args.prompts == "edit"
            prompts = copying_prompts(text, batch, edited=edited, seed=args.seed)
        rates: dict[str, list[float]] = {name: [] for name in processes}
        tokens: dict[str, list[list[int]]] = {}
        for process in processes.values():
            process.run(prompts=prompts, max_tokens=min(_WARMUP_TOKENS, args.output_len))
        for _ in range(args.repeat):
            for name, process in processes.items():
                result = process.run(prompts=prompts, max_tokens=args.output_len)
                tokens[name] = result["tokens"]
                if [len(row) for row in tokens[name]] != [args.output_len] * batch:
                    raise PeerError(f"{name} gave other lengths than it was asked for")
                rates[name].append(batch * args.output_len / result["seconds"])
                bar.update()
        return case_figures(rates, tokens)

    def _give_up(self, each: Contestant, error: PeerError, bar: tqdm) -> None:
        """Go on without an engine that does not start; the report says so."""
        last = str(error).strip().splitlines()[-1]
        self._notes.append(f"{each.title} did not start and is left out: {last}")
        bar.total -= self._args.repeat * len(self._args.batches)
        bar.refresh()


def case_figures(
    rates: dict[str, list[float]], tokens: dict[str, list[list[int]]]
) -> dict[str, Any]:
    """Medians per contestant; ratios are within a turn, to the peer with the highest median."""
    row: dict[str, Any] = {name: median(all_) for name, all_ in rates.items()}
    row["output_tok_s_all"] = rates
    peers = [name for name in rates if CONTESTANTS[name].peer and name != "vllm_ngram"]
    for figure, own, other in (
        ("kvserve_ngram_gain", "kvserve_ngram", BASE),
        ("vllm_ngram_gain", "vllm_ngram", "vllm"),
        ("ngram_vs_vllm", "kvserve_ngram", "vllm_ngram"),
    ):
        if own in rates and other in rates:
            row[figure] = _ratio(rates[own], rates[other])
    if BASE not in rates:
        return row
    if peers:
        best = max(peers, key=lambda name: row[name])
        row["best_peer"] = CONTESTANTS[best].title
        row["vs_best_peer"] = _ratio(rates[BASE], rates[best])
    for layout in ("layer", "head"):
        if f"kvserve_cpu_{layout}" in rates:
            row[f"{layout}_vs_model"] = _ratio(rates[f"kvserve_cpu_{layout}"], rates[BASE])
    row["same_tokens"] = {
        name: sum(a == b for a, b in zip(rows, tokens[BASE], strict=True)) / len(rows)
        for name, rows in tokens.items()
    }
    return row


def _ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return median(a / b for a, b in zip(own, other, strict=True))


@contextmanager
def _random_checkpoint(shape: str, seed: int) -> Iterator[Path]:
    """A Llama of this size as transformers writes it, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where = argparse.Namespace(
        threads=None, load_format="auto", shape=shape, model=None, tokenizer=None, seed=seed
    )
    with opened_checkpoint(where) as checkpoint:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(checkpoint.path)
        AutoModelForCausalLM.from_config(config).save_pretrained(checkpoint.path)
        yield checkpoint.path


class LongComparison:
    """Shapes x dtypes under ``--traffic long``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cpu = _chosen_cpu(args)
        self._cases: dict[tuple[str, str], LongCase] = {}

    def measure(self) -> None:
        args = self._args
        if args.task:
            for dtype in args.dtypes:
                model = find_model(args.model)
                self._measure(args.model, dtype, model, LongTraffic.of_task(args, model, dtype))
            return
        for shape in args.shapes:
            with _random_checkpoint(shape, args.seed) as model:
                for dtype in args.dtypes:
                    self._measure(shape, dtype, model, LongTraffic.of(args, shape, dtype))

    def _measure(self, shape: str, dtype: str, model: Path, traffic: LongTraffic) -> None:
        case = LongCase(self._args, traffic, dtype, self._cpu)
        self._cases[shape, dtype] = case
        case.measure(model, True if self._args.disable_tqdm else None)

    def report(self) -> Report:
        args, cases = self._args, self._cases
        busy = ", per second of CPU time on a busy machine" if args.clock == "cpu" else ""
        given = f"prompts of {args.input_len} tokens, random weights"
        if args.task:
            given = f"{args.task}, answers as long as the right ones"
        about = [
            f"{given}, one thread on CPU {self._cpu}{busy}; medians of {args.repeat} runs in turns",
            *(f"{' '.join(key)}: {case.traffic.describe()}" for key, case in cases.items()),
        ]
        names = (
            "task",
            "num_prompts",
            "input_len",
            "output_len",
            "output_sigma",
            "output_cap",
            "repeat",
            "clock",
        )
        settings = {name: getattr(args, name) for name in (*names, "pool_share", "seed")}
        settings["versions"] = {k: v for case in cases.values() for k, v in case.versions.items()}
        about.append(", ".join(f"{k} {v}" for k, v in settings["versions"].items()))
        rows = [
            row
            for (shape, dtype), case in cases.items()
            for row in case.rows({"shape": shape, "dtype": dtype})
        ]
        notes = [note for case in cases.values() for note in case.notes]
        columns = (*SHORT_COLUMNS[:2], *LONG_COLUMNS)
        program = "python -m bench.cpu_peers"
        return Report("cpu_peers_long", about, columns, rows, settings, notes, program=program)


def _chosen_cpu(args: argparse.Namespace) -> int:
    return args.cpu if args.cpu is not None else max(os.sched_getaffinity(0))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_report_arguments(parser)
    count = at_least(1)
    words = "short: so many sequences at once, all alike; long: answers of thousands of tokens on "
    words += "a pool that is too small for them (default: short)"
    parser.add_argument("--traffic", choices=("short", "long"), default="short", help=words)
    for name, default in (
        ("contestants", DEFAULT),
        ("shapes", list(SHAPES)),
        ("dtypes", ["float32", "bfloat16"]),
    ):
        choices = list(CONTESTANTS) if name == "contestants" else default
        words = f"some of {', '.join(choices)} (default: {', '.join(default)})"
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=default, metavar="NAME", help=words
        )
    words = (
        "short: random tokens, or a text that answers copy, or copy with edits; the answers are "
    )
    words += "right in every engine (default: random)"
    parser.add_argument("--prompts", choices=PROMPTS, default="random", help=words)
    words = "short: sequences at once (default: 1 16 64)"
    parser.add_argument(
        "--batches", nargs="+", type=count, default=[1, 16, 64], metavar="N", help=words
    )
    usual: int | None
    for name, usual, words in (
        ("input-len", None, "tokens per prompt (default: 64; long: 128)"),
        ("output-len", None, "tokens per output (default: 64; long: 3,000 on average)"),
        ("output-cap", 8192, "long: longest output (default: 8192)"),
        ("num-prompts", 16, "long: requests, all there at once (default: 16)"),
        ("repeat", 3, "turns (default: 3)"),
    ):
        parser.add_argument(f"--{name}", type=count, default=usual, metavar="N", help=words)
    for name, least, value, words in (
        ("output-sigma", 0, 0.7, "long: sigma of the logarithm of lengths (default: 0.7)"),
        ("pool-share", 0, 0.25, "long: pool, as a share of the demand (default: 0.25)"),
    ):
        parser.add_argument(f"--{name}", type=number(least), default=value, metavar="X", help=words)
    words = "long: this task on --model in place of random prompts and weights"
    parser.add_argument("--task", choices=TASKS, metavar="NAME", help=words)
    words = "long: the model of --task (default: kvserve/tiny-long)"
    parser.add_argument("--model", default="kvserve/tiny-long", metavar="MODEL", help=words)
    words = "long: kvserve under these (default: none and kara)"
    parser.add_argument("--policy", type=policy_spec, action="append", metavar="SPEC", help=words)
    parser.add_argument(
        "--kv-cache-dtypes",
        nargs="+",
        choices=KV_CACHE_DTYPES,
        default=["auto"],
        metavar="DTYPE",
        help="long: kvserve's cache held in each of these, vLLM's in auto and fp8 of them; some of "
        f"{', '.join(KV_CACHE_DTYPES)}",
    )
    words = (
        "long: seconds of the wall, or of each engine's process on a CPU, for a machine that is "
    )
    words += "busy with other things (default: wall)"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=words)
    parser.add_argument("--cpu", type=at_least(0), metavar="N", help="default: the last one")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="default: 0")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    torch.set_num_threads(1)  # as all peers have; the report prints it
    long = args.traffic == "long"
    args.policy = args.policy or [NO_COMPRESSION, PolicySpec("kara")]
    args.input_len = args.input_len or (128 if long else 64)
    args.output_len = args.output_len or (3000 if long else 64)
    return measure_and_publish(LongComparison(args) if long else Comparison(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
