"""Patterns of JSON schemas, which are ECMAScript's, in the syntax that llguidance reads: Rust's.

What only ECMAScript has (backward references, looking ahead) stays, and llguidance refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PAIR = r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
_ATOM = re.compile(
    rf"{_PAIR}|\\u\{{[\da-fA-F]+\}}|\\u[\da-fA-F]{{4}}|\\x[\da-fA-F]{{2}}|\\c[a-zA-Z]"
    r"|\\[pP]\{[^}]{0,64}\}|\\.|.",
    re.DOTALL,
)
_REPETITION = re.compile(r"\{\d+(?:,\d*)?\}")
_LINE_ENDS = r"\n\r\u2028\u2029"
_SETS = tuple(rf"\{letter}" for letter in "dDwWsSpP")
"""Escapes that stand for several characters, and so end no range."""


def rust_pattern(pattern: str) -> str:
    """The same pattern; one that no class closes is left as it is."""
    at, made = 0, []
    while at < len(pattern):
        atom = _next(pattern, at)
        if atom == "[":
            found, at = _class(pattern, at + 1)
            if not found:
                return pattern
            made.append(found)
            continue
        at += len(atom)
        if atom == ".":
            made.append(f"[^{_LINE_ENDS}]")
        elif atom == "{" and not _REPETITION.match(pattern, at - 1):
            made.append(r"\{")
        else:
            made.append(_escape(atom) if len(atom) > 1 else atom)
    return "".join(made)


def _next(pattern: str, at: int) -> str:
    found = _ATOM.match(pattern, at)
    assert found is not None
    return found[0]


def _class(pattern: str, at: int) -> tuple[str, int]:
    """The class whose bracket is before ``at``, and the place behind it; ``""`` if none closes it.

    Brackets in it, and two of ``&``, ``~`` or ``-``, are characters: Rust reads sets in them.
    """
    negated = pattern.startswith("^", at)
    atoms, end = [], at + negated
    while end < len(pattern) and pattern[end] != "]":
        atoms.append(_next(pattern, end))
        end += len(atoms[-1])
    if end >= len(pattern):
        return "", end
    if not atoms:
        return r"[\s\S]" if negated else r"[^\s\S]", end + 1
    return f"[{'^' * negated}{''.join(_members(atoms))}]", end + 1


def _members(atoms: list[str]) -> Iterator[str]:
    at = 0
    while at < len(atoms):
        ranged = len(atoms) > at + 2 and atoms[at + 1] == "-"
        ends = atoms[at : at + 3 : 2] if ranged else atoms[at : at + 1]
        if ranged and any(end.startswith(_SETS) for end in ends):
            yield f"{_member(ends[0])}\\-{_member(ends[1])}"
        else:
            yield "-".join(map(_member, ends))
        at += 3 if ranged else 1


def _member(atom: str) -> str:
    if atom == r"\b":
        return r"\x08"
    if len(atom) > 1:
        return _escape(atom)
    return "\\" + atom if atom in "[]&~-^" else atom


def _escape(atom: str) -> str:
    if re.fullmatch(_PAIR, atom):
        high, low = int(atom[2:6], 16), int(atom[8:], 16)
        return f"\\x{{{0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00:X}}}"
    if atom.startswith(r"\c") and len(atom) == 3:
        return f"\\x{ord(atom[2]) % 32:02x}"
    if atom == r"\0":
        return r"\x00"
    return atom if atom[1].isascii() and atom[1].isprintable() else atom[1:]
