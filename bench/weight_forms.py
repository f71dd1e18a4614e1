"""Output tokens per second with weights in the bits of their file, beside the same weights in
bfloat16 and beside llama.cpp on the same file, in turns.

    python -m bench.peers.install llama_cpp     # once: about ten minutes
    python -m bench.weight_forms --gguf smollm2.gguf --save-result bench/results/DATE-NAME.json
    python -m bench.weight_forms --shape 0.5b --form Q4_0

One CPU, one thread each, random prompts, greedy, every answer of the same length. ``--shape``: a
Llama of that size with random weights, written in ``--form``. A ratio is the median over turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np

from bench.harness.reports.report import Column, Report, Row, measure_and_publish
from bench.harness.setup.checkpoint import SHAPES
from bench.harness.setup.options import add_report_arguments, at_least
from bench.peers.gguf_file import copy_gguf, random_gguf
from bench.peers.peer import PEERS, PeerProcess

COLUMNS = (
    Column("batch", "batch", "d"),
    Column("kvserve", "kvserve", ",.1f"),
    Column("kvserve bf16", "bfloat16", ",.1f"),
    Column("llama.cpp", "llama_cpp", ",.1f"),
    Column("/ bf16", "vs_bfloat16", ".2f"),
    Column("/ llama.cpp", "vs_llama_cpp", ".2f"),
)


class WeightForms:
    """Rows: sequences at once. In each, the three take turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[Row] = []
        self._versions: dict[str, str] = {}
        self._vocab = 0

    def measure(self) -> None:
        args = self._args
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stored = args.gguf
            if args.shape:
                stored = folder / "stored.gguf"
                random_gguf(SHAPES[args.shape], stored, args.form, args.seed)
            widened = folder / "widened.gguf"
            copy_gguf(stored, widened, "BF16")
            reader = gguf.GGUFReader(stored)
            self._vocab = next(
                int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"
            )
            cpu = max(os.sched_getaffinity(0))
            processes = {
                "kvserve": PeerProcess.of_kvserve(cpu),
                "bfloat16": PeerProcess.of_kvserve(cpu),
                "llama_cpp": PeerProcess.of(PEERS["llama_cpp"], cpu=cpu),
            }
            for name, process in processes.items():
                stack.callback(process.close)
                self._versions |= process.load(
                    model=str(widened if name == "bfloat16" else stored),
                    dtype="bfloat16",
                    max_num_seqs=max(args.batches),
                    max_model_len=args.input_len + args.output_len,
                )
            for batch in args.batches:
                self._rows.append(self._row(processes, batch))

    def _row(self, processes: dict[str, PeerProcess], batch: int) -> Row:
        args = self._args
        rng = np.random.default_rng(args.seed)
        prompts = rng.integers(3, self._vocab, (batch, args.input_len)).tolist()
        rates: dict[str, list[float]] = {name: [] for name in processes}
        for process in processes.values():
            process.run(prompts=prompts, max_tokens=4)
        for _ in range(args.repeat):
            for name, process in processes.items():
                seconds = process.run(prompts=prompts, max_tokens=args.output_len)["seconds"]
                rates[name].append(batch * args.output_len / seconds)
        row: dict[str, Any] = {"batch": batch, "output_tok_s_all": rates}
        row |= {name: median(all_) for name, all_ in rates.items()}
        for other in ("bfloat16", "llama_cpp"):
            pairs = zip(rates["kvserve"], rates[other], strict=True)
            row[f"vs_{other}"] = median(own / its for own, its in pairs)
        return row

    def report(self) -> Report:
        args = self._args
        model = f"{args.shape} in {args.form}, random" if args.shape else Path(args.gguf).name
        about = [
            f"{model}: output tokens per second, {args.input_len} + {args.output_len} tokens, one "
            f"thread; medians of {args.repeat} turns",
            ", ".join(f"{name} {version}" for name, version in self._versions.items()),
        ]
        names = ("shape", "form", "input_len", "output_len", "repeat", "seed")
        settings = {name: getattr(args, name) for name in names} | {"versions": self._versions}
        settings["gguf"] = args.gguf and args.gguf.name
        program = "python -m bench.weight_forms"
        return Report("weight_forms", about, COLUMNS, self._rows, settings, [], program=program)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_report_arguments(parser)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file")
    model.add_argument("--shape", choices=SHAPES, help="a Llama of this size, random weights")
    parser.add_argument("--form", default="Q4_0", metavar="FORM", help="of --shape (Q4_0)")
    add_turns(parser, [1, 4, 16, 64])
    return parser


def add_turns(parser: argparse.ArgumentParser, batches: list[int]) -> None:
    """What takes turns: how many sequences at once, of which lengths, and how often."""
    words = f"sequences at once (default: {' '.join(map(str, batches))})"
    parser.add_argument(
        "--batches", nargs="+", type=at_least(1), default=batches, metavar="N", help=words
    )
    for name, usual, words in (
        ("input-len", 32, "tokens per prompt"),
        ("output-len", 64, "tokens per output"),
        ("repeat", 3, "turns"),
        ("seed", 0, "of prompts and weights"),
    ):
        words = f"{words} (default: {usual})"
        parser.add_argument(f"--{name}", type=at_least(0), default=usual, metavar="N", help=words)


def main() -> int:
    args = make_parser().parse_args()
    return measure_and_publish(WeightForms(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
