"""What serving over HTTP costs: tokens per second of the offline engine, and of streams, in turns.

    python -m bench.server_overhead            # a 79 M-parameter shape with random weights

Both run the same requests with the same settings and take turns, so that other load slows both of
them alike. The engine has one torch thread; the server and the client share the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 640,
    "intermediate_size": 1760,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FLAGS = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "512")


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 31000 + 3 for j in range(32)] for i in range(count)]


def offline(model: Path, args: argparse.Namespace) -> float:
    """Tokens per second of the engine in a process of its own, as the server's engine has."""
    script = (
        "import sys, time, json; from bench.server_overhead import prompts;"
        "from kvserve import LLM, SamplingParams;"
        "n, tokens, seqs = map(int, sys.argv[2:]);"
        "llm = LLM(sys.argv[1], load_format='dummy', skip_tokenizer_init=True,"
        " max_model_len=512, max_num_seqs=seqs);"
        "p = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1);"
        "llm.generate(prompts(4), p, use_tqdm=False); t = time.perf_counter();"
        "llm.generate(prompts(n), p, use_tqdm=False); print(n * tokens / (time.perf_counter() - t))"
    )
    sizes = map(str, (args.num_prompts, args.tokens, args.max_num_seqs))
    command = [sys.executable, "-c", script, str(model), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    return float(done.stdout)


def served(model: Path, args: argparse.Namespace) -> float:
    """Tokens per second of as many streams, from the first request to the last stream's end."""
    command = [sys.executable, "-m", "kvserve", "--model", str(model), "--port", str(args.port)]
    command += [*FLAGS, "--max-num-seqs", str(args.max_num_seqs), "--disable-uvicorn-access-log"]
    server = subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_stream_all(f"http://127.0.0.1:{args.port}", server, args))
    finally:
        server.terminate()
        server.wait()


async def _stream_all(url: str, server: subprocess.Popen[bytes], args: argparse.Namespace) -> float:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        while server.poll() is None:
            try:
                if (await client.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        await asyncio.gather(*(_stream(client, p, args.tokens) for p in prompts(4)))
        started = time.perf_counter()
        counts = await asyncio.gather(
            *(_stream(client, prompt, args.tokens) for prompt in prompts(args.num_prompts))
        )
        return sum(counts) / (time.perf_counter() - started)


async def _stream(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> int:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 1}
    body |= {"stream": True, "return_token_ids": True}
    count = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                count += sum(len(c["token_ids"]) for c in json.loads(line[6:])["choices"])
    return count


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--port", type=int, default=8791)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        rows = []
        for _ in range(args.repeat):
            rows.append((offline(Path(directory), args), served(Path(directory), args)))
            sys.stdout.write("offline {:.1f} tok/s, served {:.1f} tok/s\n".format(*rows[-1]))
            sys.stdout.flush()
    best = [max(column) for column in zip(*rows, strict=True)]
    sys.stdout.write(f"best of {args.repeat}: served / offline = {best[1] / best[0]:.3f}\n")


if __name__ == "__main__":
    main()
