"""Makes flags from dataclass fields, and reads values: flag > environment > file > default.

A field's metadata (see ``kvserve.config.setting``) holds its help, choices and aliases; its type
says how a value is read. At start only the standard library is imported: ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from kvserve import absent
from kvserve.log import ConfigError
from kvserve.setting_values import did_you_mean, kind_of, read_size, takes_sizes

ENV_PREFIX = "KVSERVE_"
REMOVED = {
    "--gate": "each event runs when it is due; a longer --policy.period has fewer",
}
"""Flags that this server had, and what to do instead."""


class UsageError(ConfigError):
    """The command line, the environment or the file has wrong settings: exit status 2."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage of all flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """``parse_args`` that suggests a similar flag for an unknown one."""
        namespace, unknown = self.parse_known_args(argv)
        if not unknown:
            return namespace
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise UsageError(f"unexpected argument {word!r}")
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if word in REMOVED:
            raise UsageError(f"{word} was removed: {REMOVED[word]}")
        name = absent.FLAGS.get(word, word.removeprefix("--").replace("-", "_"))
        if why := absent.why_absent(name, absent.SETTINGS):
            raise UsageError(absent.refusal(word, why))
        raise UsageError(f"unknown flag {word}{did_you_mean(word, known)}")


# ---- flags ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """One setting on the command line, in the environment and in the file."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] | None
    aliases: tuple[str, ...]
    sized: bool
    synonyms: Mapping[str, str]
    numbers: bool = False
    """Whether a tuple's values are whole numbers."""

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        options: dict[str, Any] = {
            "dest": self.name,
            "default": argparse.SUPPRESS,
            "help": self._help(),
        }
        if self.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = self._metavar()
            options["type"] = self.read
            if self.kind is tuple:
                options["nargs"] = "+"
        group.add_argument(self.option, *self.aliases, **options)

    def read(self, text: str) -> Any:
        """One value from text. Raises ``argparse.ArgumentTypeError``, which says what is wrong."""
        if self.kind is tuple and text.startswith("["):
            raise argparse.ArgumentTypeError("give the values one after the other, without [ ]")
        try:
            value = self._convert(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None
        value = self.synonyms.get(value, value) if self.synonyms else value
        if self.choices is not None and value not in self.choices:
            raise argparse.ArgumentTypeError(
                f"{value!r} is not one of {', '.join(map(str, self.choices))}"
            )
        return value

    def _convert(self, text: str) -> Any:
        if self.kind is bool:
            return _read_bool(text)
        if self.kind is int or self.numbers:
            return read_size(text) if self.sized else _read_number(int, text)
        if self.kind is float:
            return _read_number(float, text)
        return _read_object(text) if self.kind is dict else text

    def read_plain(self, value: Any) -> Any:
        """A value from the environment, as text, or from YAML, which has lists and numbers too."""
        if self.kind is tuple:
            items = value.split(",") if isinstance(value, str) else value
            if not isinstance(items, list):
                raise argparse.ArgumentTypeError(f"{value!r} is not a list")
            return [self.read(str(item).strip()) for item in items]
        if self.kind is dict and isinstance(value, dict):
            return value
        if value is None or isinstance(value, list | dict):
            raise argparse.ArgumentTypeError(f"{value!r} is not a single value")
        return self.read(str(value))

    def _metavar(self) -> str:
        if self.choices is not None:
            return "{" + ",".join(map(str, self.choices)) + "}"
        return {int: "N", float: "X", dict: "JSON"}.get(self.kind, "VALUE")

    def _help(self) -> str:
        text = self.help.replace("%", "%%")
        if self.default in (None, (), {}, "") or self.default is False:
            return text
        return f"{text} (default: {'on' if self.default is True else self.default})"


def flags_of(settings: type) -> list[Flag]:
    """A flag for each field of a dataclass that has a help text."""
    hints = get_type_hints(settings)
    return [
        Flag(
            name=item.name,
            kind=kind_of(hints[item.name]),
            default=_default(item),
            help=item.metadata["help"],
            choices=item.metadata.get("choices"),
            aliases=tuple(item.metadata.get("aliases", ())),
            synonyms=item.metadata.get("synonyms", {}),
            sized=takes_sizes(item),
            numbers=hints[item.name] == tuple[int, ...],
        )
        for item in fields(settings)
        if "help" in item.metadata
    ]


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


# ---- values -----------------------------------------------------------------------------------


def _read_number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{text!r} is not {what}") from None


def _read_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is not true or false")
    return words[text.lower()]


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"{text!r} is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


# ---- --policy.FIELD VALUE ---------------------------------------------------------------------


def gather_dotted(argv: Sequence[str]) -> list[str]:
    """Turn every ``--policy.FIELD VALUE`` and ``--policy-args`` into one ``--policy-args``."""
    rest: list[str] = []
    gathered: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--policy.") and flag != "--policy-args":
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UsageError(f"{flag} needs a value")
        try:
            given = _read_object(value) if flag == "--policy-args" else _dotted(flag, value)
        except ValueError as exc:
            raise UsageError(f"{flag}: {exc}") from None
        for name, item in given.items():
            if gathered.setdefault(name, item) != item:
                raise UsageError(f"{flag}: {name} is given twice: {gathered[name]!r} and {item!r}")
    return [*rest, "--policy-args", json.dumps(gathered)] if gathered else rest


def _dotted(flag: str, text: str) -> dict[str, Any]:
    """Numbers, booleans, null and JSON are read as such; anything else is a string."""
    name = flag.removeprefix("--policy.").replace("-", "_")
    if not name.isidentifier():
        raise ValueError("name a field, as in --policy.window 128")
    try:
        return {name: json.loads(text)}
    except ValueError:
        return {name: text}


# ---- precedence -------------------------------------------------------------------------------


def resolve(flags: Iterable[Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that flags (``given``), the environment or the file set, in this precedence."""
    flags = list(flags)
    environment = _from_environment(flags)
    path = given.get("config", os.environ.get(ENV_PREFIX + "CONFIG"))
    layers = [_from_file(flags, Path(path)) if path else {}, environment, dict(given)]
    names = {flag.name for flag in flags}
    values: dict[str, Any] = {}
    for layer in layers:
        # A layer that names another policy drops the arguments of the one before.
        if layer.get("policy", values.get("policy")) != values.get("policy"):
            values.pop("policy_args", None)
        policy_args = {**values.get("policy_args", {}), **layer.get("policy_args", {})}
        values |= {name: value for name, value in layer.items() if name in names}
        if policy_args:
            values["policy_args"] = policy_args
    return values


def _from_environment(flags: Iterable[Flag]) -> dict[str, Any]:
    values = {}
    for flag in flags:
        variable = ENV_PREFIX + flag.name.upper()
        text = os.environ.get(variable)
        # Kubernetes sets KVSERVE_PORT=tcp://... for a service that is called kvserve.
        if text is None or text.startswith("tcp://"):
            continue
        try:
            values[flag.name] = flag.read_plain(text)
        except argparse.ArgumentTypeError as exc:
            raise UsageError(f"{variable}: {exc}") from None
    return values


def _from_file(flags: Iterable[Flag], path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as exc:
        raise UsageError(f"--config: cannot read {path}: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise UsageError(f"--config: {path} is not YAML: {' '.join(str(exc).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path} must hold settings, as in 'port: 8000'")
    return read_names(flags, content, f"--config: {path}")


def read_names(flags: Iterable[Flag], content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values by name, with - or _, as YAML gives them. A ``UsageError`` begins with ``where``."""
    by_name = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}

    def wrong(message: str, _: str) -> UsageError:
        return UsageError(f"{where}: {message}")

    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name == "policy" and isinstance(value, dict):
            policy = dict(value)
            values["policy"] = str(policy.pop("name", "none"))
            values["policy_args"] = {**policy, **values.get("policy_args", {})}
            continue
        if not absent.take_known({name: value}, by_name, absent.SETTINGS, wrong):
            continue
        try:
            read = by_name[name].read_plain(value)
        except argparse.ArgumentTypeError as exc:
            raise UsageError(f"{where}: {key}: {exc}") from None
        values[name] = {**values.get(name, {}), **read} if name == "policy_args" else read
    return values
