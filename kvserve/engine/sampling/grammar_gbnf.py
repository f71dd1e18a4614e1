"""GBNF, llama.cpp's form of grammars, as llguidance's converter reads it.

The converter makes Lark of it. It writes a character's number without its zeros, reads classes as
Rust does, and knows no brackets in escapes; in Lark a ``.`` is no line end, and nothing is repeated
0 times; its own first rule is called ``start``.
"""

from __future__ import annotations

import re

# What nothing closes is one token up to the end, so that no text is read more than once.
_TOKENS = re.compile(
    r'#[^\n]*|"(?:[^"\\]|\\.)*"?|\[(?:[^\]\\]|\\.)*\]?|[A-Za-z][\w-]*|\{[^}]*\}?|.', re.DOTALL
)
_NEVER = re.compile(r"\{\s*0+\s*(?:,\s*0+\s*)?\}")
_BEHIND_ITEM = re.compile(r"\s|#.*|[*+?]|\{.*\}", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([\da-fA-F]{4})|U([\da-fA-F]{8})|([\[\]])|.)")
_ANY = r'( . | "\n" )'
_RESERVED, _FREE = "start", "start-"


def plain_gbnf(text: str) -> str:
    """The same grammar in what the converter reads as llama.cpp does."""
    tokens = _TOKENS.findall(text)
    free = _FREE
    while free in tokens:
        free += "-"
    made = list[str]()
    for token in tokens:
        if _NEVER.fullmatch(token):
            _drop_item(made)
        else:
            made.append(free if token == _RESERVED else token)
    return "".join(map(_plain, made))


def _drop_item(made: list[str]) -> None:
    """Put nothing in the place of the last literal, class, name or group, repeated or not."""
    depth = 0
    while made:
        token = made.pop()
        depth += (token == ")") - (token == "(")
        if depth <= 0 and not _BEHIND_ITEM.fullmatch(token):
            break
    made.append('""')


def _plain(token: str) -> str:
    if token == ".":
        return _ANY
    if token[0] == '"':
        return _ESCAPE.sub(lambda found: _character(found, '"\\'), token)
    if token[0] == "[" and token[-1] == "]":
        inside = _ESCAPE.sub(lambda found: _character(found, "[]\\^-"), token[1:-1])
        return "[" + re.sub("[&~]", lambda found: f"\\x{ord(found[0]):02x}", inside) + "]"
    return token


def _character(escape: re.Match[str], marks: str) -> str:
    """What an escape stands for, in two digits if it is a mark or has no form of its own."""
    if escape.lastindex is None:
        return escape[0]
    number = int(escape[1] or escape[2] or f"{ord(escape[3]):x}", 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        return escape[0]
    letter = chr(number)
    return f"\\x{number:02x}" if letter in marks or number < 32 else letter
