"""`kvserve bench frontier` with llama.cpp's caches as rows: the README's figure and table.

    python -m bench.peers.install llama_cpp     # once
    python -m bench.frontier --save-result bench/results/DATE-frontier.json --save-plots docs/plots
    python -m bench.frontier --join FIDELITY.json SPEED.json --save-plots docs/plots/frontier

The README's figure is the last: of the results of the two commands that `kvserve bench frontier`
runs (bench/results/2026-11-26-frontier-*.json). Rows whose speed was not measured have none.

llama.cpp computes the same pieces of text with its caches in fewer bits; its KL is to its own
float16 cache. It has no traffic of ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from bench.peers.peer import PEERS, ROOT
from kvserve.benchmarks.commands.frontier import Frontier, add_arguments, joined
from kvserve.benchmarks.reports.plots import plot_frontier
from kvserve.benchmarks.reports.report import Row, measure_and_publish
from kvserve.engine.models.hub import find_model

TYPES = ("q8_0", "q4_0")


_THEN_CALLED = {"kara": "kara:ratio=0.1"}
"""What the default was when the file of speeds was made."""


def of_files(fidelity: Path, speed: Path) -> list[Row]:
    """Rows of two results."""
    found, speeds = (json.loads(file.read_text())["rows"] for file in (fidelity, speed))
    known = {row["policy"] for row in found}
    for row in speeds:
        if row["policy"] not in known:
            row["policy"] = _THEN_CALLED[row["policy"]]
        row["ratio_to_first"] = row["output_tok_s"] / speeds[0]["output_tok_s"]
    there = {(row["policy"], row["kv_cache_dtype"]) for row in speeds}
    none = {"output_tok_s": None, "ratio_to_first": None}
    speeds += [row | none for row in found if (row["policy"], row["kv_cache_dtype"]) not in there]
    return joined(found, speeds)


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
    words = "draw what two results say, and measure nothing"
    files = ("FIDELITY", "SPEED")
    parser.add_argument("--join", nargs=2, type=Path, metavar=files, help=words)
    args = parser.parse_args()
    if args.join:
        if args.save_plots is None:
            parser.error("--join needs --save-plots")
        plot_frontier(of_files(*args.join), args.save_plots)
        return 0
    return measure_and_publish(WithLlamaCpp(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
