"""Arguments of the commands of ``holdfast keeper``.

Imported at every start of the command line, so it imports nothing slow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

from ..manual import MANUAL, HelpFormatter, closing_words

__all__ = ["add_commands"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_commands(
    keeper: argparse.ArgumentParser, with_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the commands of the group to ``keeper``. ``with_json`` adds the option --json to a
    parser."""
    commands = keeper.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    _run(commands)
    with_json(_status(commands))
    _stop(commands)
    with_json(_periods(commands))
    with_json(_demo(commands))


def _command(commands: Commands, name: str, summary: str, more: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary}. {more}",
        epilog=closing_words(MANUAL[f"keeper {name}"]),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def _run(commands: Commands) -> None:
    parser = _command(
        commands,
        "run",
        "be the keeper of a run on this host",
        "In the foreground, until SIGTERM, Ctrl-C or `holdfast keeper stop`, or until nobody needs "
        "it. A Checkpointer with keeper= starts one by itself.",
    )
    parser.add_argument(
        "uri", metavar="URI", help="the folder of the run, as its Checkpointer has it"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="of all images (default: what the host can spare)"
    )
    parser.add_argument(
        "--domain", metavar="NAME", help="what fails together (default: the host's name)"
    )
    parser.add_argument(
        "--linger",
        metavar="TIME",
        default="1h",
        help="end when no trainer has come for so long (default: 1h)",
    )
    parser.add_argument(
        "--local", metavar="FOLDER", help="storage of this host to write to as well, such as NVMe"
    )
    parser.add_argument(
        "--local-every",
        metavar="N",
        type=int,
        default=1,
        help="steps between two that are written there (default: 1)",
    )

    parser.add_argument(
        "--serve",
        metavar="WHERE",
        help="let what it holds be read over HTTP, by peer://: an interface or an address, and "
        "perhaps a port: eth0:7070",
    )
    parser.add_argument(
        "--certificate", metavar="FILE", default="", help="of the server, for TLS; with --key"
    )
    parser.add_argument("--key", metavar="FILE", default="", help="of the certificate")
    parser.add_argument(
        "--max-bytes-per-s", metavar="RATE", help="of what is read from other keepers, such as 1GB"
    )
    parser.add_argument(
        "--cpus", metavar="LIST", help="the processors to run on, such as 0-3,8 (default: any)"
    )


def _status(commands: Commands) -> argparse.ArgumentParser:
    parser = _command(
        commands,
        "status",
        "show what the keepers of this host hold",
        "Where there is none, that is no failure.",
    )
    parser.add_argument("uri", metavar="URI", nargs="?", help="the folder of one run")
    parser.add_argument(
        "--watch", action="store_true", help="show it again every second, until interrupted"
    )
    return parser


def _stop(commands: Commands) -> None:
    parser = _command(
        commands,
        "stop",
        "have the keepers of this host end",
        "They finish what they write to storage, and let go of what is in memory.",
    )
    parser.add_argument("uri", metavar="URI", nargs="?", help="the folder of one run")


def _periods(commands: Commands) -> argparse.ArgumentParser:
    parser = _command(
        commands,
        "periods",
        "say how often to save to each level of storage",
        "So often that saves and the work that failures undo take the least time together (Young "
        "1974, Daly 2006).",
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


def _demo(commands: Commands) -> argparse.ArgumentParser:
    parser = _command(
        commands,
        "demo",
        "have hosts break down in training, and see what each next job goes on from",
        "Four hosts, each of one rank, on this machine. It takes about two minutes.",
    )
    parser.add_argument(
        "uri", metavar="URI", nargs="?", help="where the checkpoints go, below it; else into /tmp"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="X", help="of weights (default: 0)")
    return parser
