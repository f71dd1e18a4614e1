"""`kvserve bench frontier` with llama.cpp's caches as rows: the README's figure and table.

    python -m bench.peers.install llama_cpp     # once
    python -m bench.frontier --save-result bench/results/DATE-frontier.json --save-plots docs/plots

llama.cpp computes the same pieces of text with its caches in fewer bits; its KL is to its own
float16 cache. It has no traffic of ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess

from bench.peers.peer import PEERS, ROOT
from kvserve.benchmarks.commands.frontier import Frontier, add_arguments
from kvserve.benchmarks.reports.report import Row, measure_and_publish
from kvserve.engine.models.hub import find_model

TYPES = ("q8_0", "q4_0")


class WithLlamaCpp(Frontier):
    def measure(self) -> None:
        super().measure()
        peer, model = PEERS["llama_cpp"], find_model(self.args.model)
        files = [model] if model.is_file() else list(model.glob("*.gguf"))
        if peer.missing or not files or self.args.text:
            self.notes.append(peer.missing or "llama.cpp needs a GGUF file and no --text")
            return
        words = [peer.python, "-m", "bench.peers.llama_cpp_fidelity", files[0], *TYPES]
        words += ["--num-texts", self.args.num_texts, "--text-len", self.args.text_len]
        done = subprocess.run(
            [*map(str, words)], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
        found: list[Row] = json.loads(done.stdout.splitlines()[-1])
        self.rows += found


def main() -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args()
    return measure_and_publish(WithLlamaCpp(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
