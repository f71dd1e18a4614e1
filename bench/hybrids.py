"""Output tokens per second of a small Qwen 3.5 on layers of our own, beside transformers' modules
on kvserve's cache and beside transformers' ``generate``, in turns.

    python -m bench.hybrids --save-result bench/results/DATE-NAME.json

Random weights and prompts of one length, greedy, one thread, one process. A ratio is the median
over turns. Three of four layers have the gated delta rule.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from bench.harness.reports.report import Column, Report, Row, measure_and_publish
from bench.harness.setup.options import add_report_arguments, at_least
from bench.weight_forms import add_turns
from kvserve import LLM, SamplingParams

COLUMNS = (
    Column("batch", "batch", "d"),
    Column("kvserve", "native", ",.1f"),
    Column("its cache, their modules", "modules", ",.1f"),
    Column("transformers", "transformers", ",.1f"),
    Column("kvserve / transformers", "vs_transformers", ".2f"),
)
_VOCAB = 8192
Answers = Callable[[list[list[int]], int], None]
"""Goes on with prompts by so many tokens each."""


class Hybrids:
    """Rows: sequences at once. In each, the three take turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._rows = args, list[Row]()
        self._replayed = False

    def measure(self) -> None:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder))
            engines = {impl: self._engine(folder, impl) for impl in ("native", "transformers")}
            parties = {
                "native": _answers_of(engines["native"]),
                "modules": _answers_of(engines["transformers"]),
                "transformers": _generate_of(folder),
            }
            for batch in self._args.batches:
                self._rows.append(self._row(parties, batch))
            graphs = engines["native"].engine.core.runner.graphs
            self._replayed = graphs is not None and graphs.replays > 0

    def _write(self, folder: Path) -> None:
        args = self._args
        config = AutoConfig.for_model(
            "qwen3_5_text",
            **{"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden},
            **{"num_hidden_layers": args.layers, "vocab_size": _VOCAB, "eos_token_id": 1},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": args.hidden // 4},
            **{"linear_num_key_heads": 8, "linear_num_value_heads": 8},
            **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
            **{"max_position_embeddings": 4096, "pad_token_id": 0},
        )
        torch.manual_seed(args.seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def _engine(self, folder: str, impl: str) -> LLM:
        """In float32."""
        settings: dict[str, Any] = {"model_impl": impl, "max_num_seqs": max(self._args.batches)}
        length = self._args.input_len + self._args.output_len
        settings |= {"skip_tokenizer_init": True, "max_model_len": length}
        return LLM(folder, dtype="float32", **settings)

    def _row(self, parties: dict[str, Answers], batch: int) -> Row:
        args, rates = self._args, {name: list[float]() for name in parties}
        generator = torch.Generator().manual_seed(args.seed)
        size = batch, args.input_len
        prompts = torch.randint(3, _VOCAB, size, generator=generator).tolist()
        for answer in parties.values():
            answer(prompts, 4)
        for _ in range(args.repeat):
            for name, answer in parties.items():
                begun = time.perf_counter()
                answer(prompts, args.output_len)
                seconds = time.perf_counter() - begun
                rates[name].append(batch * args.output_len / seconds)
        row: dict[str, Any] = {"batch": batch, "output_tok_s_all": rates}
        row |= {name: median(all_) for name, all_ in rates.items()}
        pairs = zip(rates["native"], rates["transformers"], strict=True)
        return row | {"vs_transformers": median(own / its for own, its in pairs)}

    def report(self) -> Report:
        args = self._args
        about = [
            f"Qwen 3.5, {args.layers} layers, hidden {args.hidden}, random, float32: output tokens "
            f"per second, {args.input_len} + {args.output_len} tokens, one thread; medians of "
            f"{args.repeat} turns; steps were {'' if self._replayed else 'not '}recorded",
            f"transformers {transformers.__version__}, torch {torch.__version__}",
        ]
        names = "layers", "hidden", "input_len", "output_len", "repeat", "seed"
        settings = {name: getattr(args, name) for name in names}
        program = "python -m bench.hybrids"
        return Report("hybrids", about, COLUMNS, self._rows, settings, [], program=program)


def _answers_of(llm: LLM) -> Answers:
    def answer(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    return answer


def _generate_of(folder: str) -> Answers:
    """transformers' own loop, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=mask, max_new_tokens=count, **how)

    return answer


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_report_arguments(parser)
    for name, usual, words in (
        ("layers", 4, "every fourth attends"),
        ("hidden", 512, "numbers of a hidden state, a multiple of 64"),
    ):
        words = f"{words} (default: {usual})"
        parser.add_argument(f"--{name}", type=at_least(1), default=usual, metavar="N", help=words)
    add_turns(parser, [1, 16])
    return parser


def main() -> int:
    args = make_parser().parse_args()
    return measure_and_publish(Hybrids(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
