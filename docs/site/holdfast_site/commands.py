"""The page of commands, generated from the command-line parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest.mock import patch

from holdfast.cli.app import command_parser
from holdfast.cli.manual import WIDTH

from .tables import cell, table

__all__ = ["commands_page", "subcommands"]


def commands_page() -> str:
    """Return a page with each command's help and its arguments as tables."""
    lines = ["# Commands and their options", "", "Generated from the command-line parser."]
    with patch.dict("os.environ", {"COLUMNS": str(WIDTH)}):
        for name, parser in subcommands(command_parser()).items():
            lines += _section(name, parser)
    return "\n".join(lines) + "\n"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by name; nested commands have both names."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found[name] = below
                found |= {f"{name} {inner}": one for inner, one in subcommands(below).items()}
    return found


def _section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from ("", f"## holdfast {name}", "", "```text", parser.format_help().rstrip(), "```", "")
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
        if actions:
            rows = [_row(parser, action) for action in actions]
            yield from (f"**{group.title}**", "")
            yield from table(("argument", "default", "meaning"), rows)
            yield ""


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    metavar = action.metavar or ("|".join(action.choices) if action.choices else "")
    if action.option_strings:
        name = ", ".join(action.option_strings)
        if action.nargs != 0:
            name += f" {metavar or action.dest.upper()}"
    else:
        name = str(metavar or action.dest)
    is_plain = action.default not in (None, False, [], argparse.SUPPRESS)
    default = cell(str(action.default), code=True) if is_plain else ""
    meaning = (action.help or "") % {"default": action.default, "prog": parser.prog}
    return cell(name, code=True), default, cell(meaning)
