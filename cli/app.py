"""Parses command lines, and runs commands.

Commands import their modules when they run; the package docstring says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from .catalog import COMMANDS
from .commands import Argument, Command, complain, ended

WIDTH = 80
"""Greatest width of a help text, in columns: it fits any terminal."""
_COMMON = {
    2: "wrong usage, or a failure; stderr says why",
    3: "a bug in Holdfast, with a traceback",
    130: "interrupted",
    141: "the reader of the output has closed it, as head does",
}
"""Exit statuses that mean the same for all commands."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Raises SystemExit if argparse has answered
    already."""
    parser = command_parser()
    args = vars(parser.parse_args(arguments))
    command: Callable[..., int] | None = args.pop("run", None)
    if args.pop("version", False):
        return _print_version()
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    return ended(lambda: command(**args))


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The documentation is generated from it as well."""
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description=(
            "Save and load the state of a distributed training job: any layout, any "
            "storage, never torn."
        ),
        epilog="holdfast COMMAND --help shows details and examples.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = {"": parser.add_subparsers(title="commands", metavar="COMMAND")}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        added = commands[group].add_parser(
            name,
            help=command.summary,
            description=f"{command.summary}. {command.more}".strip(),
            epilog=_closing_words(command),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        if any(other.name.startswith(f"{command.name} ") for other in COMMANDS):
            commands[command.name] = added.add_subparsers(
                title="commands", metavar="COMMAND", required=True
            )
            continue
        added.set_defaults(run=partial(_call, command))
        _add_arguments(added, command.arguments)
        for title, arguments in command.groups.items():
            _add_arguments(added.add_argument_group(title), arguments)
    return parser


def _add_arguments(to: argparse._ActionsContainer, arguments: Sequence[Argument]) -> None:
    for names, how in arguments:
        to.add_argument(*names, **how)


def _call(command: Command, **arguments: Any) -> int:
    from importlib.util import find_spec

    if not all(map(find_spec, command.needs)):
        needs = command.needs
        complain(
            f"holdfast {command.name} needs {' and '.join(needs)}: pip install {' '.join(needs)}"
        )
        return 2
    module, _, function = (command.runs or f"{command.name}:run").partition(":")
    status: int = getattr(import_module(f".{module}", __package__), function)(**arguments)
    return status


def _closing_words(command: Command) -> str:
    """Return the end of a help text, in lines of at most 80 columns."""
    lines = ["examples:"]
    for example, purpose in command.examples.items():
        lines += [f"  # {purpose}", f"  {example}"]
    lines += ["", "exit status:"]
    for status, meaning in {**command.statuses, **_COMMON}.items():
        lines.append(f"  {status:<5}{meaning}")
    return "\n".join(lines)


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps at 80 columns at most, and keeps the line breaks of texts that have some."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._width = min(self._width, WIDTH - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def _print_version() -> int:
    from importlib.metadata import version

    print(f"holdfast {version('holdfast-checkpoint')}")
    return 0
