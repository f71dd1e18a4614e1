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

# Kara as it was until 2026-11-22.
KARA_BEFORE = "kara:ratio=0.3,remainder=off"
TURNS = ("none", KARA_BEFORE, "kara")

# Each policy in the best of its forms, with the budget that holds as many bytes as Kara's default;
# both were found on another seed: `kvserve eval --match-bytes kara --seed 11`.
EQUAL_BYTES = (
    "none",
    "kara",
    "snapkv:trigger=threshold,budget=419",
    "chunkkv:trigger=threshold,remainder=fitted,budget=433",
    "pyramidkv:trigger=threshold,budget=431",
    "adakv:trigger=threshold,budget=422",
    "rkv:protect_prompt=true,budget=434",
    "triattention:budget=727",
    "keydiff:trigger=threshold,protect_prompt=true,budget=433",
    "streaming_llm:budget=963",
    "h2o:budget=608",
)
EQUAL = Measurement(
    "equal-bytes-turns",
    "Long traces, graded, at equal bytes",
    "100 chains of 44 lines, whose traces have 2,000 tokens of sums, checks, recaps and talk, "
    "on the model that is trained for them, in turns on a pool of a quarter. Each policy has the "
    "budget that holds as many bytes per sequence as Kara's default, on average over a run. Its "
    "form (trigger, prompt protected or not, remainder or not) is the best of those tried on "
    "seed 11 (bench/results/2026-11-24-equal-bytes-forms.json).",
    f"bench throughput {GRADED} --num-prompts 100 --seed 2026 --repeat 2 {flags(EQUAL_BYTES)}",
    minutes=36,
    plots=True,
)
PEERS = Measurement(
    "graded-peers",
    "The same prompts on vLLM's CPU build",
    "As many bytes for keys and values, float32, one thread on the same core, in turns. Every "
    "answer is as long as the right one, so that all engines do the same work.",
    "--traffic long --task long-chain-2000 --dtypes float32 --num-prompts 100 --seed 2026 --cpu 1",
    minutes=16,
    module="bench.cpu_peers",
)

LONG = (
    EQUAL,
    PEERS,
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
        "One run. Tests took 40 of the 239 seconds of `none`, which may be too slow by a tenth.",
        f"bench throughput {long_answers(12_000, 12, sigma=0.35)} --repeat 1 {flags(TURNS)}",
        minutes=14,
    ),
)

# Measured with Kara's default until 2026-11-22: a ratio of 0.3, and nothing left behind.
BEFORE = (
    Measurement(
        "long-cache-dtypes",
        "Answers of 3,000 tokens, the cache held in fewer bits",
        "As many bytes hold more entries: what rounding gives without a policy, and beside one.",
        f"bench throughput {long_answers(3000, 24)} --repeat 2 "
        f"--compare-kv-cache-dtypes {' '.join(KV_CACHE_DTYPES)} {flags(('none', 'kara'))}",
        minutes=28,
    ),
    Measurement(
        "long-pools",
        "Which pools pay, with answers of 3,000 tokens",
        "The same requests on pools from a seventh of the demand to all of it.",
        f"bench sweep {long_answers(3000, 16).replace('--pool-share 0.25', '')}"
        f"--pool-shares 0.15 0.25 0.5 0.75 1.0 --repeat 1 {flags(LONG_POLICIES[1:3])}",
        minutes=6,
        plots=True,
    ),
    Measurement(
        "long-lengths",
        "From which length on it pays",
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
    ),
    Measurement(
        "long-79m",
        "Answers of 3,000 tokens from a model of 79 M parameters",
        "",
        f"bench throughput {long_answers(3000, 12, '79m')} --repeat 1 {flags(LONG_POLICIES[:2])}",
        minutes=6,
    ),
)
