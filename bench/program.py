"""The command line that all benchmark programs share, and the fresh processes that some need."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import describe
from .measured.launch import torchrun
from .report import Report, Series

GIB = 1 << 30
TINY_GIB = 1 / 64
TIMEOUT_S = 1800


class Options(argparse.Namespace):
    """Settings of a program, including those that only this program knows."""

    tiny: bool
    """Run for seconds, not minutes, with a small state and one run: checks results, not speed."""
    dir: Path
    """Folder to write to. Everything written is removed."""
    runs: int
    gib: float
    alone: bool
    """True to omit the peers."""
    json: Path | None
    task: Any
    findings: Path | None

    @property
    def settle_s(self) -> float:
        """Rest of the storage between two runs, in seconds."""
        if self.tiny:
            return 0.0
        return 1.0

    def arguments(self, folder: Path) -> list[str]:
        """Return the shared options for a worker that writes to ``folder``."""
        if self.tiny:
            size = ["--tiny"]
        else:
            size = ["--gib", str(self.gib), "--runs", str(self.runs)]
        return ["--dir", str(folder), *size, *(["--alone"] if self.alone else [])]


@dataclass(frozen=True)
class Program:
    """A benchmark program: measures by ``report``, in a folder that is removed, and prints.

    ``own`` adds the program's own options. ``work`` is called with a task of :func:`launched` in
    each of its processes, and returns the findings as JSON values.
    """

    name: str
    doc: str | None
    report: Callable[[Options, Path], Report]
    gib: float = 5.0
    runs: int = 5
    own: Callable[[argparse.ArgumentParser], object] = lambda _: None
    work: Callable[[Options, Any], Any] = lambda given, task: None

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run with the given arguments, and return 0. Raises AssertionError for a wrong result,
        RuntimeError if a worker found one."""
        given = self._parser().parse_args(argv, Options(program=self.name))
        if given.tiny:
            given.runs, given.gib = 1, TINY_GIB
        if given.findings:
            file = given.findings / os.environ.get("RANK", "0")
            file.write_text(json.dumps(self.work(given, given.task)))
            return 0
        with work_folder(given.dir) as folder:
            found = self.report(given, folder)
            found.program = self.name
            found.machine = describe(folder) | found.machine
        found.emit(given.json)
        return 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m holdfast.bench.{self.name}",
            description=(self.doc or "").partition("\n\n")[0],
        )
        add = parser.add_argument
        add("--tiny", action="store_true", help="a run of seconds that checks results, not speed")
        add("--dir", type=Path, default=Path(), help="where to write, by default here")
        add("--runs", type=int, default=self.runs, help="rounds, by default %(default)s")
        add("--gib", type=float, default=self.gib, help="size of the state, by default %(default)s")
        add("--alone", action="store_true", help="without the peers")
        add("--json", type=Path, help="also write all figures to this file")
        add("--task", type=json.loads, help=argparse.SUPPRESS)
        add("--findings", type=Path, help=argparse.SUPPRESS)
        self.own(parser)
        return parser


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """Make a new folder in ``parent``, and remove it with its contents at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=parent) as folder:
        yield Path(folder).resolve()


def launched(given: Options, folder: Path, task: Any = None, *, world: int = 1) -> list[Any]:
    """Run the program's ``work`` with ``task`` on ``world`` ranks in fresh processes that write to
    ``folder``, under torchrun if there are several. Return the findings of all ranks.

    Raises RuntimeError, with the output, if a process fails.
    """
    module = f"holdfast.bench.{given.program}"
    command = [sys.executable, "-m", module]
    if world > 1:
        command = torchrun(world, module)
    command += given.arguments(folder)
    threads = max(1, (os.cpu_count() or 1) // world)
    with tempfile.TemporaryDirectory() as findings:
        done = subprocess.run(
            [*command, "--task", json.dumps(task), "--findings", findings],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"a worker failed with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return [json.loads(Path(findings, str(rank)).read_text()) for rank in range(world)]


def each_alone(
    given: Options, folder: Path, names: Iterable[str], **task: Any
) -> dict[str, list[Series]]:
    """Run the program's ``work`` with ``task`` and each of ``names`` as ``name``, in a fresh
    process and folder. Return the series of each. ``--alone`` runs the first name only."""
    found = {}
    for name in names:
        with work_folder(folder) as inner:
            (told,) = launched(given, inner, {"name": name, **task})
        found[name] = [Series(**series) for series in told]
        if given.alone:
            break
    return found


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the job's process group in a worker, and yield this process's rank and the number of
    ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
