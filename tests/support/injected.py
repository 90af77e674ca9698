"""A process whose system calls the kernel fails, shortens, or answers with a kill: ``strace``
attached to it, injecting."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from .disks import needed
from .victims import spawned, state_of_step

__all__ = ["Outcome", "injected"]

WAIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Result of a process: its ``value`` or its ``error``, or neither if it was ``killed``."""

    value: Any
    error: BaseException | None
    killed: bool
    hits: int
    """Number of system calls tampered with."""


def injected(
    work: Callable[..., Any], *args: Any, inject: str, path: Path | None = None
) -> Outcome:
    """Let a process do ``work(*args)``, which can be imported, while ``strace -e inject=`` does
    that; only to calls that concern ``path``, if it is given. Skips the test where processes cannot
    be traced."""
    needed("strace")
    process, pipe = spawned(_obey, work, args)
    with tempfile.NamedTemporaryFile("r") as log:
        only = [] if path is None else ["-P", str(path)]
        calls = inject.partition(":")[0]
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            log.name,
            "-e",
            f"trace={calls}",
            "-e",
            f"inject={inject}",
            *only,
        ]
        assert pipe.poll(WAIT_S)
        assert pipe.recv() == "ready"
        tracer = subprocess.Popen(
            [*command, "-p", str(process.pid)], stderr=subprocess.PIPE, text=True
        )
        try:
            _until_traced(process.pid, tracer)
            pipe.send("go")
            value, error, killed = _answer(pipe)
            process.join(WAIT_S)
            killed |= process.exitcode == -9
        finally:
            process.kill()
            process.join(WAIT_S)
            tracer.wait(WAIT_S)
            assert tracer.stderr is not None
            tracer.stderr.close()
        hits = sum("(INJECTED)" in line or "(DELAYED)" in line for line in log)
    return Outcome(value, error, killed, hits)


def _until_traced(pid: int, tracer: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not all(_is_traced(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            pytest.skip(f"cannot trace a process here: {tracer.stderr.read().strip()}")
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def _is_traced(task: Path) -> bool:
    return "TracerPid:\t0\n" not in (task / "status").read_text()


def _answer(pipe: Connection) -> tuple[Any, BaseException | None, bool]:
    try:
        assert pipe.poll(WAIT_S), "the process hangs"
        value, error = pipe.recv()
    except EOFError:
        return None, None, True
    return value, error, False


def _obey(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Warm up, wait, do the work and report the result, in the child process.

    After the warm-up, the work makes no system calls but its own.
    """
    import holdfast

    with tempfile.TemporaryDirectory() as folder:
        holdfast.save(folder, state_of_step(0))
        holdfast.load(folder)
    pipe.send("ready")
    pipe.recv()
    try:
        pipe.send((work(*args), None))
    except Exception as error:
        pipe.send((None, error))
    os._exit(0)  # no injected fault may hit the interpreter's exit
