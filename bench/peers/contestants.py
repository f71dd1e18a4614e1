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
CONTESTANTS = {
    each.name: each
    for each in (
        *(_kvserve(*both) for both in product(("cpu", "torch"), ("model", "layer", "head"))),
        Contestant("vllm", "vLLM CPU", "vllm", {"max_num_batched_tokens": 4096}),
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
