"""``reference/cli.md``: every command with its flags, taken from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from docs.generate.markdown import table
from kvserve.server.cli.commands import COMMANDS, parser_of
from kvserve.server.settings.args import Parser
from kvserve.server.settings.reading import ENV_PREFIX

_INTRO = f"""\
# Command line

`kvserve COMMAND --help` prints what stands here. `kvserve --model M ...` is `kvserve serve
--model M ...`. Every flag of `kvserve serve` may also be an environment variable
(`--max-num-seqs`: `{ENV_PREFIX}MAX_NUM_SEQS`, `--policy.window`: `{ENV_PREFIX}POLICY_WINDOW`) or a
line of the YAML file that `--config` names ([a sample](../reference.md#command-line)).
The command line wins over the environment, the environment over the file. Sizes: `32k` is 32,000;
`32K` and `32Ki` are 32,768; `2GiB` is 2 x 1024^3.
"""


def page() -> str:
    """The page, a section for each command."""
    overview = [[f"[`kvserve {name}`](#{_anchor(name)})", c.help] for name, c in COMMANDS.items()]
    parts = [_INTRO, table(["command", "what it does"], overview)]
    return "\n".join([*parts, *map(_section, COMMANDS)])


def _anchor(name: str) -> str:
    return f"kvserve {name}".replace(" ", "-")


def _section(name: str) -> str:
    parser = parser_of(name)
    about = (parser.description or "").partition("\n\nexample")[0]
    parts = [f"## kvserve {name}\n", " ".join(about.split()).rstrip(".") + ".\n"]
    for title, rows in _groups(parser):
        if title:
            parts.append(f"### {name}: {title}\n")
        parts.append(table(["flag", "value", "meaning"], rows))
    return "\n".join(parts)


def _groups(parser: Parser) -> Iterator[tuple[str, list[list[str]]]]:
    for group in parser._action_groups:
        actions = (a for a in group._group_actions if not isinstance(a, argparse._HelpAction))
        shown = [action for action in actions if action.help != argparse.SUPPRESS]
        if shown:
            general = group.title in ("positional arguments", "options")
            yield "" if general else str(group.title), [_row(parser, action) for action in shown]


def _row(parser: Parser, action: argparse.Action) -> list[str]:
    formatter = parser._get_formatter()
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = ""
    if action.option_strings:
        value = "" if action.nargs == 0 else formatter._format_args(action, _metavar(action))
    else:
        names = f"`{_metavar(action)}`"
    meaning = formatter._expand_help(action) if action.help else ""
    return [names, f"`{value}`" if value else "", meaning]


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()
