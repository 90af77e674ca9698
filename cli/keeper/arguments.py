"""What ``holdfast keeper`` takes."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, and its options."""
    parser.add_argument(
        "action",
        choices=("run", "status", "stop"),
        help="run: be the keeper of a run; status: what keepers do; stop: have them end",
    )
    parser.add_argument(
        "uri",
        metavar="URI",
        nargs="?",
        help="the folder of the run; status and stop are about all runs without it",
    )
    running = parser.add_argument_group("run")
    running.add_argument(
        "--memory", metavar="SIZE", help="of all images (default: what the host can spare)"
    )
    running.add_argument(
        "--domain", metavar="NAME", help="what fails together (default: the host's name)"
    )
    running.add_argument(
        "--linger",
        metavar="TIME",
        default="1h",
        help="end when no trainer has come for so long (default: 1h)",
    )
    running.add_argument(
        "--local", metavar="FOLDER", help="storage of this host to write to as well, such as NVMe"
    )
    running.add_argument(
        "--local-every",
        metavar="N",
        type=int,
        default=1,
        help="steps between two that are written there (default: 1)",
    )
    status = parser.add_argument_group("status")
    status.add_argument(
        "--watch", action="store_true", help="show it again every second, until interrupted"
    )
