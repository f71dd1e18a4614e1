"""What `python -m bench.suite run` measures, by chapters of docs/benchmarks.md."""

from __future__ import annotations

import math

from bench.report.engines import ENGINES
from bench.report.long_traces import BEFORE, LONG
from bench.report.measurement import Chapter, Measurement, flags
from kvserve.benchmarks.setup.options import KV_CACHE_DTYPES

KARA = "kara:window=128,buffer=16"
SNAPKV = "snapkv:trigger=threshold,budget=192,threshold=224"
DEFAULT_KARA = "kara:window=128"
OLD_KARA = KARA + ",query_reduce=group_mean,query_dtype=model,query_aggregate=max,chunk_budget=16"
CHAINS = "--dataset chain --threads 1"

# Every decoding policy on equal terms: the prompt's 191 entries and a share of the chain's 334.
RETENTIONS = (0.2, 0.3, 0.4, 0.5, 0.6)
_PROMPT, _TRACE = 191, 334
_PROTECTING = ("snapkv", "keydiff", "chunkkv", "pyramidkv", "adakv")


def decoding_policies(retention: float) -> list[str]:
    """Policies that can protect the prompt do; the others count it in their budget."""
    kept = round(retention * _TRACE)
    bound = f"budget={kept},threshold={kept + 32},protect_prompt=true"
    return [
        *(f"{name}:trigger=threshold,{bound}" for name in _PROTECTING),
        f"rkv:{bound}",
        *(f"{name}:budget={_PROMPT + kept}" for name in ("streaming_llm", "h2o")),
    ]


def paper(retention: float) -> str:
    """The paper's preset, whose budget is a count, at this share of a window's older entries."""
    budget = 16 + math.ceil(retention * 112)
    return f"kara:preset=paper,window=128,buffer=16,budget={budget},period=32"


SHORT = (
    Measurement(
        "quarter-pool",
        "A pool of a quarter of the demand",
        "Short traces, which gain little: 100 chains of 30 sums want four times the blocks that "
        "there are. Ratios are medians over turns, each beside the first row of the same turn.",
        f"bench throughput {CHAINS} --num-prompts 100 --pool-share 0.25 --repeat 9 --policy none "
        f"--policy {SNAPKV} --policy {KARA}",
        minutes=3,
    ),
    Measurement(
        "pool-sweep",
        "Which pools pay: the crossover",
        "The same traffic on pools from a fifth of the demand to more than all of it.",
        f"bench sweep {CHAINS} --num-prompts 48 --pool-shares 0.2 0.35 0.5 0.75 1.0 1.5 "
        f"--repeat 3 --policy {SNAPKV} --policy {KARA}",
        minutes=4,
        plots=True,
    ),
    Measurement(
        "ample-pool",
        "A pool with room for everybody",
        "Memory is not short here: compression saves only attention, and its events cost time.",
        f"bench throughput {CHAINS} --num-prompts 100 --pool-share 2 --repeat 5 --policy none "
        f"--policy {KARA}",
        minutes=1.5,
    ),
    Measurement(
        "shared-prefixes",
        "Shared prompts, prefix caching off and on",
        "100 prompts of 576 tokens, of which 512 are one of five; caching stays on under Kara.",
        "bench throughput --dataset prefix_repetition --prefix-repetition-prefix-len 512 "
        "--prefix-repetition-suffix-len 64 --prefix-repetition-num-prefixes 5 "
        "--prefix-repetition-output-len 128 --num-prompts 100 --pool-share 0.5 --repeat 3 "
        "--threads 1 --compare-prefix-caching --policy none "
        "--policy kara:window=64,buffer=16,ratio=0.3",
        minutes=1.5,
    ),
    Measurement(
        "batch-sizes",
        "More sequences at once",
        "The shape of the Kara paper's Tables 2 and 3: one pool, 16 to 256 sequences allowed at "
        "once. The pool has room for 64 of them at once; with more, memory is the limit.",
        f"bench sweep {CHAINS} --num-prompts 256 --pool-shares 0.25 "
        f"--max-num-seqs 16 32 64 128 256 --repeat 2 " + flags((SNAPKV, paper(0.3), KARA)),
        minutes=12,
        plots=True,
    ),
    Measurement(
        "latency",
        "One batch from end to end",
        "No pressure, no queue: what a policy adds to the time of eight requests.",
        "bench latency --input-len 64 --output-len 256 --batch-size 8 --num-iters 10 "
        f"--num-iters-warmup 2 --threads 1 --policy none --policy {SNAPKV} --policy {KARA}",
        minutes=1,
    ),
    Measurement(
        "repeatability",
        "The same again",
        "The first section's command three times over: what was decided must not change, ratios "
        "of throughputs may spread by 5 %.",
        "quarter-pool --times 3",
        minutes=9,
        module="bench.repeatability",
    ),
)

ACCURACY = (
    Measurement(
        "chain-accuracy",
        "Accuracy against retention, reasoning step by step",
        "Every policy that compresses while decoding, on chains of 30 sums: a prompt of about 191 "
        "tokens, a trace of 334. All but Kara hold the prompt's count and 20 to 60 % of the "
        "trace's (up to 32 entries more between events); Kara keeps as much of each full window: "
        "its default, the default it had before (group means, the largest over the window, "
        "Token2Chunk) and the paper's preset. "
        "StreamingLLM and H2O cannot leave the prompt alone, and count it in.",
        "eval --tasks chain --num-samples 100 --threads 1 --retention "
        f"{' '.join(map(str, RETENTIONS))} "
        + flags((DEFAULT_KARA, OLD_KARA, *map(paper, RETENTIONS)))
        + " "
        + flags(policy for r in RETENTIONS for policy in decoding_policies(r)),
        minutes=20,
        plots=True,
        equal_bytes=True,
    ),
    Measurement(
        "kara-ablations",
        "What Kara is made of",
        "The two ablations of the Kara paper's Table 1 at its retention of 40 %: only the "
        "buffer's queries score, and no Token2Chunk (`chunk_budget=0`). First with our scores, "
        "then with the paper's (all heads' queries computed again, attention summed).",
        "eval --tasks chain redundant-chain --num-samples 100 --threads 1 "
        + flags(
            KARA + ",ratio=0.4" + scores + ablation
            for scores in ("", ",query_source=recompute,query_aggregate=sum,group_aggregate=mean")
            for ablation in ("", ",queries=buffer", ",chunk_budget=0")
        ),
        minutes=3,
    ),
    Measurement(
        "needles",
        "Needles by depth and length",
        "One secret number among eight, at five depths of texts of 256 to 2,048 tokens, as in "
        "ChunkKV's tables; policies cut the prompt, question included, to so many entries before "
        "the answer.",
        "eval --tasks needle-grid --num-samples 8 --threads 1 "
        + flags(
            f"{name}:budget={budget}{more}"
            for budget in (64, 128)
            for name, more in (
                *(("chunkkv", ""), ("pyramidkv", ""), ("snapkv", ""), ("keydiff", "")),
                *(("h2o", ",decode_update=false"), ("streaming_llm", "")),
            )
        ),
        minutes=4,
        plots=True,
    ),
    Measurement(
        "codes-accuracy",
        "Codes beside eviction at as many bytes",
        "SpindleKV without its eviction, and PyramidKV at the ratio that holds as many bytes of "
        "blocks at the end: 0.57 on chains, 0.42 on needles, 0.95 on recall. Bytes are those of "
        "all blocks that a request named, mean over requests. With `gqa=repeat` every query head "
        "keeps as many entries for itself, and what any of them keeps is held.",
        "eval --tasks chain needle-512 recall --num-samples 40 --threads 1 "
        + flags(
            (
                *("spindlekv:ratio=1", "spindlekv:ratio=0.8", "spindlekv:ratio=0.8,gqa=repeat"),
                *(f"pyramidkv:ratio={ratio}" for ratio in (0.95, 0.57, 0.42)),
            )
        ),
        minutes=1,
    ),
    Measurement(
        "needles-codes",
        "Needles under SpindleKV",
        "The same grid; a ratio of the prompt's entries is left by eviction. SpindleKV then holds "
        "them as codes, PyramidKV as they are: columns say at how many bytes.",
        "eval --tasks needle-grid --num-samples 8 --threads 1 "
        + flags(
            (
                *(f"spindlekv:ratio={ratio}" for ratio in (1, 0.4, 0.2)),
                *(f"pyramidkv:ratio={ratio}" for ratio in (0.4, 0.2)),
            )
        ),
        minutes=4,
        plots=True,
    ),
)

FEWER_BITS = (
    Measurement(
        "codes",
        "Codes read and rebuilt",
        "Eight sequences of 1,024 random tokens that go on for 512: attention that reads codes "
        "itself (direct) beside entries rebuilt in each step. `itl p50` is a decoding step; the "
        "throughput has the events in it too, of which the one at a prompt's end compares all its "
        "entries with each other. The paper decodes 17 to 18 % slower than the full cache "
        "(4,096 + 1,000 tokens, 40 % of the cache, RTX 3090).",
        "bench throughput --dataset random --input-len 1024 --output-len 512 --num-prompts 8 "
        "--max-num-seqs 8 --threads 1 --repeat 3 --compare-code-attention "
        + flags(("none", "spindlekv:ratio=1", "spindlekv:ratio=0.4")),
        minutes=2,
    ),
    Measurement(
        "cpu-attention",
        "How fast attention reads blocks",
        "Decode attention alone on one core, over blocks in random order; a sum of the same blocks "
        "in the same order, the fastest such read that was found; and a plain sum over the same "
        "memory from end to end. An entry is the key and the value of one token and KV head. "
        "The heads are those of `4m`, `79m`, Qwen2.5-0.5B and Llama-3-8B.",
        "--threads 1",
        minutes=8,
        module="bench.cpu_attention",
    ),
    Measurement(
        "cpu-events",
        "How fast an event's parts are",
        "On one core, beside a copy of as many bytes: keys of a row gathered, a window of its "
        "4-bit log scored against them, half of its entries moved to the front.",
        "--threads 1 --repeat 2",
        minutes=2,
        module="bench.cpu_events",
    ),
    Measurement(
        "kv-cache-dtypes",
        "Decoding over a cache of fewer bits",
        "What a decoding step gains where nothing is evicted: the same random entries, held as "
        "float32, as bfloat16 and, under the bfloat16 model, as levels. Scheduler and prompts are "
        "not in it.",
        "--contexts 512 2048 8192 --batches 1 16 64 --threads 1 --memory 7",
        minutes=8,
        module="bench.kv_cache_dtypes",
    ),
    Measurement(
        "kv-cache-accuracy",
        "Accuracy against bytes, the cache held in fewer bits",
        "The full cache and Kara, each with its entries held as they are computed (float32), as "
        "`int8`, as `k8v4` and as `fp8`. Bytes of entries count scales.",
        "eval --tasks chain redundant-chain needle-512 needle-1024 needle-2048 recall "
        "--num-samples 100 --threads 1 --retention 0.5 0.3 0.2 "
        f"--compare-kv-cache-dtypes {' '.join(KV_CACHE_DTYPES)} --policy none --policy {KARA}",
        minutes=35,
        plots=True,
    ),
    Measurement(
        "kv-cache-needles",
        "Needles by depth and length, the cache held in fewer bits",
        "",
        "eval --tasks needle-grid --num-samples 8 --threads 1 "
        f"--compare-kv-cache-dtypes {' '.join(KV_CACHE_DTYPES)} "
        f"--policy none --policy snapkv:budget=128 --policy chunkkv:budget=128",
        minutes=5,
    ),
)

CONVERSATIONS = (
    Measurement(
        "conversations",
        "Conversations that go on from their compressed cache",
        "Agents on one server after the other, each with a quarter of the blocks that 8 of them "
        "want at their end: tool outputs of 200 to 2,000 tokens, 8 to 20 turns, two seconds to "
        "think. Without continuations a later prompt has the whole history, which Kara protects.",
        "--conversations 8 16",
        minutes=65,
        module="bench.serving.conversations",
    ),
    Measurement(
        "conversations-swap",
        "Conversations with host memory for all of them",
        "The same pool, and 1 GiB of host memory instead of as much as the pool: a continuation "
        "that leaves the pool is still there when its next turn comes.",
        "--conversations 8 16 --arms continuations --swap-space 1",
        minutes=6,
        module="bench.serving.conversations",
    ),
)

CHAPTERS = (
    Chapter("long-answers", "Long answers", "What compression is for, with Kara's default.", LONG),
    Chapter(
        "kara-before",
        "Long answers under Kara's earlier default",
        "Measured before 2026-11-23, when Kara kept three tenths of a window and left nothing "
        "behind: which pools and lengths pay, other cache types, a larger shape, vLLM. Today's "
        "default holds less and is faster.",
        BEFORE,
    ),
    Chapter(
        "short-answers",
        "Short answers and pools",
        "Chains of 334 tokens, which gain little; prefix caching; one batch; whether it repeats.",
        SHORT,
    ),
    Chapter(
        "accuracy",
        "Accuracy",
        "Right answers against what is kept, on chains and needles.",
        ACCURACY,
    ),
    Chapter(
        "fewer-bits",
        "Fewer bits per entry",
        "int8, k8v4 and fp8, alone and beside a policy; SpindleKV's codes.",
        FEWER_BITS,
    ),
    Chapter(
        "other-engines",
        "Other engines",
        "vLLM, llama.cpp and transformers on the same core; kvpress on the same prompts.",
        ENGINES,
    ),
    Chapter(
        "conversations",
        "Conversations",
        "Agents whose next turn goes on from the compressed cache.",
        CONVERSATIONS,
    ),
)
SUITE = tuple(each for chapter in CHAPTERS for each in chapter.measurements)
