"""What each model is trained on: sizes, mixtures of tasks by length, the curriculum.

Two ship. The others are for judging defaults: no default was chosen by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

Mix = Mapping[str, float]


@dataclass(frozen=True)
class Size:
    layers: int = 4
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 2


@dataclass(frozen=True)
class Recipe:
    """`mixes`: shares of tasks by row length; `stages`: row lengths in order; `longer`: further
    lengths in the last stage and their shares of batches; `latest`: shares of the budget at which a
    stage ends even if not every task is learnt; `reach`: the last position that gaps lead to."""

    mixes: Mapping[int, Mix]
    stages: tuple[int, ...]
    longer: Mapping[int, float]
    latest: tuple[float, ...]
    vocab_size: int
    max_positions: int
    reach: int
    rope_theta: float
    long: bool
    size: Size = Size()
    seed: int = 0


TINY = Recipe(
    mixes={
        96: {"recall": 0.5, "copy": 0.5},
        128: {
            "needle": 0.35,
            "recall": 0.2,
            "chain": 0.2,
            "redundant-chain": 0.2,
            "copy": 0.03,
            "talk": 0.02,
        },
        256: {
            "needle": 0.4,
            "recall": 0.15,
            "chain": 0.17,
            "redundant-chain": 0.25,
            "talk": 0.03,
        },
        640: {"needle": 0.45, "chain": 0.12, "redundant-chain": 0.43},
        1152: {"needle": 0.8, "chain": 0.1, "redundant-chain": 0.1},
    },
    stages=(96, 128, 256, 640),
    longer={1152: 0.1},
    latest=(0.06, 0.22, 0.42),
    vocab_size=448,
    max_positions=4096,
    reach=2400,
    rope_theta=1e4,
    long=False,
)
TINY_LONG = Recipe(
    mixes={
        96: {"recall": 0.35, "copy": 0.3, "chain": 0.35},
        128: {"recall": 0.15, "chain": 0.35, "redundant-chain": 0.3, "long-chain": 0.2},
        256: {"recall": 0.05, "chain": 0.2, "redundant-chain": 0.4, "long-chain": 0.35},
        640: {"chain": 0.1, "redundant-chain": 0.4, "long-chain": 0.5},
        1152: {"chain": 0.2, "long-chain": 0.8},
        2304: {"long-chain": 1.0},
        4736: {"long-chain": 1.0},
    },
    stages=(96, 128, 256, 640),
    longer={1152: 0.15, 2304: 0.15, 4736: 0.1},
    latest=(0.05, 0.15, 0.3),
    vocab_size=544,
    max_positions=8192,
    reach=5600,
    rope_theta=1e7,
    long=True,
)


def _held_out(task: str, size: Size, seed: int) -> Recipe:
    """A model on which defaults are judged: `task` and short chains, up to 1,152 tokens."""
    return replace(
        TINY_LONG,
        mixes={
            96: {"recall": 0.35, "copy": 0.3, "chain": 0.35},
            128: {"recall": 0.2, "chain": 0.5, task: 0.3},
            256: {"recall": 0.1, "chain": 0.4, task: 0.5},
            640: {"chain": 0.3, task: 0.7},
            1152: {"chain": 0.2, task: 0.8},
        },
        longer={1152: 0.25},
        size=size,
        seed=seed,
    )


RECIPES = {
    "tiny": TINY,
    "tiny-long": TINY_LONG,
    "two-wide": _held_out("long-chain", Size(layers=2, hidden=192, kv_heads=8), seed=101),
    "six-narrow": _held_out("long-chain", Size(layers=6, kv_heads=1), seed=102),
    "terse": _held_out("terse-chain", Size(kv_heads=4), seed=103),
}
