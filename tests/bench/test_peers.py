"""The peers: what is said of one that is missing or does not start, and the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cpu_peers
from bench.peers import peer as peers
from bench.peers.peer import PeerError


class FakeProcess:
    """Answers of the lengths asked for, all of a prompt's first token; notes how it was started."""

    def __init__(self, rate: float) -> None:
        self.rate, self.closed = rate, False

    def load(self, **settings: Any) -> dict[str, str]:
        self.settings = settings
        return {"fake": "1.0"}

    def run(self, prompts: list[list[int]], max_tokens: int | list[int]) -> dict[str, Any]:
        asked = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        tokens = [[prompt[0]] * limit for prompt, limit in zip(prompts, asked, strict=True)]
        return {"seconds": sum(asked) / self.rate, "tokens": tokens}

    def close(self) -> None:
        self.closed = True


def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    result = tmp_path / "r.json"
    argv = ["cpu_peers", "--shapes", "4m", "--batches", "1", "2", "--output-len", "4"]
    monkeypatch.setattr(sys, "argv", [*argv, *flags, "--save-result", str(result)])
    assert cpu_peers.main() == 0
    saved: dict[str, Any] = json.loads(result.read_text())
    return saved


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These peers and no others."""
    monkeypatch.setattr(peers, "FOLDER", folder)
    for name in names:
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin" / "python").touch()


def test_ratios_are_to_the_best_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"kvserve_cpu_model": 300.0, "kvserve_cpu_head": 270.0, "vllm": 200.0}
    rates["llama_cpp"] = 100.0
    started: list[FakeProcess] = []

    def start(self: cpu_peers.Contestant, cpu: int) -> FakeProcess:
        if self.name == "transformers":
            raise PeerError("transformers has ended; it said:\nTraceback\nImportError: no torch")
        started.append(FakeProcess(rates[self.name]))
        return started[-1]

    monkeypatch.setattr(cpu_peers.Contestant, "start", start)
    install(tmp_path, monkeypatch, "vllm", "transformers")
    names = [*rates, "transformers"]
    flags = ("--contestants", *names, "--dtypes", "float32", "--repeat", "2", "--disable-tqdm")
    saved = compare(tmp_path, monkeypatch, *flags)
    first, second = saved["rows"]
    assert (first["batch"], second["batch"]) == (1, 2)
    assert first["kvserve_cpu_model"] == pytest.approx(300)
    assert first["best_peer"] == "vLLM CPU" and first["vs_best_peer"] == pytest.approx(1.5)
    assert first["head_vs_model"] == pytest.approx(0.9) and "layer_vs_model" not in first
    assert first["same_tokens"] == {"kvserve_cpu_model": 1, "kvserve_cpu_head": 1, "vllm": 1}
    assert len(first["output_tok_s_all"]["vllm"]) == 2
    assert saved["notes"] == [
        "llama.cpp is missing: python -m bench.peers.install llama_cpp",
        "transformers did not start and is left out: ImportError: no torch",
    ]
    assert len(started) == 3 and all(process.closed for process in started)


@pytest.mark.slow
def test_kvserve_answers_as_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--contestants", "kvserve_cpu_model", "--dtypes", "float32", "--repeat", "1")
    saved = compare(tmp_path, monkeypatch, *flags, "--input-len", "8", "--disable-tqdm")
    assert [row["batch"] for row in saved["rows"]] == [1, 2]
    assert all(row["kvserve_cpu_model"] > 0 for row in saved["rows"])
    assert saved["settings"]["versions"]["kvserve"] and saved["threads"] == 1


def test_long_answers_get_as_many_bytes_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, FakeProcess] = {}

    def start(self: cpu_peers.Contestant, cpu: int) -> FakeProcess:
        rates = {"kvserve none": 300.0, "kvserve kara": 600.0, "vllm": 200.0}
        return started.setdefault(self.name, FakeProcess(rates[self.name.rpartition(" ")[0]]))

    monkeypatch.setattr(cpu_peers.Contestant, "start", start)
    install(tmp_path, monkeypatch, "vllm")
    long = ("--traffic", "long", "--dtypes", "bfloat16", "--num-prompts", "5", "--repeat", "2")
    held = ("--kv-cache-dtypes", "auto", "fp8", "--output-len", "400", "--disable-tqdm")
    saved = compare(tmp_path, monkeypatch, *long, *held)
    assert [row["vs_vllm"] for row in saved["rows"]] == pytest.approx([1.5, 1.5, 3, 3, 1, 1])
    assert [row.get("policy") for row in saved["rows"][::2]] == ["none", "kara", None]
    ours, theirs = (started[name].settings for name in ("kvserve kara auto", "vllm auto"))
    token = 2 * 4 * 4 * 32 * 2  # keys and values, layers, heads, head dim, bytes
    usable = (theirs["num_gpu_blocks_override"] - 1) * theirs["block_size"]
    assert 0 <= usable * token - (ours["kv_cache_memory"] - 16 * token) < 32 * token
    assert ours["policy"] == {"name": "kara"} and theirs["block_size"] == 32
    assert ours["max_model_len"] == theirs["max_model_len"] > 128 + 400
    fp8 = started["vllm fp8"].settings
    assert fp8["kv_cache_dtype"] == "fp8" and theirs["kv_cache_dtype"] == "auto"
    assert abs((fp8["num_gpu_blocks_override"] - 1) * 32 - 2 * usable) <= 32
    assert all(process.closed for process in started.values())
