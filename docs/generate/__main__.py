"""``python -m docs.generate build/pages``: loads no model but the small one, opens no port."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.generate.pages import all_pages

if len(sys.argv) != 2:
    sys.exit(__doc__)
for name, text in all_pages().items():
    path = Path(sys.argv[1]) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
