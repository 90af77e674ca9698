"""Arguments of the commands of ``holdfast keeper``.

Imported at every start of the command line, so it imports nothing slow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..commands import Parsers, add_command

__all__ = ["add_commands"]


def add_commands(
    keeper: argparse.ArgumentParser, with_json: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the commands of the group to ``keeper``. ``with_json`` adds the option --json to a
    parser."""
    commands = keeper.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _run(commands)
    with_json(_status(commands))
    _stop(commands)
    with_json(_periods(commands))
    with_json(_demo(commands))


def _run(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "keeper run",
        "run the keeper of a run on this host",
        "Runs in the foreground until SIGTERM, Ctrl-C or `holdfast keeper stop`, or until it has "
        "been idle for --linger. A Checkpointer with keeper= starts one on its own.",
        runs="keeper.processes:run",
    )
    parser.add_argument(
        "uri", metavar="URI", help="folder of the run, as given to its Checkpointer"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="limit of all images (default: what the host can spare)"
    )
    parser.add_argument(
        "--domain", metavar="NAME", help="failure domain (default: the host's name)"
    )
    parser.add_argument(
        "--linger",
        metavar="TIME",
        default="1h",
        help="exit after this time without a trainer (default: 1h)",
    )
    parser.add_argument(
        "--local",
        metavar="FOLDER",
        help="folder on storage of this host, such as NVMe, to write to as well",
    )
    parser.add_argument(
        "--local-every",
        metavar="N",
        type=int,
        default=1,
        help="write there every N steps (default: 1)",
    )

    parser.add_argument(
        "--serve",
        metavar="WHERE",
        help="serve the memory over HTTP, for peer://, at an interface or address, with an "
        "optional port: eth0:7070",
    )
    parser.add_argument(
        "--certificate",
        metavar="FILE",
        default="",
        help="certificate of the server, for TLS; with --key",
    )
    parser.add_argument("--key", metavar="FILE", default="", help="private key of the certificate")
    parser.add_argument(
        "--max-bytes-per-s", metavar="RATE", help="limit of reads from other keepers, such as 1GB"
    )
    parser.add_argument(
        "--cpus", metavar="LIST", help="CPUs to run on, such as 0-3,8 (default: any)"
    )


def _status(commands: Parsers) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "keeper status",
        "show what the keepers of this host hold",
        "Succeeds even if there is none.",
        runs="keeper.processes:status",
    )
    parser.add_argument("uri", metavar="URI", nargs="?", help="the folder of one run")
    parser.add_argument(
        "--watch", action="store_true", help="refresh every second, until interrupted"
    )
    return parser


def _stop(commands: Parsers) -> None:
    parser = add_command(
        commands,
        "keeper stop",
        "stop the keepers of this host",
        "They finish writing to storage, and release their memory.",
        runs="keeper.processes:stop",
    )
    parser.add_argument("uri", metavar="URI", nargs="?", help="the folder of one run")


def _periods(commands: Parsers) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "keeper periods",
        "print how often to save to each level of storage",
        "Minimizes the total time of saves and of the work that failures undo (Young 1974, Daly "
        "2006).",
        runs="keeper.periods:periods",
    )
    parser.add_argument(
        "--step", metavar="TIME", required=True, help="duration of a training step: 800ms, 2s"
    )
    parser.add_argument(
        "--cost",
        action="append",
        required=True,
        metavar="LEVEL=TIME",
        help="training time that one save to this level takes: memory=20ms; once for each level, "
        "from the fastest to the slowest",
    )
    parser.add_argument(
        "--rate",
        action="append",
        required=True,
        metavar="LEVEL=N/TIME",
        help="rate of the failures that this level is the fastest to survive: memory=1/2h",
    )
    return parser


def _demo(commands: Parsers) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "keeper demo",
        "let hosts fail in training, and see what each next job resumes from",
        "Runs four hosts of one rank each on this machine. Takes about two minutes.",
        runs="demo.keepers:main",
        needs=("aiohttp", "rich"),
    )
    parser.add_argument(
        "uri", metavar="URI", nargs="?", help="folder to save below (default: a folder in /tmp)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="X", help="seed of the weights (default: 0)"
    )
    return parser
