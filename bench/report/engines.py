"""What `python -m bench.suite run` measures beside other engines."""

from __future__ import annotations

from bench.report.measurement import Measurement

_GUESSING = (
    "--input-len 400 --output-len 400 --shapes 4m --dtypes float32 --batches 1 16 --contestants "
    "kvserve_cpu_model kvserve_ngram vllm vllm_ngram --repeat 3 --cpu 1"
)
_HALF_BILLION = (
    "--shapes 0.5b --dtypes bfloat16 --contestants kvserve_cpu_model vllm llama_cpp --cpu 1 "
)

ENGINES = (
    Measurement(
        "cpu-peers-short",
        "Other engines on the same CPU, in bfloat16",
        "64 + 64 tokens on random weights, one thread on the same core, in turns.",
        "--shapes 4m 79m --dtypes bfloat16 --batches 1 16 64 --contestants kvserve_cpu_model vllm "
        "llama_cpp --repeat 3 --cpu 1",
        minutes=6,
        module="bench.cpu_peers",
    ),
    Measurement(
        "cpu-peers-half-billion",
        "Other engines on a model of half a billion weights",
        "The dimensions of Qwen2.5-0.5B, random weights, 64 + 64 tokens, one thread on the same "
        "core, in turns.",
        _HALF_BILLION + "--batches 1 4 16 --repeat 3",
        minutes=6,
        module="bench.cpu_peers",
    ),
    Measurement(
        "cpu-peers-half-billion-long",
        "The same, with contexts of 2,000 tokens",
        "Prompts of 2,000 tokens, whose computation is most of the time, and answers of 64.",
        _HALF_BILLION + "--batches 1 4 --input-len 2000 --repeat 2",
        minutes=10,
        module="bench.cpu_peers",
    ),
    Measurement(
        "cpu-peers-long",
        "vLLM's CPU build on the same long answers",
        "As many bytes for keys and values, the same prompts and lengths, in turns.",
        "--traffic long --shapes 4m --dtypes bfloat16 --kv-cache-dtypes auto fp8 "
        "--num-prompts 10 --repeat 1",
        minutes=12,
        module="bench.cpu_peers",
    ),
    Measurement(
        "cpu-peers-ngram-copy",
        "The same guesses in vLLM, on a copy",
        "Both engines with the same n-gram settings (5 guesses, lookups of 5 to 2 tokens), and "
        "without, in turns. The weights walk along a cycle of tokens at the cost of random ones, "
        "so each engine answers with a copy of its prompt.",
        "--prompts copy " + _GUESSING,
        minutes=3,
        module="bench.cpu_peers",
    ),
    Measurement(
        "cpu-peers-ngram-edit",
        "The same guesses in vLLM, on an edited text",
        "The same; the prompt has a tenth of its tokens changed, and the answer does not.",
        "--prompts edit " + _GUESSING,
        minutes=3,
        module="bench.cpu_peers",
    ),
    Measurement(
        "cpu-peers",
        "Other engines on the same CPU, before",
        "Before recorded steps. Output tokens per second of kvserve (compiled attention in each "
        "layout of its cache, torch's attention) and of its peers, each in an environment of its "
        "own (`make peers`), on the same random weights. `kvserve / it` compares with the best "
        "peer. transformers' continuous batching takes part if `--contestants` names it.",
        "--repeat 3",
        minutes=13,
        module="bench.cpu_peers",
    ),
    Measurement(
        "kvpress-accuracy",
        "kvpress's presses on the same prompts",
        "The same method in kvpress and here, keeping as many entries: at a prompt's end, and "
        "while decoding every 32 steps. Every turn of a task is a prompt of its own.",
        "--threads 1",
        minutes=6,
        module="bench.kvpress_accuracy",
    ),
)
