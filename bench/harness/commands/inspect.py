"""``kvserve inspect``: which positions a policy keeps of a prompt and its continuation."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from bench.harness.reports.plots import plot_layers
from bench.harness.reports.report import Column, Row, markdown_table
from bench.harness.setup.checkpoint import opened_checkpoint
from bench.harness.setup.options import (
    add_engine_arguments,
    add_pool_argument,
    check_matplotlib,
    chosen_policies,
    file_name,
)
from bench.harness.setup.policy_spec import PolicySpec
from kvserve.engine.frontend.inspect import Inspection, inspect
from kvserve.engine.frontend.llm import LLM

_MOST_EVENTS = 20
_LAYERS = (
    Column("layer", "layer", "d"),
    Column("held per head", "held", "g"),
    Column("of all tokens", "share", ".1%"),
    Column("held by some head", "by_some", "d"),
    Column("by every head", "by_all", "d"),
)
_EVENTS = (
    Column("event", "event", "d"),
    Column("tokens seen", "seen", "d"),
    Column("held before", "before", "d"),
    Column("held after", "after", "d"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, policies=())
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text, for the model's tokenizer")
    ids = "token ids, a .npy array or a .json list"
    prompt.add_argument("--prompt-ids", type=_token_ids, metavar="FILE", help=ids)
    parser.add_argument(
        "--continuation-ids",
        type=_token_ids,
        metavar="FILE",
        help="token ids fed one by one after the prompt, as if the model had generated them",
    )
    for kind, name, words in (
        (".npz", "--dump", "write kept positions"),
        (".png", "--plot", "draw positions by layers"),
    ):
        names = file_name(kind, folder_exists=True)
        parser.add_argument(name, type=names, metavar=f"FILE{kind}", help=words)
    add_pool_argument(parser)
    parser.set_defaults(max_num_seqs=1)


def run(args: argparse.Namespace) -> int:
    if args.policy is None or len(args.policy) != 1:
        args.fail("--policy: name the one to inspect")
    check_matplotlib(args, "plot")
    (spec,) = chosen_policies(args)
    with opened_checkpoint(args) as checkpoint:
        settings = checkpoint.settings(args)
        by_ids = args.prompt_ids is not None
        llm = LLM(policy=spec.as_dict, skip_tokenizer_init=by_ids, **settings)
    prompt = args.prompt_ids if llm.tokenizer is None else llm.tokenizer.encode(args.prompt)
    found = inspect(llm, prompt, args.continuation_ids or [])
    lines = _describe(found, spec, checkpoint.name, len(prompt))
    if args.dump:
        np.savez_compressed(args.dump, **found.arrays())  # type: ignore[arg-type]
        lines.append(f"kept positions saved to {args.dump}")
    if args.plot:
        shares, said = found.holders() / found.held.shape[1], "share of KV heads that keep it"
        plot_layers(shares, spec.label, "position", said, args.plot)
        lines.append(f"plot saved to {args.plot}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _describe(found: Inspection, spec: PolicySpec, model: str, prompt: int) -> list[str]:
    total, heads = len(found.input_ids), found.held.shape[1]
    layers: list[Row] = [
        {
            "layer": layer,
            "held": (held := float(by_heads.sum()) / heads),
            "share": held / total,
            "by_some": int((by_heads > 0).sum()),
            "by_all": int((by_heads == heads).sum()),
        }
        for layer, by_heads in enumerate(found.holders())
    ]
    lines = [
        f"{spec.label} on {model}: {total} tokens, {prompt} of the prompt and "
        f"{total - prompt} of the continuation",
        "",
        markdown_table(_LAYERS, layers),
        "",
    ]
    if found.details.coded_entries:
        lines += [_codes(found), ""]
    if found.details.window_bytes:
        held = found.details.held_bytes
        lines += [
            f"bytes held: {held:,}, of which {found.details.window_bytes:,} are of the layers "
            "with sliding windows, which are not above",
            "",
        ]
    if found.details.remainder_entries:
        weights = np.exp(found.remainder)
        lines += [
            f"remainders: an entry in each of {found.remainder.size} heads stands for what it "
            f"dropped, with a weight of {weights.min():.1f} to {weights.max():.1f} entries",
            "",
        ]
    if not found.events:
        return [*lines, f"{spec.label}: no event; its budget was never reached"]
    shown = found.events[:_MOST_EVENTS]
    rows = [
        {"event": i, "seen": e.seen, "before": e.before, "after": e.held.shape[2]}
        for i, e in enumerate(shown)
    ]
    lines += [markdown_table(_EVENTS, rows), ""]
    if len(shown) < len(found.events):
        lines.append(f"{len(found.events) - len(shown)} later events are not shown")
    return lines


def _codes(found: Inspection) -> str:
    """A line on coded entries: the method's r1 (share of entries held) and r2 (codebook vectors per
    coded vector), and bytes."""
    details, (layers, heads, _) = found.details, found.held.shape
    kept = details.held_entries / (details.logical_tokens * layers * heads)
    book = details.codebook_entries / (2 * details.coded_entries)
    return (
        f"codes: {details.coded_entries} of {details.held_entries} entries, with "
        f"{details.codebook_entries} vectors (r1 {kept:.3f}, r2 {book:.3f}); "
        f"{details.held_bytes} bytes of blocks at the end"
    )


# ---- files ------------------------------------------------------------------------------------


def _token_ids(text: str) -> list[int]:
    path = Path(text)
    try:
        if path.suffix == ".npy":
            ids = np.asarray(np.load(path, allow_pickle=False))
        elif path.suffix == ".json":
            ids = np.asarray(json.loads(path.read_text()))
        else:
            raise argparse.ArgumentTypeError(f"{path} is neither a .npy nor a .json file")
    except (OSError, EOFError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "its content does not match its extension"
        raise argparse.ArgumentTypeError(f"cannot read {text}: {reason}") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise argparse.ArgumentTypeError(f"{text} is not one list of token ids")
    return [int(i) for i in ids]
