"""``reference/absent.md``: names of vLLM and OpenAI that are refused, and what to do instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from docs.generate.markdown import table
from kvserve import absent

_INTRO = """\
# Names that are absent

Each is refused with the sentence beside it, unless its value asks for nothing (`best_of=1`,
`--no-enable-lora`). `enable_lora` is `--enable-lora` on the command line.
"""
_TABLES = {
    "Settings and flags": absent.SETTINGS,
    "Fields of requests": absent.FIELDS,
    "Methods and outputs": absent.ATTRIBUTES,
    "Names of the package": absent.EXPORTS,
}


def page() -> str:
    """A table for each kind of name."""
    return _INTRO + "".join(f"\n## {head}\n\n{_rows(names)}" for head, names in _TABLES.items())


def _rows(names: Mapping[str, str]) -> str:
    by_reason = defaultdict(list)
    for name, why in names.items():
        by_reason[why].append(f"`{name}`")
    return table(["name", "here"], [[", ".join(named), why] for why, named in by_reason.items()])
