"""The arguments of ``holdfast bench``.

Scope: loaded at every start of the command, so it imports nothing slow.
"""

from __future__ import annotations

import argparse

from .simulation import add_simulation_arguments
from .workload import DEFAULT_SIZE, add_workload_arguments

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every argument but ``--json``, which all commands share."""
    parser.add_argument(
        "targets",
        metavar="URI",
        nargs="+",
        help="a folder or bucket to measure in; what is written there is deleted again. Or: "
        "compare A.json B.json",
    )
    _add_workload(parser.add_argument_group("what is saved and loaded"))
    _add_course(parser.add_argument_group("how it is measured"))
    _add_beside(parser.add_argument_group("what it is held against"))
    _add_output(parser.add_argument_group("what is said"))
    add_driver_arguments(parser.add_argument_group("the driver alone"))
    add_tuning_arguments(parser.add_argument_group("tuning"))
    add_simulation_arguments(parser.add_argument_group("without measuring"))


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--size", help=f"about the size of the state (default: {DEFAULT_SIZE})")
    add_workload_arguments(group)


def _add_course(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help="rounds (default: 5; of a checkpoint of MLPerf Storage 10)",
    )
    group.add_argument(
        "--warm-ups",
        type=int,
        default=0,
        metavar="N",
        help="rounds before those, which do not count (default: %(default)s)",
    )
    group.add_argument(
        "--time-limit",
        metavar="TIME",
        help="begin no further round after so long, such as 90s or 10min; of --tune: about how "
        "long it may take (default of that: 60s)",
    )
    group.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="measure with so many processes of this host (default: 1); under torchrun or mpirun "
        "the ranks of the job measure. Of --simulate: as many as the job has (default: those of "
        "the --workload)",
    )
    group.add_argument("--compression", choices=("lz4",), help="of saves (default: none)")


def _add_beside(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--peer",
        default="",
        metavar="NAMES",
        help="save and load with these libraries, too: dcp, dcp4, torchsave, safetensors, "
        "torchsnapshot, tensorizer, runai, fastsafetensors, s3torchconnector, fio, with commas "
        "between them; or all that are installed and can do this storage: all",
    )
    group.add_argument(
        "--driver-alone",
        action="store_true",
        help="measure Holdfast's driver without its engine, too: which of the two costs",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prices",
        metavar="USD",
        help="of one request each, such as put=5e-6,get=4e-7: what requests cost is said, too",
    )
    group.add_argument(
        "--slower",
        default="5%",
        metavar="PART",
        help="of compare: so much slower may B be (default: %(default)s)",
    )
    group.add_argument("--csv", metavar="FILE", help="write a line for each round of each phase")
    group.add_argument("--html", metavar="FILE", help="write it as a page for a browser as well")


def add_driver_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that apply to a driver alone, without checkpoints."""
    group.add_argument(
        "--part-sizes",
        metavar="SIZE,…",
        help="of raw, such as 4MiB,16MiB (default: around what the driver prefers)",
    )
    group.add_argument(
        "--concurrencies",
        metavar="N,…",
        help="of raw, such as 1,8,32 (default: around what the driver prefers)",
    )
    group.add_argument(
        "--objects",
        type=int,
        default=1000,
        metavar="N",
        help="of meta (default: %(default)s)",
    )


def add_tuning_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of the search for the best options."""
    group.add_argument(
        "--tune",
        action="store_true",
        help="find the options with which saves and loads are fastest, and keep them as a profile "
        "in your configuration if they are faster than the defaults",
    )
    group.add_argument(
        "--only-show", action="store_true", help="of --tune: keep nothing, only say what was found"
    )
    group.add_argument(
        "--forget", action="store_true", help="remove the profile that --tune has kept"
    )
