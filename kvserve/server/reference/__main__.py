"""``python -m kvserve.server.reference FOLDER`` writes the pages of ``docs/reference``."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from kvserve.server.reference import pages

parser = ArgumentParser(prog="python -m kvserve.server.reference", description=pages.__doc__)
parser.add_argument("folder", type=Path, help="where the pages go, as docs/reference")
folder = parser.parse_args().folder
folder.mkdir(parents=True, exist_ok=True)
for name, text in pages.all_pages().items():
    (folder / name).write_text(text)
