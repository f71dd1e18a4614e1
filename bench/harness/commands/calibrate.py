"""``kvserve calibrate``: measures where a model's queries point, once, for policy triattention; or
the table of its entries in few bits (``--entries``).

Queries are counted while the engine runs the model over text, in chunks of prefill, or over a
task's prompts and the model's own answers. None is held.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.harness.datasets.tasks import TASKS, default_tasks
from bench.harness.datasets.workload import task_prompts
from bench.harness.measuring.measure import play
from bench.harness.reports.plots import plot_layers
from bench.harness.reports.report import Column, markdown_table
from bench.harness.setup.checkpoint import Engines, MeasuredModel, opened_checkpoint
from bench.harness.setup.options import (
    add_setting_flags,
    at_least,
    check_matplotlib,
    file_name,
)
from bench.harness.setup.policy_spec import NO_COMPRESSION
from kvserve.config import SETTINGS
from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.entry_statistics import FILE as TABLE
from kvserve.engine.cache.entry_statistics import OF_HEADS, measured
from kvserve.engine.cache.entry_table import EntryTable
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.query_statistics import FILE, QueryStatistics, identity_of, refusal
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.models.rotary import Rotary
from kvserve.engine.models.transformer import Transformer
from kvserve.entry_format import FORMATS
from kvserve.flags import add_flag
from kvserve.log import ConfigError
from kvserve.progress import progress
from kvserve.sampling_params import SamplingParams

_SAMPLES = 8  # of a task, at a time
_SUITS, _HARDLY = 0.5, 0.25
_COLUMNS = (
    Column("layer", "layer", "d"),
    Column("mean", "mean", ".2f"),
    Column("lowest head", "low", ".2f"),
    Column("highest head", "high", ".2f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flag(SETTINGS["model"], parser, default=SETTINGS["model"].default)
    text = parser.add_mutually_exclusive_group()
    words = "text that is like what the model will read and write"
    text.add_argument("--text", type=Path, metavar="FILE", help=words)
    words = (
        f"a shipped task, whose prompts the model answers: {', '.join(TASKS)} (default: those that "
        "a shipped model was trained for)"
    )
    text.add_argument("--dataset", choices=TASKS, metavar="TASK", help=words)
    words = (
        "measure what entries in few bits are written by (--kv-cache-dtype 3bit), from --text, as "
        f"the engine does from a text of its own; {TABLE} beside the model is found by itself"
    )
    parser.add_argument("--entries", action="store_true", help=words)
    words = (
        "tokens to count (default: 32768; of --entries 2560, and it takes their square in bytes)"
    )
    parser.add_argument("--tokens", type=at_least(1), metavar="N", help=words)
    names = file_name(".stats", ".safetensors", ".pt", ".table", folder_exists=True)
    words = f"file to write; {FILE} beside the model is found by itself, .pt is as released"
    parser.add_argument("--output", type=names, required=True, metavar="FILE", help=words)
    words = "draw the concentration of every head"
    parser.add_argument("--plot", type=file_name(".png"), metavar="FILE.png", help=words)
    add_setting_flags(parser, "tokenizer", "dtype", "max_model_len", "max_num_batched_tokens")
    parser.add_argument("--seed", type=at_least(0), default=1, metavar="N", help="of the task")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="torch threads")
    add_setting_flags(parser, "trust_remote_code")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.set_defaults(fail=parser.error, load_format="auto", max_num_seqs=_SAMPLES)


def run(args: argparse.Namespace) -> int:
    check_matplotlib(args, "plot")
    if (args.output.suffix == ".table") is not args.entries:
        args.fail("--output: a .table is what --entries writes")
    if args.entries:
        return _entries(args)
    args.tokens = args.tokens or 32_768
    with opened_checkpoint(args) as checkpoint:
        found = _measure(args, checkpoint)
    found.save(args.output)
    lines = [*_describe(found, checkpoint.name), f"saved to {args.output}"]
    if args.plot:
        title = f"where the queries of {checkpoint.name} point"
        plot_layers(found.concentration, title, "query head", "concentration", args.plot)
        lines.append(f"plot saved to {args.plot}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _entries(args: argparse.Namespace) -> int:
    """The table of entries in few bits, of a text."""
    if args.text is None or args.plot:
        args.fail("--entries: --text FILE is what the model reads; there is nothing to --plot")
    with opened_checkpoint(args) as checkpoint:
        engine = Engines(args, checkpoint).build(NO_COMPRESSION, enforce_eager=True)
        ids = _text_ids(engine, args)[: args.tokens or OF_HEADS]
        found = measured(engine.core.runner.model, checkpoint.path, ids)
    found.save(args.output)
    bits = "\n".join(
        f"{name}: {', '.join(f'{key}+{value}' for key, value in bits)}"
        for name, bits in _bits_of(found, checkpoint.spec.head_dim)
    )
    words = f"bits of keys and values by layer, over {len(ids):,} tokens\n{bits}\n"
    sys.stdout.write(f"{words}saved to {args.output}\n")
    return 0


def _bits_of(table: EntryTable, dim: int) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    layers = list(range(len(table.mean)))
    for form in FORMATS.values():
        if form.average and form.refusal(dim) is None:
            yield form.name, table.bits(form, dim, layers)


def _measure(args: argparse.Namespace, checkpoint: MeasuredModel) -> QueryStatistics:
    if (reason := refusal(checkpoint.spec)) is not None:
        raise ConfigError(f"--model: {reason}")
    shipped = args.model.startswith("kvserve/")
    if args.text is None and args.dataset is None and not shipped:
        args.fail("--text FILE, or --dataset TASK: say what the model is to read")
    engines = Engines(args, checkpoint)
    # Every token is to be computed, by modules that call back.
    engine = engines.build(NO_COMPRESSION, enable_prefix_caching=False, enforce_eager=True)
    runner = engine.core.runner
    census = QueryCensus(runner.model, runner.cache)
    steps = _read(engine, args) if args.text else _answer(engine, args, checkpoint)
    hidden = args.disable_tqdm
    with progress(total=args.tokens, desc="calibrate", unit="token", hidden=hidden) as bar:
        for _ in steps:
            bar.update(min(census.tokens, args.tokens) - bar.n)
            if census.tokens >= args.tokens:
                break
    census.close()
    return census.found()


def _read(engine: LLMEngine, args: argparse.Namespace) -> Iterator[None]:
    """Prefill the text's pieces, a step at a time."""
    ids = _text_ids(engine, args)
    longest = engine.core.info.max_model_len - 1
    ids = ids[: args.tokens]
    for start in range(0, len(ids), longest):
        params = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add_request(f"piece {start}", ids[start : start + longest], params)
        while engine.has_unfinished_requests:
            engine.step()
            yield


def _text_ids(engine: LLMEngine, args: argparse.Namespace) -> list[int]:
    assert engine.tokenizer is not None
    try:
        ids = engine.tokenizer.encode(args.text.read_text())
    except (OSError, UnicodeDecodeError) as error:
        args.fail(f"--text: {error}")
    if len(ids) < 2:
        args.fail(f"--text: {args.text} has {len(ids)} tokens")
    return ids


def _answer(
    engine: LLMEngine, args: argparse.Namespace, checkpoint: MeasuredModel
) -> Iterator[None]:
    """Let the model answer samples of its tasks, a few of each in turn."""
    tasks: Sequence[str] = [args.dataset] if args.dataset else default_tasks(args.model)
    tokenizer, seed = checkpoint.tokenizer(), args.seed
    while True:
        for task in tasks:
            play(engine, task_prompts(task, _SAMPLES, tokenizer, seed))
            yield
        seed += 1


def _describe(found: QueryStatistics, model: str) -> list[str]:
    each = found.concentration
    rows = [
        {"layer": n, "mean": float(x.mean()), "low": float(x.min()), "high": float(x.max())}
        for n, x in enumerate(each)
    ]
    return [
        f"concentration of {model}'s queries before RoPE, over {found.tokens:,} tokens",
        "(1: all queries of a head point one way; 0: nowhere in particular)",
        "",
        markdown_table(_COLUMNS, rows),
        "",
        verdict(found),
    ]


def verdict(found: QueryStatistics) -> str:
    """Whether triattention suits the model, in a sentence."""
    middle = float(found.concentration.median())
    share = float((found.concentration >= _SUITS).float().mean())
    heads = f"its median is {middle:.2f}, and {share:.0%} of the heads are at {_SUITS} or above"
    if middle >= _SUITS:
        return f"triattention suits this model: {heads}."
    if middle >= _HARDLY:
        return f"triattention may suit this model ({heads}): compare it with kara (kvserve eval)."
    return f"triattention hardly suits this model: {heads}; kara asks the queries themselves."


# ---- counting -----------------------------------------------------------------------------------


class QueryCensus:
    """Counts every query that goes through ``cache`` until ``close``; sums are float64."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        spec = self._spec = model.spec
        shape, device = (spec.num_layers, spec.num_heads), model.embedding.device
        self._sum = torch.zeros(*shape, spec.head_dim, dtype=torch.float64, device=device)
        half = spec.head_dim // 2
        self._magnitudes = torch.zeros(*shape, half, dtype=torch.float64, device=device)
        self._rotaries: list[Rotary | None] = [
            None
            if layer in spec.without_rope
            else (model.rotary_of_windows or model.rotary)
            if layer in spec.windowed
            else model.rotary
            for layer in range(spec.num_layers)
        ]
        self._cache, self.tokens = cache, 0
        cache.on_queries = self._add

    def close(self) -> None:
        self._cache.on_queries = None

    def found(self) -> QueryStatistics:
        """What has been added up; at least one token has."""
        mean, magnitude = ((x / self.tokens).float().cpu() for x in (self._sum, self._magnitudes))
        return QueryStatistics(mean, magnitude, self.tokens, identity_of(self._spec))

    def _add(self, layer: int, batch: ForwardBatch, q: Tensor) -> None:
        pairs = _turned_back(q.float(), self._rotaries[layer], batch.positions)
        self._sum[layer] += pairs.double().sum(dim=0).flatten(-2)
        self._magnitudes[layer] += pairs.norm(dim=-2).double().sum(dim=0)
        if layer == 0:
            self.tokens += len(q)


def _turned_back(q: Tensor, rotary: Rotary | None, positions: Tensor) -> Tensor:
    """Queries [T, Hq, D] before RoPE, as pairs: [T, Hq, 2, D/2]."""
    pairs = q.unflatten(-1, (2, -1))
    if rotary is None:
        return pairs
    assert rotary.inv_freq is not None, "of RoPE whose frequencies change there are no statistics"
    angles = positions[:, None].float() * rotary.inv_freq
    cos, sin = (x[:, None] / rotary.factor for x in (angles.cos(), angles.sin()))
    low, high = pairs.unbind(dim=-2)
    return torch.stack([low * cos + high * sin, high * cos - low * sin], dim=-2)
