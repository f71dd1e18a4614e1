"""Set up the peers that kvserve is measured against: `python -m bench.peers.install [NAME ...]`.

Each gets its own environment in `.peers/NAME`, because their pinned versions of transformers and of
other packages conflict. All of them take about 6 GB; compiling llama_cpp takes about ten minutes.
KVSERVE_PEERS names another folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from bench.peers.peer import FOLDER, PEERS, Peer

TORCH = "torch==2.13.0"  # installed first: if the index has a CPU build, no later step replaces it
_NEEDED_GB = 7
# Prints a package's requirements without extras and without media libraries, which text does not
# need.
_REQUIREMENTS = """
import importlib.metadata, sys
skipped = ("torchaudio", "torchvision", "torchcodec")
for line in importlib.metadata.requires(sys.argv[1]):
    if "extra ==" not in line and not line.startswith(skipped):
        print(line)
"""


def install(peer: Peer) -> None:
    """Create the environment, or complete it."""
    if not peer.python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / peer.name)], check=True)
    if peer.needs_torch:
        _pip(peer, TORCH)
    if peer.alone is None:
        _pip(peer, *peer.packages)
        return
    _pip(peer, "--no-deps", peer.alone)
    name = peer.alone.partition("==")[0]
    asked = subprocess.run(
        [str(peer.python), "-c", _REQUIREMENTS, name], check=True, capture_output=True, text=True
    )
    _pip(peer, *asked.stdout.splitlines(), *peer.packages)


def _pip(peer: Peer, *what: str) -> None:
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": "1", **os.environ}
    command = [str(peer.python), "-m", "pip", "--disable-pip-version-check", "install", *what]
    subprocess.run(command, check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(PEERS)}")
    names = parser.parse_args().names or list(PEERS)
    if unknown := set(names) - set(PEERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    free = shutil.disk_usage(FOLDER).free / 1e9
    if free < _NEEDED_GB:
        parser.error(f"{FOLDER} has {free:.0f} GB free; all peers together take {_NEEDED_GB}")
    for name in names:
        install(PEERS[name])
        sys.stdout.write(f"{name}: ready in {FOLDER / name}\n")


if __name__ == "__main__":
    main()
