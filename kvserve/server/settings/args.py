"""The command line: its parser, and ``--policy.FIELD VALUE``.

At start only the standard library is imported: ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvserve import absent
from kvserve.fields import did_you_mean
from kvserve.flags import read_any, read_object
from kvserve.log import ConfigError

_POLICY_ARGS = "policy_args"


class UsageError(ConfigError):
    """The command line, the environment or the file has wrong settings: exit status 2."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage of all flags."""

    instead: Mapping[str, str] = {}
    """What to do instead, by flags that somebody may look for in this command."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """``parse_args`` that suggests a similar flag for an unknown one. Of commands with
        ``--policy-args`` each ``--policy.FIELD VALUE`` is a field of that mapping. Flags of vLLM
        that ask for nothing are accepted, and flags may have underscores."""
        words, policy_args = list(argv), dict[str, Any]()
        if any(action.dest == _POLICY_ARGS for action in self._actions):
            words, policy_args = _split(argv)
        words = self._asking(words)
        # Before what is missing: who writes these means another flag.
        for flag in (word.partition("=")[0] for word in words):
            if why := self.instead.get(flag.replace("_", "-")):
                raise UsageError(f"unknown flag {flag}; {why}")
        namespace, unknown = self.parse_known_args(words)
        if policy_args:
            setattr(namespace, _POLICY_ARGS, policy_args)
        if not unknown:
            return namespace
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise UsageError(f"unexpected argument {word!r}")
        known = [name for name in self._option_string_actions if name.startswith("--")]
        name, _ = _absent_name(word)
        if why := absent.why_absent(name, absent.SETTINGS):
            raise UsageError(absent.refusal(word, why))
        raise UsageError(f"unknown flag {word}{did_you_mean(word, known)}")

    def _asking(self, argv: Sequence[str]) -> list[str]:
        """The words without absent flags that ask for nothing, under the flags' own names."""
        known, words = self._option_string_actions, list(argv)
        asking: list[str] = []
        while words:
            word = words.pop(0)
            flag, equals, text = word.partition("=")
            if word == "--":
                return [*asking, word, *words]
            if flag.replace("_", "-") in known:
                asking.append(flag.replace("_", "-") + equals + text)
                continue
            name, value = _absent_name(flag)
            takes = value and not (equals or absent.is_switch(name))
            if takes and words and not words[0].startswith("-"):
                text, equals = words[0], "="
            if not absent.why_absent(name, absent.SETTINGS) or not absent.means_off(
                name, read_any(text) if equals else value
            ):
                asking.append(word)
            elif takes and equals:
                words.pop(0)
        return asking


def _absent_name(flag: str) -> tuple[str, bool]:
    """The setting that a flag would be of, and what it says of one that is on or off."""
    name = absent.FLAGS.get(flag.partition(".")[0]) or absent.FLAGS.get(flag[:2])
    if name is None:
        name = flag.removeprefix("--").replace("-", "_")
    return name.removeprefix("no_"), not name.startswith("no_")


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Words that are not about a policy's fields, and the fields of the others."""
    rest: list[str] = []
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--policy_args":
            flag = "--policy-args"
        if not flag.startswith("--policy.") and flag != "--policy-args":
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UsageError(f"{flag} needs a value")
        name = flag.removeprefix("--policy.").replace("-", "_")
        if flag != "--policy-args" and not name.isidentifier():
            raise UsageError(f"{flag}: name a field, as in --policy.window 128")
        try:
            new = read_object(value) if flag == "--policy-args" else {name: read_any(value)}
        except ValueError as exc:
            raise UsageError(f"{flag}: {exc}") from None
        add_fields(given, new, flag)
    return rest, given


def add_fields(given: dict[str, Any], new: Mapping[str, Any], where: str) -> None:
    """Add fields of a policy to those given. A ``UsageError`` begins with ``where``."""
    for key, value in new.items():
        name = str(key).replace("-", "_")
        if given.setdefault(name, value) != value:
            raise UsageError(f"{where}: {name} is given twice: {given[name]!r} and {value!r}")
