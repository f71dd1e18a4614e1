"""Server-sent events as clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class EventReader:
    """Events, cut as their bytes come: httpx's lines end at U+2028 too."""

    _rest = b""

    def cut(self, part: bytes) -> Iterator[dict[str, Any]]:
        """What the events hold that end in ``part``."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        texts = (line.removeprefix(b"data:") for line in lines if line.startswith(b"data:"))
        return (json.loads(text) for text in texts if text.lstrip().startswith(b"{"))
