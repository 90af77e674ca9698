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
        help="a folder or bucket to measure in; all data written there is deleted. Or: "
        "compare A.json B.json",
    )
    _add_workload(parser.add_argument_group("workload"))
    _add_course(parser.add_argument_group("measurement"))
    _add_beside(parser.add_argument_group("comparison"))
    _add_output(parser.add_argument_group("output"))
    add_driver_arguments(parser.add_argument_group("driver alone"))
    add_tuning_arguments(parser.add_argument_group("tuning"))
    add_simulation_arguments(parser.add_argument_group("simulation"))


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--size", help=f"approximate size of the state (default: {DEFAULT_SIZE})")
    add_workload_arguments(group)


def _add_course(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help="rounds (default: 5; for checkpoints of MLPerf Storage: 10)",
    )
    group.add_argument(
        "--warm-ups",
        type=int,
        default=0,
        metavar="N",
        help="warm-up rounds, which do not count (default: %(default)s)",
    )
    group.add_argument(
        "--time-limit",
        metavar="TIME",
        help="start no new round after this time, such as 90s or 10min; with --tune: approximate "
        "total time (default: 60s)",
    )
    group.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of processes on this host (default: 1); under torchrun or mpirun, the ranks "
        "of the job measure. With --simulate: ranks of the job (default: those of the --workload)",
    )
    group.add_argument(
        "--compression", choices=("lz4",), help="compression of saves (default: none)"
    )


def _add_beside(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--peer",
        default="",
        metavar="NAMES",
        help="also measure these, separated by commas: dcp, dcp4, torchsave, safetensors, "
        "torchsnapshot, tensorizer, runai, fastsafetensors, s3torchconnector, fio; all: every "
        "one that is installed and supports the storage",
    )
    group.add_argument(
        "--driver-alone",
        action="store_true",
        help="also measure Holdfast's driver without the engine, to tell their costs apart",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prices",
        metavar="USD",
        help="prices per request, such as put=5e-6,get=4e-7, to show what requests cost",
    )
    group.add_argument(
        "--slower",
        default="5%",
        metavar="PART",
        help="for compare: how much slower B may be (default: %(default)s)",
    )
    group.add_argument(
        "--csv", metavar="FILE", help="write a CSV line for each round of each phase"
    )
    group.add_argument("--html", metavar="FILE", help="also write the result as an HTML page")


def add_driver_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that apply to a driver alone, without checkpoints."""
    group.add_argument(
        "--part-sizes",
        metavar="SIZE,…",
        help="for raw, such as 4MiB,16MiB (default: around the driver's preference)",
    )
    group.add_argument(
        "--concurrencies",
        metavar="N,…",
        help="for raw, such as 1,8,32 (default: around the driver's preference)",
    )
    group.add_argument(
        "--objects",
        type=int,
        default=1000,
        metavar="N",
        help="number of objects for meta (default: %(default)s)",
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
        "--only-show",
        action="store_true",
        help="with --tune: print the result, and keep no profile",
    )
    group.add_argument(
        "--forget", action="store_true", help="remove the profile that --tune has kept"
    )
