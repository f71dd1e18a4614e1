"""``python -m kvserve.server.reference FOLDER`` writes the pages of ``docs/reference``."""

from __future__ import annotations

import sys
from pathlib import Path

from kvserve.server.reference import pages

if len(sys.argv) != 2:
    sys.exit("usage: python -m kvserve.server.reference FOLDER")
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, text in pages.all_pages().items():
    (folder / name).write_text(text)
