"""The contestants on a CPU: kvserve in several settings, and its peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from bench.peers.peer import PEERS, PeerProcess


@dataclass(frozen=True)
class Contestant:
    """One column: an adapter and the settings that it loads with."""

    name: str
    title: str
    peer: str | None = None  # None: kvserve itself
    settings: dict[str, Any] = field(default_factory=dict)

    def start(self, cpu: int) -> PeerProcess:
        if self.peer is None:
            return PeerProcess.of_kvserve(cpu)
        return PeerProcess.of(PEERS[self.peer], cpu=cpu)


def _kvserve(backend: str, layout: str) -> Contestant:
    settings = {"attention_backend": backend, "kv_layout": layout, "max_num_batched_tokens": 4096}
    title = "kvserve" + (f" {layout.upper()}" if layout != "model" else "")
    title += f", {backend}" if backend != "cpu" else ""
    return Contestant(f"kvserve_{backend}_{layout}", title, settings=settings)


BASE = "kvserve_cpu_model"
_NGRAM = {
    "speculative_config": {
        **{"method": "ngram", "num_speculative_tokens": 5},
        **{"prompt_lookup_max": 5, "prompt_lookup_min": 2},
    }
}
_VLLM = {"max_num_batched_tokens": 4096}
CONTESTANTS = {
    each.name: each
    for each in (
        *(_kvserve(*both) for both in product(("cpu", "torch"), ("model", "layer", "head"))),
        Contestant(
            "kvserve_ngram", "kvserve, n-gram", settings=_kvserve("cpu", "model").settings | _NGRAM
        ),
        Contestant("vllm", "vLLM CPU", "vllm", _VLLM),
        Contestant("vllm_ngram", "vLLM CPU, n-gram", "vllm", _VLLM | _NGRAM),
        Contestant("llama_cpp", "llama.cpp", "llama_cpp"),
        Contestant("transformers", "transformers", "transformers"),
        Contestant(
            "transformers_continuous",
            "transformers, continuous",
            "transformers",
            {"continuous": True},
        ),
    )
}
