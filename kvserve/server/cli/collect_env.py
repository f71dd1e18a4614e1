"""``kvserve collect-env``: what a bug report should say about the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys

import kvserve

_PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "openai", "ray", "flash-attn"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        width = max(map(len, facts))
        sys.stdout.writelines(f"{name:{width}}  {value}\n" for name, value in facts.items())
    return 0


def collect() -> dict[str, str]:
    """Facts by name; nothing that identifies the user."""
    import torch

    facts = {
        "kvserve": kvserve.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "torch threads": str(torch.get_num_threads()),
        "cuda": str(torch.version.cuda or "no"),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        facts[f"gpu {index}"] = f"{properties.name}, {memory:.0f} GiB"
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    for name in sorted(os.environ):
        if name.startswith("KVSERVE_") and name != "KVSERVE_API_KEY":
            facts[name] = os.environ[name]
    return facts
