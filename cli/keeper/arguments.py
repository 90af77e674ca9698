"""What each command of ``holdfast keeper`` takes.

Scope: read at every start of the command line, so it imports nothing that takes time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..manual import HelpFormatter

__all__ = ["add_commands"]


def add_commands(
    keeper: argparse.ArgumentParser, with_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the commands of the group to ``keeper``; ``with_json`` adds the option --json to one."""
    commands = keeper.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    with_json(_periods(commands))


def _periods(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "periods",
        help="say how often to save to each level of storage",
        description=(
            "Say how often to save to each level of storage: so often that saves and the work that "
            "failures undo take the least time together (Young 1974, Daly 2006)."
        ),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--step", metavar="TIME", required=True, help="how long a training step takes: 800ms, 2s"
    )
    parser.add_argument(
        "--cost",
        action="append",
        required=True,
        metavar="LEVEL=TIME",
        help="the training time that one save to this level takes: memory=20ms; once for each "
        "level, from the fastest to the slowest",
    )
    parser.add_argument(
        "--rate",
        action="append",
        required=True,
        metavar="LEVEL=N/TIME",
        help="of the failures that this level is the fastest to survive: memory=1/2h",
    )
    return parser
