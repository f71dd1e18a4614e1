"""Where a model's queries usually point, as a file: written by ``kvserve calibrate``.

Ours is safetensors and names its model. The form that TriAttention's authors release (``.pt``) is
read and written too; it names no model, so only its shapes are compared.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvserve.engine.models.hub import QUERY_STATISTICS
from kvserve.engine.models.rotary import attention_factor, inverse_frequencies
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy
from kvserve.kernels.score.centre_scores import Centres
from kvserve.late import Made
from kvserve.log import ConfigError

FILE = QUERY_STATISTICS
_FORMAT = "kvserve query statistics 1"


@dataclass(frozen=True)
class QueryStatistics:
    """Of the queries of all layers and heads before RoPE, over ``tokens`` tokens.

    ``mean`` float32 [L, Hq, D]; ``magnitude`` float32 [L, Hq, D/2], of the pairs (f, f + D/2).
    ``identity`` says which model they are of; empty if nobody knows.
    """

    mean: Tensor
    magnitude: Tensor
    tokens: int
    identity: str

    @property
    def concentration(self) -> Tensor:
        """Float32 [L, Hq]: 1 if all queries of a head point the same way, 0 if nowhere."""
        length = self.mean.unflatten(-1, (2, -1)).norm(dim=-2).sum(dim=-1)
        return length / self.magnitude.sum(dim=-1).clamp(min=1e-12)

    def save(self, path: Path) -> None:
        """As ``.pt`` if the name ends so, else as safetensors."""
        if path.suffix == ".pt":
            torch.save(self._released(), path)
            return
        facts = {"format": _FORMAT, "model": self.identity, "tokens": str(self.tokens)}
        path.write_bytes(save({"mean": self.mean, "magnitude": self.magnitude}, facts))

    def _released(self) -> dict[str, Any]:
        layers, heads, dim = self.mean.shape
        both = [(layer, head) for layer in range(layers) for head in range(heads)]
        real, imaginary = self.mean.chunk(2, dim=-1)
        parts = ("q_mean_real", real), ("q_mean_imag", imaginary), ("q_abs_mean", self.magnitude)
        return {
            "metadata": {
                "sampled_heads": [list(at) for at in both],
                "head_dim": dim,
                "rope_style": "half",
                "num_tokens": self.tokens,
            },
            "stats": {_key(*at): {name: part[at].clone() for name, part in parts} for at in both},
        }

    def check(self, spec: ModelSpec, path: Path) -> None:
        """``ConfigError`` if they are of another model."""
        shape = spec.num_layers, spec.num_heads, spec.head_dim
        other = self.identity not in ("", identity_of(spec))
        if other or tuple(self.mean.shape) != shape:
            layers, heads, dim = self.mean.shape
            raise ConfigError(
                f"{path} has statistics of another model ({layers} layers of {heads} heads of "
                f"{dim}, {self.identity or 'of no name'}; this one is {identity_of(spec)}); make "
                "this one's with kvserve calibrate"
            )

    def centres(self, model: Transformer) -> Centres:
        """Of the heads that this rank has of each layer that sees all tokens."""
        spec, group = model.spec, model.group
        layers = list(spec.layers.full)
        frequencies = inverse_frequencies(spec.rope, spec.head_dim).repeat(len(layers), 1)
        frequencies[[layer in spec.without_rope for layer in layers]] = 0.0
        mean, magnitude = (group.own(x[layers], dim=1) for x in (self.mean, self.magnitude))
        found = Centres.of(mean, magnitude, frequencies, attention_factor(spec.rope))
        return found.to(model.embedding.device)


def identity_of(spec: ModelSpec) -> str:
    """A hash of what config.json says of a model's layers."""
    sizes = spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
    rope = spec.rope.kind, spec.rope.theta, spec.rope.original, sorted(spec.rope.parameters.items())
    facts = spec.architecture, sizes, spec.vocab_size, rope
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def refusal(spec: ModelSpec) -> str | None:
    """Why nobody can say where the queries of a model point, if so."""
    if spec.borrowed:
        return "queries before RoPE are known of native models alone, and this is transformers' own"
    if spec.states:
        return "it has layers with states, over which nobody has looked at queries before RoPE"
    if spec.rope.kind == "dynamic":
        return "dynamic RoPE rotates by other frequencies as a sequence grows"
    return None


def statistics_in(path: Path, spec: ModelSpec) -> QueryStatistics:
    """Those in a file; ``ConfigError`` if policies cannot score by them on this model."""
    if (reason := refusal(spec)) is not None:
        raise ConfigError(reason)
    found = load_statistics(path)
    found.check(spec, path)
    return found


def statistics_for(
    policy: Policy, spec: ModelSpec, directory: Path, beside: Path
) -> Made[QueryStatistics]:
    """Those that the ``stats`` of a policy name, or those ``beside`` the model in ``directory``."""
    if (reason := refusal(spec)) is not None:
        raise ConfigError(f"--policy {policy.name}: {reason}")
    path = beside if policy.demands.stats is None else Path(policy.demands.stats)
    if not path.is_file():
        raise ConfigError(
            f"--policy.stats: there is no {path}; {policy.name} scores by where the model's "
            f"queries point, which this measures: kvserve calibrate --model {directory} "
            "--output FILE"
        )
    found = Made(partial(statistics_in, path, spec))
    try:
        found()
    except ConfigError as error:
        raise ConfigError(f"--policy.stats: {error}") from None
    return found


def load_statistics(path: Path) -> QueryStatistics:
    """Read either form; ``ConfigError`` names the file."""
    try:
        return _load_released(path) if path.suffix == ".pt" else _load(path)
    except UnpicklingError:
        raise ConfigError(f"{path} is not a file of kvserve calibrate: it has code") from None
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{path} is not a file of kvserve calibrate: {reason}") from None


def _load(path: Path) -> QueryStatistics:
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
        if facts.get("format") != _FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}, not {_FORMAT!r}")
        mean, magnitude = (file.get_tensor(name).float() for name in ("mean", "magnitude"))
    return _checked(QueryStatistics(mean, magnitude, int(facts["tokens"]), facts["model"]))


def _load_released(path: Path) -> QueryStatistics:
    held = torch.load(path, map_location="cpu", weights_only=True)
    facts, stats = held["metadata"], held["stats"]
    style = facts.get("rope_style", "half")
    if style != "half":
        raise ValueError(f"rope_style {style!r}: pairs are of dimensions f and f + D/2 here (half)")
    heads = [tuple(at) for at in facts["sampled_heads"]]
    layers, each = (1 + max(at[i] for at in heads) for i in range(2))
    if len(set(heads)) != layers * each:
        raise ValueError(f"it has {len(set(heads))} of {layers} x {each} heads; all are needed")

    def joined(*names: str) -> Tensor:
        rows = (torch.cat([stats[_key(*at)][name] for name in names]) for at in sorted(heads))
        return torch.stack([row.float() for row in rows]).unflatten(0, (layers, each))

    mean, magnitude = joined("q_mean_real", "q_mean_imag"), joined("q_abs_mean")
    return _checked(QueryStatistics(mean, magnitude, int(facts.get("num_tokens", 0)), ""))


def _checked(found: QueryStatistics) -> QueryStatistics:
    *lead, dim = found.mean.shape
    if len(lead) != 2 or found.magnitude.shape != (*lead, dim // 2):
        shapes = f"{list(found.mean.shape)} and {list(found.magnitude.shape)}"
        raise ValueError(f"means and magnitudes of {shapes} do not fit each other")
    if not (found.mean.isfinite().all() and found.magnitude.isfinite().all()):
        raise ValueError("it has numbers that are not finite")
    return found


def _key(layer: int, head: int) -> str:
    return f"layer{layer:02d}_head{head:02d}"
