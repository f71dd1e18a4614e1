"""Where the time of a step goes with 1, 2, 4 and 8 tensor-parallel ranks: `docs/scaling.md`.

    python bench/scaling.py > docs/scaling.md

Modelled from byte and operation counts of two shapes and assumed rates of a device like an H200; no
GPU is needed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from kvserve.benchmarks.reports.report import Column, Row, markdown_table
from kvserve.benchmarks.simulator.cost_model import DEVICES, LARGE_SHAPES, CostModel
from kvserve.engine.models.spec import ModelSpec, parse_spec

DEVICE = DEVICES["h200"]
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": LARGE_SHAPES["llama-3.1-8b"],
    "Llama 3.1 70B": {
        **LARGE_SHAPES["llama-3.1-8b"],
        **{"hidden_size": 8192, "intermediate_size": 28672},
        **{"num_hidden_layers": 80, "num_attention_heads": 64},
    },
}
RANKS = (1, 2, 4, 8)
BATCH, CONTEXT, CHUNK = 64, 8192, 8192
HELD = 0.41
"""What Kara holds of long outputs with window 256 and ratio 0.3: docs/simulator.md."""


@dataclass(frozen=True)
class Link:
    """What connects the ranks: sustained bytes a second, and seconds that each call takes."""

    name: str
    bandwidth: float
    latency: float


LINKS = (Link("NVLink", 350e9, 12e-6), Link("PCIe", 25e9, 30e-6))
RATES = "; ".join(
    [
        f"{DEVICE.bandwidth / 1e12:g} TB/s, {DEVICE.gemm / 1e12:g} TFLOP/s and "
        f"{DEVICE.step_overhead * 1e3:g} ms of host time a step (`h200` of the cost model)",
        *(f"{x.name} {x.bandwidth / 1e9:g} GB/s and {x.latency * 1e6:g} µs a call" for x in LINKS),
    ]
)

INTRO = f"""\
# Scaling on paper

**A model, not a measurement: byte and operation counts over assumed rates. kvserve has never run on
several GPUs.** `python bench/scaling.py > docs/scaling.md` writes this page.

Each of n ranks reads 1/n of the weights, embedding and head among them, and 1/n of the cache. What
does not shrink: two all-reduces a layer and one for the embedding, of tokens x hidden numbers each,
which take 2 (n - 1) / n x bytes / bandwidth and a fixed time; the logits, gathered by vocabulary;
and what the host spends on a step. Nothing overlaps.

Rates, in bfloat16, all of them guesses until measured: {RATES}.
"""
OUTRO = f"""
`kara` holds {HELD:.0%} of what `none` holds here. Its events are left out: they take 3 to 4 % of
the time in [simulator.md](simulator.md), and ranks share them like attention. Compression shrinks a
part that ranks shrink too, so a step gains less by it the more ranks there are; the share of the
pool that it frees is the same for any number of them. Times where the batch does not fit are there
to compare with.
"""

MEMORY = [
    Column("ranks", "ranks", "d"),
    Column("weights of a rank, GB", "weights_gb", ".1f"),
    Column("thousand tokens of cache", "pool_k", ",.0f"),
    Column("the batch below fits", "fits", left=True),
]
TALKS = [Column(f"calls, {link.name}", link.name, ".2f") for link in LINKS]
DECODE = [
    Column("ranks", "ranks", "d"),
    Column("matrices", "matrices", ".2f"),
    Column("cache, `none`", "none_ms", ".2f"),
    Column("cache, `kara`", "kara_ms", ".2f"),
    Column("host", "host", ".2f"),
    *TALKS,
    Column("tok/s, `none`", "none", ",.0f"),
    Column("of n times one", "efficiency", ".0%"),
    Column("tok/s, `kara`", "kara", ",.0f"),
    Column("vs none", "gain", ".2f"),
]
PREFILL = [
    Column("ranks", "ranks", "d"),
    Column("matrices", "matrices", ".1f"),
    Column("attention", "attention", ".1f"),
    Column("host", "host", ".1f"),
    *(Column(column.title, column.key, ".1f") for column in TALKS),
]


class Rank:
    """One of ``ranks`` ranks: what it holds, and the seconds that it takes."""

    def __init__(self, spec: ModelSpec, ranks: int) -> None:
        self.ranks = ranks
        self._spec = spec
        self._cost = CostModel(spec.part(ranks), DEVICE)
        self._head = self._cost.head_params / ranks
        self._params = self._cost.layer_params + self._head

    @property
    def weights_bytes(self) -> float:
        """Bytes of a rank's weights, with the embedding, of which a step reads only some rows."""
        return (self._params + self._head) * DEVICE.dtype_bytes

    @property
    def pool_tokens(self) -> float:
        """Tokens of cache that fit beside the weights in nine tenths of the memory."""
        return max(0.0, 0.9 * DEVICE.memory - self.weights_bytes) / self._cost.entry_bytes

    def matrices(self, tokens: int, sampled: int) -> float:
        """Seconds to read the weights or for the arithmetic, whichever is longer."""
        operations = 2 * (self._cost.layer_params * tokens + self._head * sampled)
        return max(self._params * DEVICE.dtype_bytes / DEVICE.bandwidth, operations / DEVICE.gemm)

    def cache(self, held: float) -> float:
        """Seconds in which attention reads ``held`` entries in a decode step."""
        return held * self._cost.entry_s

    def attention(self, pairs: float) -> float:
        """Seconds of attention's arithmetic in a prefill, over pairs of query and key."""
        heads = self._spec.num_heads / self.ranks
        return 4 * self._spec.num_layers * heads * self._spec.head_dim * pairs / DEVICE.gemm

    def calls(self, tokens: int, sampled: int, link: Link) -> float:
        """Seconds of all-reduces of hidden states, and of a call each for logits and tokens."""
        if self.ranks == 1:
            return 0.0
        spec, share = self._spec, (self.ranks - 1) / self.ranks
        reduces = 2 * spec.num_layers + 1
        hidden = 2 * share * tokens * spec.hidden_size * DEVICE.dtype_bytes
        logits = share * sampled * spec.vocab_size * DEVICE.dtype_bytes
        return (reduces * hidden + logits) / link.bandwidth + (reduces + 2) * link.latency


def page() -> str:
    """All of docs/scaling.md."""
    parts = [INTRO]
    for name, shape in SHAPES.items():
        ranks = [Rank(parse_spec(shape, name), size) for size in RANKS]
        batch = f"{BATCH} sequences of {CONTEXT:,} tokens in ms, and tok/s over {LINKS[0].name}"
        parts += [
            f"\n## {name}\n\n{markdown_table(MEMORY, [memory(rank) for rank in ranks])}\n",
            f"\nA decode step of {batch}:\n\n{markdown_table(DECODE, decode(ranks))}\n",
            f"\nA prefill chunk of {CHUNK:,} tokens, in ms:\n\n",
            f"{markdown_table(PREFILL, [prefill(rank) for rank in ranks])}\n",
        ]
    return "".join([*parts, OUTRO])


def memory(rank: Rank) -> Row:
    batch = BATCH * CONTEXT
    wanted = {"`none`": batch, "`kara`": HELD * batch}
    fitting = [name for name, held in wanted.items() if held <= rank.pool_tokens]
    return {
        "ranks": rank.ranks,
        "weights_gb": rank.weights_bytes / 1e9,
        "pool_k": rank.pool_tokens / 1e3,
        "fits": ", ".join(fitting) or "no",
    }


def decode(ranks: list[Rank]) -> list[Row]:
    rows: list[Row] = []
    for rank in ranks:
        matrices, cache = rank.matrices(BATCH, BATCH), rank.cache(BATCH * CONTEXT)
        calls = {link.name: rank.calls(BATCH, BATCH, link) for link in LINKS}
        fixed = matrices + DEVICE.step_overhead + calls[LINKS[0].name]
        none, kara = (BATCH / (fixed + share * cache) for share in (1.0, HELD))
        alone = rows[0]["none"] if rows else none
        times = {"matrices": matrices, "none_ms": cache, "kara_ms": HELD * cache, **calls}
        rows.append(
            {
                "ranks": rank.ranks,
                **_ms({**times, "host": DEVICE.step_overhead}),
                **{"none": none, "kara": kara, "gain": kara / none},
                "efficiency": none / alone / rank.ranks,
            }
        )
    return rows


def prefill(rank: Rank) -> Row:
    times = {
        "matrices": rank.matrices(CHUNK, 1),
        "attention": rank.attention(CHUNK**2 / 2),
        "host": DEVICE.step_overhead,
        **{link.name: rank.calls(CHUNK, 1, link) for link in LINKS},
    }
    return {"ranks": rank.ranks, **_ms(times)}


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in seconds.items()}


if __name__ == "__main__":
    sys.stdout.write(page())
