"""Runs fresh processes, singly or as the ranks of a job. Each leaves its findings in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .options import Options, options, parser, work_folder
from .report import Report, Series

__all__ = ["each_alone", "joined", "leave_findings", "run_alone", "run_ranks"]

TIMEOUT_S = 1800


def run_alone(module: str, arguments: Sequence[str]) -> Any:
    """Run ``holdfast.bench.<module>`` in one process and return its findings. Raises RuntimeError,
    with the output, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", f"holdfast.bench.{module}", *arguments, "--findings", folder])
        return _findings(folder, 0)


def each_alone(
    module: str,
    doc: str | None,
    names: Sequence[str],
    measure: Callable[[str, Options, float], Any],
    report: Callable[[dict[str, list[Series]], Options, Path], Report],
    argv: Sequence[str] | None,
    calibrate: Callable[[Options], float] = lambda _: 0.0,
) -> int:
    """Run a contest with a fresh process for each of ``names``, and return the exit status.

    ``measure(name, options, calibrated)`` returns the series of a contestant as JSON values.
    ``--alone`` runs the first contestant only. ``calibrate`` is called once beforehand, and its
    result goes to all contestants, so that all do the same work.
    """
    arguments = parser(module, doc)
    arguments.add_argument("--calibrated", type=float, default=0.0, help="for internal use")
    arguments.add_argument("--worker", choices=sorted(names), help="for internal use")
    arguments.add_argument("--findings", help="for internal use")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    if parsed.worker:
        leave_findings(parsed.findings, measure(parsed.worker, given, parsed.calibrated))
        return 0
    with work_folder(given.folder) as folder:
        shared = [*given.arguments(folder), "--calibrated", str(calibrate(given))]
        if given.alone:
            running = names[:1]
        else:
            running = names
        found = {
            n: [Series(**s) for s in run_alone(module, [*shared, "--worker", n])] for n in running
        }
        report(found, given, folder).emit(given.json, given.svg)
    return 0


def run_ranks(module: str, world: int, arguments: Sequence[str]) -> list[Any]:
    """Run ``holdfast.bench.<module>`` on ``world`` ranks under torchrun, and return their
    findings."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        _run([*launcher, "-m", f"holdfast.bench.{module}", *arguments, "--findings", folder], world)
        return [_findings(folder, rank) for rank in range(world)]


def leave_findings(folder: str, findings: Any) -> None:
    """Hand ``findings`` to the process that started this worker."""
    Path(folder, os.environ.get("RANK", "0")).write_text(json.dumps(findings))


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the job's process group in a worker, and yield this process's rank and the number of
    ranks."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _findings(folder: str, rank: int) -> Any:
    return json.loads(Path(folder, str(rank)).read_text())


def _run(command: list[str], world: int = 1) -> None:
    threads = max(1, (os.cpu_count() or 1) // world)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a worker failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
