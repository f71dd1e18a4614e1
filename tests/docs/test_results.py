"""The files of bench/results: each is what some page, script or test reads or names."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from bench.report.measurements import RESULTS, SUITE
from tests.docs.pages import PAGES, ROOT

_DATED = re.compile(r"20\d\d-\d\d-\d\d-[\w{}*.-]+")
_UNDATED = re.compile(r"(?<![\w-])-?([a-z][\w-]+)\.json")


def test_every_result_is_named_somewhere() -> None:
    """``{name}`` and ``*`` stand for several; a suite's measurement reads its newest result."""
    code = [
        path for folder in ("bench", "kvserve", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    text = "\n".join(path.read_text() for path in [*PAGES, *code])
    dated = {re.sub(r"{.*?}", "*", word.removesuffix(".json")) for word in _DATED.findall(text)}
    several = {word for word in dated if not re.fullmatch(r"20[\d-]+\*", word)}
    undated = {*_UNDATED.findall(text), *(measurement.name for measurement in SUITE)}
    unread = [
        path.name
        for path in sorted(RESULTS.glob("*.json"))
        if not any(path.stem.endswith(f"-{name}") for name in undated)
        and not any(fnmatch(path.stem, word) or fnmatch(path.stem, f"{word}-*") for word in several)
    ]
    assert unread == []
