"""The arguments of ``holdfast bench``.

Scope: read at every start of the command, so it imports nothing that takes time.
"""

from __future__ import annotations

import argparse

from .simulation import add_simulation_arguments
from .workload import DEFAULT_SIZE, add_workload_arguments

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all but ``--json``, which all commands have."""
    parser.add_argument(
        "targets",
        metavar="URI",
        nargs="+",
        help="a folder or bucket to measure in; what is written there is deleted again. Or: "
        "compare A.json B.json",
    )
    _add_workload(parser.add_argument_group("what is saved and loaded"))
    _add_course(parser.add_argument_group("how it is measured"))
    _add_output(parser.add_argument_group("what is said"))
    add_simulation_arguments(parser.add_argument_group("without measuring"))


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--size", help=f"about the size of the state (default: {DEFAULT_SIZE})")
    add_workload_arguments(group)


def _add_course(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runs", type=int, default=5, metavar="N", help="rounds (default: %(default)s)"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slower",
        default="5%",
        metavar="PART",
        help="of compare: so much slower may B be (default: %(default)s)",
    )
    group.add_argument("--csv", metavar="FILE", help="write a line for each round of each phase")
    group.add_argument("--html", metavar="FILE", help="write it as a page for a browser as well")
