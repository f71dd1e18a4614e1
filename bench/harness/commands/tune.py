"""``kvserve tune``: what fits on a card, and at most how much faster a policy could make it.

Arithmetic, nothing runs: bytes of weights and entries, what a policy's own trigger leaves of one
request, and the bytes that a step reads over the card's bandwidth. `kvserve eval` says what a
policy costs in accuracy, `kvserve bench throughput --pool-shares` what it gives on your card.
With ``--frontier`` it chooses from what `kvserve bench frontier` has measured of both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.harness.commands.frontier import flags
from bench.harness.reports.report import Column, Report, measure_and_publish
from bench.harness.setup.checkpoint import LARGE_SHAPES
from bench.harness.setup.options import add_report_arguments, at_least, check_complete, number
from bench.harness.setup.policy_spec import NO_COMPRESSION, PolicySpec, policy_spec
from kvserve.config import KV_CACHE_DTYPES, ModelConfig
from kvserve.engine.cache.entry_store import block_bytes, remainder_bytes, score_bytes
from kvserve.engine.cache.log_form import choose_log
from kvserve.engine.models.borrowed_spec import text_config
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.loader import decoder_of
from kvserve.engine.models.spec import ModelSpec, parse_spec
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.runner.window_plan import windows_refusal
from kvserve.entry_format import EntryFormat, entry_format
from kvserve.log import ConfigError
from kvserve.measured import chosen
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.triggers.periodic import EngineWide
from kvserve.scheduler.triggers.pruning import Pruned
from kvserve.scheduler.triggers.trigger import NO_EVENT, RowState

GIB = 2**30
CARDS = {
    **{"b200": (179, 8.0), "h200": (140, 4.8), "h100": (79.6, 3.35), "a100": (80, 2.04)},
    **{"a100-40gb": (40, 1.56), "l40s": (45, 0.864), "rtx6000ada": (48, 0.96), "a40": (45, 0.696)},
    **{"a6000": (48, 0.768), "rtx5090": (31.8, 1.79), "rtx4090": (24, 1.01)},
    **{"rtx3090": (24, 0.936), "a10": (22.5, 0.6), "l4": (22.5, 0.3)},
}
"""Memory as nvidia-smi shows it, in GiB, and the data sheet's bandwidth in TB/s."""
_WITHOUT_FP8 = ("a100", "a100-40gb", "a40", "a6000", "rtx3090", "a10")
"""Below compute capability 8.9."""
_SHORT = {"8b": "llama-3.1-8b", "14b": "qwen3-14b", "32b": "qwen3-32b", "70b": "llama-3.1-70b"}
_BITS = {16: 16.0, 8: 8.0, 4: 4.156}  # with AWQ's scales and zeros: 20 bits for 128 weights
_DTYPES = ("auto", "int8", "k8v4")
_STEP = 1.5  # GiB of a card beside weights and pool: a guess, which the start-up table measures
_WIDENED = (
    "AWQ, GPTQ, compressed-tensors, FP8, Q4_0, Q4_1 and Q8_0 are held in their bits; other GGUF "
    "types and gpt-oss's experts are widened: for them take --quantization 16"
)
_ROWS = (PolicySpec("kara"), *(PolicySpec("kara", {"ratio": ratio}) for ratio in (0.1, 0.5)))
_COLUMNS = (
    Column("policy", "policy", left=True),
    Column("cache held in", "kv_cache_dtype", left=True),
    Column("entries the pool holds", "pool_entries", ",.0f"),
    Column("of a request, mean", "mean_entries", ",.0f"),
    Column("MiB of it, at most", "request_mib", ",.0f"),
    Column("requests at once", "at_once", ",d"),
    Column("times as many", "at_once_ratio", ".2f"),
    Column("output tok/s, at most", "most_tok_s", ",.0f"),
    Column("speed-up, at most", "most_speed_up", ".2f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"""{__doc__}
example:
  kvserve tune --model 32B --quantization 4 --device l40s --tensor-parallel-size 2"""
    count = at_least(1)
    model = parser.add_mutually_exclusive_group()
    words = f"directory or hub id (config.json is enough), or one of {', '.join(_SHORT)}"
    model.add_argument("--model", metavar="M", help=words)
    model.add_argument("--shape", choices=LARGE_SHAPES, help="the shape of a known model")
    words = "card, with its memory and its data sheet's bandwidth"
    parser.add_argument("--device", choices=CARDS, help=words)
    for name, default, words in (
        ("--tensor-parallel-size", 1, "cards that share the model"),
        ("--input-len", 500, "tokens of a prompt"),
        ("--output-len", 3000, "tokens of an answer"),
        ("--max-num-seqs", 256, "most requests at once"),
    ):
        words += f" (default: {default})"
        parser.add_argument(name, type=count, default=default, metavar="N", help=words)
    words = "bits of the layers' weights, as they are held (default: 16); embeddings have 16"
    parser.add_argument("--quantization", type=int, choices=_BITS, default=16, help=words)
    words = "share of a card's memory to use (default: 0.9)"
    share = number(0, 1)
    parser.add_argument(
        "--gpu-memory-utilization", type=share, default=0.9, metavar="X", help=words
    )
    words = f"how keys and values are stored (default: {' '.join(_DTYPES)})"
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=KV_CACHE_DTYPES, help=words)
    words = "a row beside none (default: kara, and Kara with ratios of 0.1 and 0.5)"
    parser.add_argument("--policy", type=policy_spec, action="append", metavar="SPEC", help=words)
    group = parser.add_argument_group("a setting from a measurement of your model, without a card")
    words = "what `kvserve bench frontier --save-result FILE` has saved"
    group.add_argument("--frontier", type=Path, metavar="FILE", help=words)
    for name, words in (
        ("kl", "furthest from the full cache, in nats a token: the fastest of them"),
        ("bytes", "most bytes, as a share of the full cache's: the closest to it"),
        ("speed", "least output tokens per second, as a multiple of the full cache's: the same"),
    ):
        group.add_argument(f"--{name}", type=number(0), metavar="X", help=words)
    add_report_arguments(parser)
    parser.set_defaults(fail=parser.error)


def run(args: argparse.Namespace) -> int:
    bounds = args.kl, args.bytes, args.speed
    if args.frontier:
        if bounds == (None, None, None):
            args.fail("--frontier needs --kl, --bytes or --speed")
        try:
            row, facts = chosen(args.frontier, *bounds)
        except ConfigError as error:
            raise ConfigError(f"--frontier: {error}") from None
        sys.stdout.write("\n".join([*facts, "", flags(row)]) + "\n")
        return 0
    if bounds != (None, None, None):
        args.fail("--kl, --bytes and --speed choose from --frontier FILE")
    if not (args.device and (args.model or args.shape)):
        args.fail("--device and --model (or --shape) are needed, or --frontier")
    specs = args.policy or list(_ROWS)
    for spec in specs:
        if spec.kv_cache_dtype:
            args.fail(f"--policy {spec.label}: each type has a row; choose with --kv-cache-dtype")
    check_complete(args, specs)
    return measure_and_publish(Arithmetic(args, [NO_COMPRESSION, *specs]), args)


class Held(NamedTuple):
    """Entries and logged tokens of one request: means while it decodes, and both at its largest."""

    mean: float
    mean_logged: float
    most: int
    most_logged: int


def follow(policy: Policy, num_prompt: int, num_output: int) -> Held:
    """One request from its prompt's end, through the events of the policy's trigger."""
    trigger = policy.event_trigger
    if isinstance(trigger, EngineWide | Pruned):
        raise ConfigError(f"--policy: events of {policy.name} do not follow from a request alone")

    def row() -> RowState:
        prompt, computed, entries, oldest = np.array(
            [[num_prompt], [at], [held], [first]], np.int32
        )
        return RowState(prompt, computed, entries, oldest)

    at = held = num_prompt
    first = int(trigger.start(np.array([num_prompt], np.int32))[0])
    entries = logged = 0.0
    most, most_logged = held, 0
    while at < num_prompt + num_output:
        due = trigger.next_event(row())
        log_from = int(trigger.log_from(row(), due)[0]) if policy.query_reduction else NO_EVENT
        stride = trigger.log_stride
        until = min(int(due[0]), num_prompt + num_output)
        steps, log = until - at, max(0, until - log_from) // stride
        entries += steps * (held + steps / 2)
        logged += steps * (max(0, at - log_from) // stride + log) / 2
        at, held = until, held + steps
        if held + log > most + most_logged:
            most, most_logged = held, log
        if at == due[0]:
            event = trigger.plan(row())
            held -= int(event.evicted[0])
            first = int(event.first_uncompressed_pos[0])
    return Held(entries / num_output, logged / num_output, most, most_logged)


def weights_bytes(spec: ModelSpec, bits: float, directory: Path) -> tuple[float, float]:
    """Bytes of all weights, and of those that a step of many tokens reads. The parameters are
    counted, by the config alone (transformers' modules by that in ``directory``)."""
    model: Any
    with torch.device("meta"):
        if spec.borrowed:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(text_config(directory, {}))
            head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
        else:
            model = decoder_of(spec)(spec, torch.bfloat16, "meta")
            head, embedding = model.head, model.embedding
    both = sum(each.numel() for each in {head, embedding})  # one if the head is the embedding
    layers = (sum(each.numel() for each in model.parameters()) - both) * bits / 8
    return layers + 2.0 * both, layers + 2.0 * head.numel()


def request_bytes(
    part: ModelSpec, policy: Policy, form: EntryFormat, held: Held, *, has_fp8: bool
) -> list[float]:
    """Bytes of a request on a card with ``part`` of the model: mean and largest."""
    asked = policy.query_reduction, policy.logged_dtype
    where = part, form, torch.bfloat16, "cuda", None
    log_form, size = choose_log(asked, *where, has_fp8=has_fp8)
    layout = KVLayout(len(part.layers.full), part.num_kv_heads, part.head_dim, size)
    lanes = part.num_kv_heads * form.mean_bytes(part.head_dim, max(1, layout.num_layers))
    entry, beside = layout.num_layers * lanes, 0.0
    log = block_bytes(layout, form) / log_form.block_tokens(layout, form, 2)
    if part.windowed:
        if part.window_heads is not None:
            lanes = part.window_heads[0] * form.entry_bytes(part.window_heads[1])
        beside += len(part.windowed) * lanes * (part.window or 0)
    if policy.leaves != "off":
        beside += remainder_bytes(layout)
    beside += score_bytes(layout, policy.kept_scores)
    newest = form.newest * part.num_layers * part.num_kv_heads * 4 * part.head_dim
    mean, largest = (newest / 2, *held[:2]), (newest, *held[2:])
    return [
        beside + exact + entries * entry + logged * log
        for exact, entries, logged in (mean, largest)
    ]


class Arithmetic:
    """The rows of one command; the first is ``none`` with the first type of cache."""

    def __init__(self, args: argparse.Namespace, policies: Sequence[PolicySpec]) -> None:
        self._args, self._policies = args, policies
        name = self._name = args.shape or _SHORT.get(args.model.lower(), args.model)
        directory = Path()
        if name in LARGE_SHAPES:
            spec = parse_spec(LARGE_SHAPES[name], name)
        else:
            directory = find_model(args.model, weights=False)
            spec = choose_spec(directory, ModelConfig(), "cuda")
        if spec.policy_refusal is not None:
            args.fail(f"--model: {spec.policy_refusal}")
        if any(make_policy(each.as_dict).rest_bits for each in policies):
            args.fail("--policy: rest_bits is read on CPUs alone so far, and these are cards")
        if args.input_len + args.output_len > spec.max_position:
            args.fail(f"--output-len: the model's longest context has {spec.max_position} tokens")
        self._part = spec.part(args.tensor_parallel_size)
        part, self._forms = self._part, list[EntryFormat]()
        for form in (entry_format(dtype, 2) for dtype in args.kv_cache_dtype or _DTYPES):
            refusal = form.refusal(part.head_dim) or windows_refusal(part, form)
            if refusal and args.kv_cache_dtype:
                args.fail(f"--kv-cache-dtype {form.name}: {refusal}")
            if not refusal:
                self._forms.append(form)
        whole = weights_bytes(spec, _BITS[args.quantization], directory)
        self._weights, self._read = (bytes_ / args.tensor_parallel_size for bytes_ in whole)
        memory, self._bandwidth = CARDS[args.device]
        self._states = sum(state.row_bytes(2) for state in part.states)
        """Bytes of a request, whatever its length."""
        beside, rows = self._weights, args.max_num_seqs
        if self._states:
            from kvserve.engine.runner.state_plan import num_kept

            beside += (rows + num_kept(rows)) * self._states
        self._pool = (args.gpu_memory_utilization * memory - _STEP) * GIB - beside
        self._rows: list[dict[str, Any]] = []

    def measure(self) -> None:
        for form in self._forms if self._pool > 0 else ():
            for spec in self._policies:
                self._rows.append(self._row(spec, form))

    def _row(self, spec: PolicySpec, form: EntryFormat) -> dict[str, Any]:
        args, part, policy = self._args, self._part, make_policy(spec.as_dict)
        held = follow(policy, args.input_len, args.output_len)
        mean, most = request_bytes(
            *(part, policy, form, held), has_fp8=args.device not in _WITHOUT_FP8
        )
        at_once = min(args.max_num_seqs, int(self._pool // most))
        entry = part.num_kv_heads * form.entry_bytes(part.head_dim, len(part.layers.full))
        read = self._read + at_once * (mean + self._states)
        row: dict[str, Any] = {
            **{"policy": spec.label, "policy_args": spec.as_dict, "kv_cache_dtype": form.name},
            **{"pool_entries": self._pool / entry, "mean_entries": held.mean, "at_once": at_once},
            "request_mib": args.tensor_parallel_size * (most + self._states) / 2**20,
            "most_tok_s": at_once * self._bandwidth * 1e12 / read,
        }
        first = self._rows[0] if self._rows else row
        for ratio, key in (("at_once_ratio", "at_once"), ("most_speed_up", "most_tok_s")):
            row[ratio] = row[key] / first[key] if first[key] else None
        return row

    def report(self) -> Report:
        args = self._args
        memory, bandwidth = CARDS[args.device]
        cards = f"{args.tensor_parallel_size} x {args.device}"
        about = [
            "ARITHMETIC, nothing was run; accuracy is not in it.",
            f"{self._name} on {cards} ({memory:g} GiB and {bandwidth:g} TB/s each); prompts of "
            f"{args.input_len:,} tokens, answers of {args.output_len:,}",
            f"weights of {self._weights / GIB:.1f} GiB a card at {args.quantization} bits; pool of "
            f"{max(0.0, self._pool) / GIB:.1f} GiB a card: {args.gpu_memory_utilization:g} of its "
            f"memory, less weights and {_STEP:g} GiB for a step, graphs and CUDA itself",
        ]
        if self._states:
            mib = self._states / 2**20
            about.append(
                f"and less the states of {args.max_num_seqs} requests, {mib:.1f} MiB each whatever "
                "their length (--max-num-seqs), and of half as many that later prompts begin with"
            )
        kept = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)}
        device = {"type": "arithmetic", "name": cards}
        return Report("tune", about, _COLUMNS, self._rows, kept, self._notes(), device=device)

    def _notes(self) -> list[str]:
        gains = [row["most_speed_up"] for row in self._rows if row["most_speed_up"]]
        notes = [] if self._args.quantization == 16 else [_WIDENED]
        if not gains:
            notes.append("nothing of that length fits: more cards, or weights of fewer bits")
        elif max(gains) < 1.03:
            notes.append("compression does not pay here: take --policy none")
        return notes
