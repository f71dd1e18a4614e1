"""What `python -m bench.suite run` measures on long traces, and the README shows."""

from __future__ import annotations

from bench.report.measurement import Measurement, flags
from kvserve.benchmarks.setup.options import KV_CACHE_DTYPES

# Traces of the length that compression is for, on random weights: the cost does not depend on what
# is generated.
SNAPKV_LONG = "snapkv:trigger=threshold,budget=1025,threshold=1280"
RKV_LONG = "rkv:budget=1025,threshold=1152,protect_prompt=true"
WINDOW_LONG = "streaming_llm:budget=1152,period=32"
LONG_POLICIES = ("none", "kara", "kara:ratio=0.2", SNAPKV_LONG, RKV_LONG, WINDOW_LONG)


def long_answers(mean: int, count: int, shape: str = "4m", sigma: float = 0.7) -> str:
    """Flags of log-normal answers, cut so that no answer takes the whole pool."""
    cap = 8192 if mean <= 4000 else 16_384
    return (
        f"--shape {shape} --dtype bfloat16 --threads 1 --dataset random --input-len 128 "
        f"--output-len {mean} --random-output-sigma {sigma} --random-output-cap {cap} "
        f"--num-prompts {count} --pool-share 0.25"
    )


GRADED = "--model kvserve/tiny-long --dataset long-chain-2000 --threads 1 --pool-share 0.25"
SNAPKV_GRADED = "snapkv:trigger=threshold,budget=448,threshold=512"
RKV_GRADED = "rkv:budget=448,threshold=512,protect_prompt=true"
WINDOW_GRADED = "streaming_llm:budget=768,period=32"
# As many bytes per sequence as Kara's default holds on average, its logged queries included.
EQUAL_BYTES_GRADED = (
    "kara",
    "snapkv:trigger=threshold,budget=645,threshold=709",
    "rkv:budget=664,threshold=728,protect_prompt=true",
    "streaming_llm:budget=1312,period=32",
)

EARLIER = " (Kara of 2026-11-22)"
# Kara as it was until 2026-11-22.
KARA_BEFORE = "kara:ratio=0.3,remainder=off"
TURNS = ("none", KARA_BEFORE, "kara")

REMAINDERS = (
    Measurement(
        "remainders-graded",
        "Long traces, graded: a pool of a quarter",
        "64 chains of 44 lines, whose traces have 2,000 tokens of sums, checks, recaps and talk, "
        "on the model that is trained for them, in turns. Between `none` and Kara stands Kara as "
        "it was before it left remainders.",
        f"bench throughput {GRADED} --num-prompts 64 --repeat 3 {flags(TURNS)}",
        minutes=14,
    ),
    Measurement(
        "remainders-3000",
        "Answers of 3,000 tokens",
        "Log-normal lengths, as reasoning models answer. Everybody's pool has as many bytes; what "
        "a sequence takes of it is the mean over the run, logged queries and remainders included.",
        f"bench throughput {long_answers(3000, 24)} --repeat 3 {flags(TURNS)}",
        minutes=14,
    ),
    Measurement(
        "remainders-uniform",
        "Answers of exactly 3,000 tokens",
        "Without the few very long answers of the log-normal ones, which run alone at the end.",
        "bench throughput --shape 4m --dtype bfloat16 --threads 1 --dataset random --input-len 128 "
        f"--output-len 3000 --num-prompts 48 --pool-share 0.25 --repeat 3 {flags(TURNS)}",
        minutes=12,
    ),
    Measurement(
        "remainders-k8v4",
        "Answers of 3,000 tokens, with entries in fewer bits",
        "The log-normal answers again: every pool has as many bytes, whatever an entry is held in.",
        f"bench throughput {long_answers(3000, 24)} --repeat 3 --compare-kv-cache-dtypes auto k8v4 "
        f"{flags(('none', 'kara'))}",
        minutes=10,
    ),
    Measurement(
        "remainders-12000",
        "Answers of 12,000 tokens",
        "",
        f"bench throughput {long_answers(12_000, 12, sigma=0.35)} --repeat 1 {flags(TURNS)}",
        minutes=14,
    ),
)

# Measured with Kara's default until 2026-11-22: a ratio of 0.3, and nothing left behind.
LONG = (
    Measurement(
        "long-graded",
        f"Long traces, graded: a pool of a quarter{EARLIER}",
        "200 chains of 44 lines, whose traces have 2,000 tokens of sums, checks, recaps and talk, "
        "on the model that is trained for them. Budgets are such that the others hold about as "
        "many entries as Kara's default; its logged queries come on top.",
        f"bench throughput {GRADED} --num-prompts 200 --repeat 1 "
        + flags(("none", "kara", "kara:ratio=0.2", SNAPKV_GRADED, RKV_GRADED, WINDOW_GRADED)),
        minutes=12,
        plots=True,
        in_pieces=True,
    ),
    Measurement(
        "long-graded-turns",
        f"The same, `none` and Kara in turns{EARLIER}",
        "",
        f"bench throughput {GRADED} --num-prompts 100 --repeat 2 {flags(('none', 'kara'))}",
        minutes=10,
        in_pieces=True,
    ),
    Measurement(
        "long-3000",
        f"Answers of 3,000 tokens{EARLIER}",
        "Log-normal lengths, as reasoning models answer. Everybody's pool has as many bytes; what "
        "a sequence takes of it is the mean over the run, logged queries included.",
        f"bench throughput {long_answers(3000, 48)} --repeat 1 {flags(LONG_POLICIES[:3])}",
        minutes=14,
        plots=True,
        in_pieces=True,
    ),
    Measurement(
        "long-uniform",
        f"Answers of 1,500 to 4,500 tokens{EARLIER}",
        "Without the few very long answers of the log-normal ones, which run alone at the end.",
        "bench throughput --shape 4m --dtype bfloat16 --threads 1 --dataset random "
        "--input-len 128 --output-len 3000 --random-range-ratio 0.5 --num-prompts 48 "
        f"--pool-share 0.25 --repeat 1 {flags(LONG_POLICIES[:3])}",
        minutes=14,
        in_pieces=True,
    ),
    Measurement(
        "long-12000",
        f"Answers of 12,000 tokens{EARLIER}",
        "",
        f"bench throughput {long_answers(12_000, 32, sigma=0.35)} --repeat 1 "
        f"{flags(LONG_POLICIES[:2])}",
        minutes=34,
        in_pieces=True,
    ),
    Measurement(
        "long-cache-dtypes",
        f"Answers of 3,000 tokens, the cache held in fewer bits{EARLIER}",
        "As many bytes hold more entries: what rounding gives without a policy, and beside one.",
        f"bench throughput {long_answers(3000, 24)} --repeat 2 "
        f"--compare-kv-cache-dtypes {' '.join(KV_CACHE_DTYPES)} {flags(('none', 'kara'))}",
        minutes=28,
        in_pieces=True,
    ),
    Measurement(
        "long-pools",
        f"Which pools pay, with answers of 3,000 tokens{EARLIER}",
        "The same requests on pools from a seventh of the demand to all of it.",
        f"bench sweep {long_answers(3000, 16).replace('--pool-share 0.25', '')}"
        f"--pool-shares 0.15 0.25 0.5 0.75 1.0 --repeat 1 {flags(LONG_POLICIES[1:3])}",
        minutes=6,
        plots=True,
        in_pieces=True,
    ),
    Measurement(
        "long-lengths",
        f"From which length on it pays{EARLIER}",
        "The mean length of answers, on a pool of a quarter of each length's own demand and on one "
        "with room for everybody. A test ran beside Kara's row of 500 tokens on the quarter: "
        "alone it reached 0.96 (0.81 to 1.38, three turns; "
        "bench/results/2026-11-22-lengths-500-again.json).",
        "bench sweep --shape 4m --dtype bfloat16 --threads 1 --dataset random --input-len 128 "
        "--output-lens 500 1000 2000 4000 8000 --random-output-sigma 0.7 "
        "--random-output-cap 16384 --num-prompts 12 --pool-shares 0.25 1.0 --repeat 1 "
        f"{flags(LONG_POLICIES[1:3])}",
        minutes=10,
        plots=True,
        in_pieces=True,
    ),
    Measurement(
        "long-79m",
        f"Answers of 3,000 tokens from a model of 79 M parameters{EARLIER}",
        "",
        f"bench throughput {long_answers(3000, 12, '79m')} --repeat 1 {flags(LONG_POLICIES[:2])}",
        minutes=6,
        in_pieces=True,
    ),
    Measurement(
        "cpu-peers-long",
        f"vLLM's CPU build on the same long answers{EARLIER}",
        "As many bytes for keys and values, the same prompts and lengths, in turns.",
        "--traffic long --shapes 4m --dtypes bfloat16 --kv-cache-dtypes auto fp8 "
        "--num-prompts 10 --repeat 1",
        minutes=12,
        module="bench.cpu_peers",
    ),
)
