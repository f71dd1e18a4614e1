"""Flags that the benchmark commands share: which model, which policies, how they are written."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvserve.config import ModelConfig
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.spec import ModelSpec, read_spec
from kvserve.engine.policies.base import PolicyError, field_names
from kvserve.engine.policies.registry import make_policy, policy_class

# Flags handed to the engine as they are; one that is not given is the engine's own default.
_ENGINE_SETTINGS = (
    *("dtype", "max_model_len", "block_size", "num_gpu_blocks_override"),
    *("max_num_seqs", "max_num_batched_tokens", "seed"),
)
_LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    **{"max_position_embeddings": 8192, "tie_word_embeddings": True, "vocab_size": 4096},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": None},
}
SHAPES: dict[str, dict[str, Any]] = {
    "4m": {
        **_LLAMA,
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688},
        **{"num_attention_heads": 8, "num_key_value_heads": 4},
    },
    "79m": {
        **_LLAMA,
        **{"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048},
        **{"num_attention_heads": 12, "num_key_value_heads": 4},
    },
}


@dataclass(frozen=True)
class PolicySpec:
    """A policy as the user wrote it: its name, and the fields that were set."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.name}:{settings}" if settings else self.name

    @property
    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **self.fields}

    def with_fields(self, **more: Any) -> PolicySpec:
        """The same policy with further fields; ``PolicyError`` if it refuses them."""
        spec = replace(self, fields={**self.fields, **more})
        make_policy(spec.as_dict)
        return spec

    @property
    def incomplete(self) -> bool:
        """Whether something that the policy needs, its budget say, has yet to be given."""
        needs = policy_class(self.name).needs
        return bool(needs) and not any(name in self.fields for name in needs)

    def has_field(self, name: str) -> bool:
        """Whether the policy knows this field, set or not."""
        return name in field_names(policy_class(self.name))


NO_COMPRESSION = PolicySpec("none")
DEFAULT_POLICIES = (NO_COMPRESSION, PolicySpec("kara", {"window": 128, "buffer": 16}))


def policy_spec(text: str) -> PolicySpec:
    """``kara``, ``kara:window=128,ratio=0.3`` or ``{"name": "kara", "window": 128}``."""
    try:
        spec = _from_json(text) if text.startswith("{") else _from_words(text)
        return spec if spec.incomplete else spec.with_fields()
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _from_json(text: str) -> PolicySpec:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if "name" not in fields:
        raise ValueError(f'{text!r} names no policy, as in {{"name": "kara", "window": 128}}')
    return PolicySpec(fields.pop("name"), fields)


def _from_words(text: str) -> PolicySpec:
    name, _, settings = text.partition(":")
    fields = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not FIELD=VALUE, as in kara:window=128,ratio=0.3")
        fields[key.strip()] = _plain(value.strip())
    return PolicySpec(name.strip(), fields)


def _plain(text: str) -> Any:
    """Numbers, booleans and null as such; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def at_least(minimum: int) -> Callable[[str], int]:
    """A reader of whole numbers from ``minimum`` on."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {minimum}")
        return int(text)

    return read


def fraction(text: str) -> float:
    """A number above 0 and at most 1."""
    value = _plain(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in (0, 1]")
    return float(value)


# ---- flags ------------------------------------------------------------------------------------


def add_engine_arguments(
    parser: argparse.ArgumentParser, policies: Sequence[PolicySpec] = DEFAULT_POLICIES
) -> argparse._MutuallyExclusiveGroup:
    """Model, policies (and which they are if none is given) and pool.

    Returns the group that ``--model`` stands in.
    """
    count = at_least(1)
    unless_given = " and ".join(spec.label for spec in policies)
    model = parser.add_mutually_exclusive_group()
    default = ModelConfig().model
    words = f"directory or hub id (default: {default})"
    model.add_argument("--model", default=default, metavar="M", help=words)
    words = "directory or hub id (default: the model's)"
    parser.add_argument("--tokenizer", metavar="M", help=words)
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights from config.json alone",
    )
    parser.add_argument(
        "--policy",
        type=policy_spec,
        action="append",
        metavar="SPEC",
        help="NAME, NAME:FIELD=VALUE,... or JSON, once per policy; --policy.FIELD VALUE sets a "
        "field of the only one that has any"
        + (f" (default: {unless_given})" if unless_given else ""),
    )
    parser.add_argument("--policy-args", type=json.loads, metavar="JSON", help=argparse.SUPPRESS)
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="auto is float32 on a CPU")
    parser.add_argument("--max-model-len", type=count, metavar="N", help="longest sequence")
    parser.add_argument("--block-size", type=count, metavar="N", help="tokens per KV block")
    parser.add_argument("--max-num-batched-tokens", type=count, metavar="N", help="per step")
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="of prompts and dummy weights"
    )
    parser.add_argument("--threads", type=count, metavar="N", help="torch threads")
    parser.set_defaults(fail=parser.error, default_policies=policies)
    return model


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results go besides the terminal."""
    parser.add_argument("--save-result", type=_json_path, metavar="FILE.json", help="write JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bars")


def _json_path(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a .json file")
    return path


def chosen_policies(args: argparse.Namespace, *, complete: bool = True) -> list[PolicySpec]:
    """The policies asked for; ``--policy.FIELD`` sets fields of the only one that has any.

    ``complete``: nothing that a policy needs will be added later.
    """
    specs = list(args.policy or args.default_policies)
    if args.policy_args:
        targets = [i for i, spec in enumerate(specs) if spec.name != NO_COMPRESSION.name]
        if len(targets) != 1:
            args.fail(
                "--policy.FIELD: which policy? Write --policy NAME:FIELD=VALUE where there "
                "are several"
            )
        try:
            specs[targets[0]] = specs[targets[0]].with_fields(**args.policy_args)
        except PolicyError as error:
            args.fail(f"--policy.{error.argument}: {error}")
    if complete:
        check_complete(args, specs)
    return specs


def check_complete(args: argparse.Namespace, specs: Sequence[PolicySpec]) -> None:
    """Refuse policies that lack what they need."""
    try:
        for spec in specs:
            make_policy(spec.as_dict)
    except PolicyError as error:
        args.fail(f"--policy: {error}")


# ---- the model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """Where the weights and the tokenizer come from, and what config.json says of the model."""

    name: str
    path: Path
    tokenizer_path: str
    load_format: str
    spec: ModelSpec

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """Keyword arguments of ``LLM``, ``policy`` aside."""
        given = {name: getattr(args, name) for name in _ENGINE_SETTINGS}
        return {
            "model": str(self.path),
            "tokenizer": self.tokenizer_path,
            "load_format": self.load_format,
            **{name: value for name, value in given.items() if value is not None},
        }


@contextmanager
def opened_checkpoint(
    args: argparse.Namespace, shape: str | None = None, write_weights: bool = False
) -> Iterator[Checkpoint]:
    """The model of ``--model`` or a built-in shape, which lives in a temporary directory.

    ``write_weights`` puts random weights on disk where there are none, for others to read too.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine takes them as given
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        load_format = args.load_format
        if shape is None:
            name, path = args.model, find_model(args.model)
        else:
            name, path, load_format = f"shape {shape}", Path(scratch), "dummy"
            (path / "config.json").write_text(json.dumps(SHAPES[shape]))
        spec, tokenizer = read_spec(path), args.tokenizer or str(path)
        if load_format == "dummy" and write_weights:
            path, load_format = _write_random_weights(path, Path(scratch), args.seed), "auto"
        yield Checkpoint(name, path, tokenizer, load_format, spec)


def _write_random_weights(config: Path, target: Path, seed: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    model.save_pretrained(target)
    return target
