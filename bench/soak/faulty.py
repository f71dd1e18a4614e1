"""A plug-in whose policy fails on purpose, found through the entry points of a folder.

`write_plug_in` makes the folder. With the folder on PYTHONPATH, every process of the server finds
the policy `faulty`, whose events run out of memory or raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import argument
from kvserve.engine.policies.streaming_llm import StreamingLLM


@dataclass(frozen=True)
class Faulty(StreamingLLM):
    """streaming_llm with a fault at its first event."""

    name: ClassVar[str] = "faulty"
    fault: str = argument("raise", "what happens", choices=("raise", "out_of_memory"))

    def score(self, obs: Any) -> Tensor:
        if self.fault == "out_of_memory":
            raise torch.OutOfMemoryError("injected: tried to allocate 2.00 GiB")
        raise ZeroDivisionError("injected: a bug of a plug-in")


def write_plug_in(folder: Path) -> Path:
    """Write a distribution with one entry point."""
    facts = folder / "kvserve_faulty-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: kvserve-faulty\nVersion: 0\n")
    entry = "[kvserve.policies]\nfaulty = bench.soak.faulty:Faulty\n"
    (facts / "entry_points.txt").write_text(entry)
    return folder
