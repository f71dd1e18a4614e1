"""`kvserve bench frontier` with rows of llama.cpp and vLLM, as docs/benchmarks.md has them.

    python -m bench.peers.install llama_cpp vllm     # once
    python -m bench.frontier --save-result bench/results/DATE-frontier-smollm2.json \
        --save-plots docs/plots/frontier

The peers compute the first of the pieces of text (without planted facts), and as many answers of
the same lengths on as many bytes. A peer's KL is to its own cache in 16 bits. vLLM gets the model's
weights widened to bfloat16, llama.cpp the file as it is. vLLM runs the traffic; llama.cpp, which
needs a slot of the full length for each sequence, has as many as fit, and its steps are timed at
seven lengths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from bench.harness.commands.frontier import Frontier, add_arguments
from bench.harness.datasets.workload import random_prompts
from bench.harness.measuring.fidelity import pieces
from bench.harness.reports.report import Report, Row, measure_and_publish
from bench.peers.long_traffic import LongTraffic
from bench.peers.peer import PEERS, ROOT, PeerProcess
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.models.hub import find_model

SHARE, PROMPT = 0.25, 64
_TEXTS = 2  # of the pieces are computed by peers: llama.cpp reads one in a minute


class WithPeers(Frontier):
    def measure(self) -> None:
        super().measure()
        model = find_model(self.args.model)
        files = [model] if model.is_file() else list(model.glob("*.gguf"))
        if not files or self.args.text:
            self.notes.append("peers need a GGUF file and no --text")
            return
        with tempfile.TemporaryDirectory() as folder:
            texts = Path(folder, "texts.json")
            texts.write_text(json.dumps(self._texts(model)[:_TEXTS]))
            for name, rows in (("llama_cpp", self._llama_cpp), ("vllm", self._vllm)):
                if PEERS[name].missing:
                    self.notes.append(str(PEERS[name].missing))
                else:
                    self.rows += map(self._row, rows(files[0], texts))

    def report(self) -> Report:
        return replace(super().report(), program="python -m bench.frontier")

    def _texts(self, model: Path) -> list[list[int]]:
        source = "\n\n".join(topics[name] for name in sorted(topics))
        tokens = np.array(Tokenizer(str(model)).encode(source, add_special_tokens=False))
        found = pieces(tokens, self.args.num_texts, self.args.text_len)
        return [piece.tolist() for piece in found]

    def _row(self, row: Row) -> Row:
        ratio = row["output_tok_s"] / self.rows[0]["output_tok_s"]
        return {"policy_args": None, "facts": None, "frontier": "", **row, "ratio_to_first": ratio}

    def _llama_cpp(self, file: Path, texts: Path) -> list[Row]:
        args = self.args
        given = ["--output-len", args.output_len, "--at-once", SHARE * args.num_prompts]
        return _said("llama_cpp", file, texts, *given)

    def _vllm(self, file: Path, texts: Path) -> list[Row]:
        args, folder = self.args, texts.with_name("checkpoint")
        measured = _said("vllm", file, folder, texts)
        config = json.loads((folder / "config.json").read_text())
        lengths = [(PROMPT, args.output_len)] * args.num_prompts
        prompts = random_prompts(lengths, config["vocab_size"], 0)
        traffic = LongTraffic.sized(prompts, config, SHARE, "bfloat16")
        facts = {"policy": "vLLM", "n": _TEXTS}
        rows: list[dict[str, Any]] = [
            {**facts, "kv_cache_dtype": "bf16", "of_full": 1.0, "kl": 0.0, "kl_error": 0.0},
            {**facts, "kv_cache_dtype": "fp8", "of_full": 0.5, **measured},
        ]
        for row, dtype in zip(rows, ("auto", "fp8"), strict=True):
            process = PeerProcess.of(PEERS["vllm"])
            settings = traffic.settings("vllm", dtype) | {"kv_cache_dtype": dtype}
            process.load(model=str(folder), dtype="bfloat16", **settings)
            process.run(prompts=prompts.prompts[:1], max_tokens=8)
            result = process.run(prompts=list(prompts.prompts), max_tokens=args.output_len)
            process.close()
            row["output_tok_s"] = sum(map(len, result["tokens"])) / result["seconds"]
        return list(rows)


def _said(name: str, *words: Any) -> Any:
    """What a peer's script prints, run in its own environment with one thread."""
    peer = PEERS[name]
    command = [str(peer.python), "-m", f"bench.peers.{name}_frontier", *map(str, words)]
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **peer.environment}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in env.items()), *command],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args()
    if args.num_texts < _TEXTS:
        parser.error(f"--num-texts must be {_TEXTS} or more: peers have an error over texts, too")
    return measure_and_publish(WithPeers(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
