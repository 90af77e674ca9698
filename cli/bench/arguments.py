"""The arguments of ``holdfast bench``.

Scope: loaded at every start of the command, so it imports nothing slow. Names of models, peers and
workloads are checked on use.
"""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["DEFAULT_HOST_RANKS", "DEFAULT_SIZE", "add_arguments"]

DEFAULT_SIZE = "1GiB"
DEFAULT_HOST_RANKS = 8

_Argument = tuple[str, str | type | None, str]
"""A name; the name of its value, ``int`` for a number, or None for a flag; and its help."""
_WORKLOAD: tuple[_Argument, ...] = (
    ("--size", "SIZE", f"approximate size of the state (default: {DEFAULT_SIZE})"),
    ("--tensors", int, "with --size: this many equal tensors"),
    (
        "--workload",
        "NAME",
        "a checkpoint of MLPerf Storage: llama3-8b, llama3-70b, llama3-405b or llama3-1t; or the "
        "driver without checkpoints: raw, one object over a grid of part size × concurrency, or "
        "meta, many small objects",
    ),
    (
        "--model",
        "NAME",
        "the real tensors of a model: llama3-8b, llama3-70b or llama3-405b",
    ),
    (
        "--optimizer",
        "KIND",
        "with --model: optimizer state: none, adam or adam+master (default: none)",
    ),
    ("--layers", int, "with --model: its first N layers only"),
    ("--index", "PATH", "the tensors of safetensors files: a folder, its index, or a file"),
    (
        "--entropy",
        "WHAT",
        "content of tensors: normal, uniform, or the random share among zeros, such as 25%% "
        "(default: %(default)s)",
    ),
)
_COURSE: tuple[_Argument, ...] = (
    ("--runs", int, "rounds (default: 5; for checkpoints of MLPerf Storage: 10)"),
    ("--warm-ups", int, "warm-up rounds, which do not count (default: %(default)s)"),
    (
        "--time-limit",
        "TIME",
        "start no new round after this time, such as 90s or 10min; with --tune: approximate total "
        "time (default: 60s)",
    ),
    (
        "--ranks",
        int,
        "number of processes on this host (default: 1); under torchrun or mpirun, the ranks of the "
        "job measure. With --simulate: ranks of the job (default: those of the --workload)",
    ),
    ("--compression", "CODEC", "compression of saves: lz4 (default: none)"),
)
_BESIDE: tuple[_Argument, ...] = (
    (
        "--peer",
        "NAMES",
        "also measure these, separated by commas: dcp, dcp4, torchsave, safetensors, "
        "torchsnapshot, tensorizer, runai, fastsafetensors, s3torchconnector, fio; all: every "
        "one that is installed and supports the storage",
    ),
    (
        "--driver-alone",
        None,
        "also measure Holdfast's driver without the engine, to tell their costs apart",
    ),
)
_OUTPUT: tuple[_Argument, ...] = (
    (
        "--prices",
        "USD",
        "prices per request, such as put=5e-6,get=4e-7, to show what requests cost",
    ),
    ("--slower", "PART", "for compare: how much slower B may be (default: %(default)s)"),
    ("--csv", "FILE", "write a CSV line for each round of each phase"),
    ("--html", "FILE", "also write the result as an HTML page"),
)
_DRIVER: tuple[_Argument, ...] = (
    (
        "--part-sizes",
        "SIZE,…",
        "for raw, such as 4MiB,16MiB (default: around the driver's preference)",
    ),
    (
        "--concurrencies",
        "N,…",
        "for raw, such as 1,8,32 (default: around the driver's preference)",
    ),
    ("--objects", int, "number of objects for meta (default: %(default)s)"),
)
_TUNING: tuple[_Argument, ...] = (
    (
        "--tune",
        None,
        "find the options with which saves and loads are fastest, and keep them as a profile in "
        "your configuration if they are faster than the defaults",
    ),
    ("--only-show", None, "with --tune: print the result, and keep no profile"),
    ("--forget", None, "remove the profile that --tune has kept"),
)
_SIMULATION: tuple[_Argument, ...] = (
    (
        "--simulate",
        None,
        "plan a save and a load of all ranks of a job in this process, without data",
    ),
    ("--ranks-per-host", int, f"for --simulate (default: {DEFAULT_HOST_RANKS})"),
    ("--rate", "RATE", "throughput of one rank, such as 2GB/s"),
    ("--host-rate", "RATE", "limit of all ranks of a host together"),
    ("--total-rate", "RATE", "limit of the storage"),
    ("--rates-from", "FILE", "take rates from a result of holdfast bench --json"),
)
_GROUPS = {
    "workload": _WORKLOAD,
    "measurement": _COURSE,
    "comparison": _BESIDE,
    "output": _OUTPUT,
    "driver alone": _DRIVER,
    "tuning": _TUNING,
    "simulation": _SIMULATION,
}
_DEFAULTS = {
    "--entropy": "normal",
    "--warm-ups": 0,
    "--peer": "",
    "--slower": "5%",
    "--objects": 1000,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every argument but ``--json``, which all commands share."""
    parser.add_argument(
        "targets",
        metavar="URI",
        nargs="+",
        help="a folder or bucket to measure in; all data written there is deleted. Or: "
        "compare A.json B.json",
    )
    for title, arguments in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, value, said in arguments:
            how: dict[str, Any] = {"help": said}
            if value is None:
                how["action"] = "store_true"
            elif value is int:
                how |= {"type": int, "metavar": "N", "default": _DEFAULTS.get(name)}
            else:
                how |= {"metavar": value, "default": _DEFAULTS.get(name)}
            if name == "--compression":
                how["choices"] = ("lz4",)
            group.add_argument(name, **how)
