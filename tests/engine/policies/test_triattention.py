"""TriAttention against its specification: positions known, rotations undone, angles in float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import atan2, cos, hypot
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.compression.query_statistics import FILE, QueryStatistics, load_statistics
from kvserve.engine.policies.triattention import TriAttention
from kvserve.kernels.score.centre_scores import OFFSETS, Centres, centre_scores_torch
from kvserve.log import ConfigError, RequestError
from kvserve.sampling_params import SamplingParams
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.dense_reference import dense_pass, load_dense
from tests.engine.models.decoding import make
from tests.engine.policies.test_conformance import IDS, PROMPT, generate
from tests.engine.recorder import Recorder

CLOSE = 1e-4
"""Scores that float32 may order differently."""


@dataclass(frozen=True)
class Reference:
    """The released scorer's way, one layer at a time; all in float64."""

    statistics: QueryStatistics
    frequencies: Tensor
    factor: float

    def scores(self, keys: Tensor, positions: Tensor, now: int, aggregation: str) -> Tensor:
        """Rotated keys [L, Hkv, n, D] of tokens at ``positions [L, Hkv, n]`` -> [L, Hq, n]."""
        layers, kv_heads, _, _ = keys.shape
        pairs = torch.complex(*keys.double().unflatten(-1, (2, -1)).unbind(-2)) / self.factor
        angles = positions[..., None].double() * self.frequencies[:, None, None]
        before = pairs * torch.polar(torch.ones_like(angles), -angles)  # [L, Hkv, n, D/2]
        mean = torch.complex(*self.statistics.mean.double().unflatten(-1, (2, -1)).unbind(-2))
        spread = self.statistics.magnitude.double() - mean.abs()
        heads = mean.shape[1]
        out = []
        for head in range(heads):
            own = before[:, head * kv_heads // heads]  # [L, n, D/2]
            where = positions[:, head * kv_heads // heads]
            centre = mean[:, head, None]
            strength = self.factor**2 * centre.abs() * own.abs()
            phase = centre.angle() - own.angle()
            futures = []
            for offset in OFFSETS:
                turns = (now + offset - where)[..., None].double() * self.frequencies[
                    :, None
                ] + phase
                futures.append((strength * turns.cos()).sum(-1))
            both = torch.stack(futures)
            best = both.mean(0) if aggregation == "mean" else both.amax(0)
            out.append(best + (self.factor**2 * spread[:, head, None] * own.abs()).sum(-1))
        assert len(out) == heads and out[0].shape[0] == layers
        return torch.stack(out, dim=1)

    def lanes(self, scores: Tensor, policy: TriAttention, keep: int, kv_heads: int) -> Tensor:
        """What decides in each lane, [L, Hkv, n]: best first."""
        if policy.normalise:
            mean = scores.mean(-1, keepdim=True)
            scores = (scores - mean) / (scores - mean).square().mean(-1, keepdim=True).sqrt()
        grouped = scores.unflatten(1, (kv_heads, -1)).amax(2)
        if policy.mode == "per_head":
            return grouped.mean(0, keepdim=True).expand_as(grouped)
        if policy.mode == "union":
            chosen = torch.zeros(scores.shape[-1], dtype=torch.bool)
            for lane in scores.flatten(0, 1):
                chosen[lane.topk(keep).indices] = True
            best = scores.amax(dim=(0, 1)).masked_fill(~chosen, -torch.inf)
            return best.expand_as(grouped)
        return grouped


SETTINGS: list[dict[str, Any]] = [
    {"budget": 44, "period": 6, "recent": 3},
    {"budget": 44, "period": 6, "recent": 3, "aggregation": "max", "normalise": False},
    {"ratio": 0.4, "period": 5, "recent": 2, "mode": "per_head", "aggregation": "max"},
    {"ratio": "1/3", "period": 7, "recent": 0, "mode": "per_head"},
    {"ratio": 0.4, "period": 5, "recent": 2, "mode": "union"},
    {"budget": 46, "period": 4, "mode": "union", "aggregation": "max", "normalise": False},
    {"budget": 20, "period": 9, "recent": 4, "protect_prompt": False},
]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 128
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"num_key_value_heads": 8}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 2, "rope_parameters": YARN}),
        ("llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    ],
    ids=["group-1", "group-2-norms", "group-4-yarn", "group-8-llama3"],
)
def test_kept_sets_are_those_of_the_specification(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    directory = write_checkpoint(kind, tmp_path, **changes)
    recorder = Recorder(make(directory))
    runs = generate(recorder, [(IDS, {"name": "triattention", **each}) for each in SETTINGS])
    model = load_dense(directory)
    rotary: Any = model.model.rotary_emb
    frequencies = rotary.inv_freq.double().expand(len(model.model.layers), -1)
    statistics = load_statistics(directory / FILE)
    reference = Reference(statistics, frequencies, rotary.attention_scaling)
    for each, run in zip(SETTINGS, runs, strict=True):
        policy = TriAttention(**each)
        keys = dense_pass(model, IDS + run.tokens[:-1], run.events).keys
        _compare(policy, reference, keys, run.events)
        assert len(run.events) > 4


def _compare(policy: TriAttention, reference: Reference, keys: Tensor, events: Any) -> None:
    layers, kv_heads, _, dim = keys.shape
    held, seen = np.zeros((layers, kv_heads, 0), np.int64), 0
    start = PROMPT if policy.protect_prompt else 0
    for event in events:
        new = np.broadcast_to(np.arange(seen, event.seen), (layers, kv_heads, event.seen - seen))
        held = np.concatenate([held, new], axis=2)
        at = torch.from_numpy(held[..., start : held.shape[2] - policy.newest])
        keep = event.held.shape[2] - start - policy.newest
        own = keys.gather(2, at[..., None].expand(-1, -1, -1, dim))
        scores = reference.scores(own, at, event.seen, policy.aggregation)
        decides = reference.lanes(scores, policy, keep, kv_heads)
        order = decides.argsort(dim=-1, descending=True, stable=True)
        best = at.gather(-1, order[..., :keep].sort(dim=-1).values)
        kept = torch.from_numpy(event.held[..., start : start + keep]).long()
        ranked = decides.gather(-1, order)
        for lane in (kept != best).any(-1).nonzero().tolist():
            gap = ranked[tuple(lane)][keep - 1] - ranked[tuple(lane)][keep]
            assert gap < CLOSE, (policy, event.seen, lane)
        held, seen = event.held.astype(np.int64), event.seen


def test_one_entry_by_hand() -> None:
    """A centre of length 5 at angle atan2(4, 3), a key of length 2 at 0: numbers one at a time."""
    frequencies = torch.tensor([[0.01]], dtype=torch.float64)
    mean, magnitude = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[6.0]]])
    centres = Centres.of(mean.double(), magnitude.double(), frequencies, 1.0)
    position, now = 10, 50
    angle = 0.01 * position
    key = torch.tensor([2 * cos(angle), 2 * cos(angle - np.pi / 2)], dtype=torch.float64)
    key = key.view(1, 1, 1, 1, 2)
    vectors = centres.seen_from(torch.tensor([now]), "mean")
    found = centre_scores_torch(key, vectors, centres.spread, normalise=False)
    turns = (cos(0.01 * (now - position + offset) + atan2(4, 3)) for offset in OFFSETS)
    expected = sum(hypot(3, 4) * 2 * turn for turn in turns) / len(OFFSETS) + (6 - 5) * 2
    assert found.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_the_two_forms_agree_in_float64(aggregation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    frequencies = 1.0 / 1e4 ** (torch.arange(8, dtype=torch.float64) / 8)
    frequencies = torch.stack([frequencies, torch.zeros(8)])  # the second layer has no RoPE
    mean = torch.randn(2, 4, 16, generator=generator)
    magnitude = mean.unflatten(-1, (2, -1)).norm(dim=-2) + torch.rand(2, 4, 8, generator=generator)
    statistics = QueryStatistics(mean, magnitude, 1, "")
    centres = Centres.of(mean.double(), magnitude.double(), frequencies, 1.3)
    before = torch.complex(*torch.randn(2, 2, 2, 50, 8, generator=generator).double())
    positions = torch.arange(100, 150).expand(2, 2, -1)
    turned = before * torch.polar(
        torch.full((2, 2, 50, 8), 1.3, dtype=torch.float64),
        positions[..., None] * frequencies[:, None, None],
    )
    keys = torch.cat([turned.real, turned.imag], dim=-1)
    vectors = centres.seen_from(torch.tensor([90_000]), aggregation)
    found = centre_scores_torch(keys[None], vectors, centres.spread, normalise=False)[0]
    reference = Reference(statistics, frequencies, 1.3)
    expected = reference.scores(keys, positions, 90_000, aggregation)
    expected = expected.unflatten(1, (2, -1)).amax(2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_statistics_are_the_servers_and_of_its_model(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path / "a")
    other = write_checkpoint("llama", tmp_path / "b", num_hidden_layers=2)
    policy = {"name": "triattention", "stats": str(directory / FILE)}
    with pytest.raises(ConfigError, match=r"triattention.stats has statistics of another"):
        make(other, policy=policy)
    with pytest.raises(RequestError, match="stats are the server's") as error:
        make(directory).generate(random_prompts([4], 0), SamplingParams(kv_policy=policy))
    assert error.value.param == "kv_policy.stats"
    (other / FILE).unlink()
    with pytest.raises(ConfigError, match=r"--policy.stats: there is no .*kvserve calibrate"):
        make(other, policy="triattention")
    with pytest.raises(RequestError, match="wants statistics"):
        make(other).generate(random_prompts([4], 0), SamplingParams(kv_policy="triattention"))
