"""Processes that save or copy, and die of SIGKILL before a system call that changes files."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from .rank_processes import PRELOAD


def state_of_step(step: int) -> dict[str, Any]:
    """Return a state in which every element tells its step."""
    import torch

    return {
        "step": step, "x": torch.full((300_000,), step, dtype=torch.int32), "list": [torch.full((7, i), float(step)) for i in range(5)],
        "name": f"step {step}",
    }  # fmt: skip


def spawned(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Start a process that runs ``target(pipe, *args)``; return it, and our end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def save_here(uri: str, step: int) -> None:
    """Save once, for a process that does nothing else."""
    import holdfast

    holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)


def save_and_die_at(
    pipe: Connection, uri: str, step: int, at: int, compression: Any = None
) -> None:
    """Save, and die before the ``at``-th changing call, after sending if the commit was done."""
    import holdfast

    count = count_calls(at, lambda before: pipe.send(COMMIT in before))
    holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20, compression=compression)
    pipe.send(count())


def tuned_state(step: int) -> dict[str, Any]:
    """Return a state with 4 MiB that never change, and other tensors that tell their step."""
    import torch

    return {"frozen": torch.arange(1 << 20, dtype=torch.int32), **state_of_step(step)}


def save_increment_and_die_at(pipe: Connection, run: str, at: int) -> None:
    """Save step 1 of a run, and step 2 incrementally. Die before the ``at``-th changing call of the
    second save, or after it. If ``at`` is 0, send the number of calls."""
    import holdfast

    options: Any = {"every": 1, "incremental": True, "lazy": False, "grace_s": None}
    with holdfast.Checkpointer(run, **options) as checkpointer:
        checkpointer.resume({})
        checkpointer.step(1, tuned_state(1))
        checkpointer.wait()
        count = count_calls(at)
        checkpointer.step(2, tuned_state(2))
        checkpointer.wait()
        if at:  # a save makes slightly more or fewer calls than the one that was counted
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send(count())


def copy_over(kind: str, src: str, dst: str) -> int:
    """Copy or import over an existing checkpoint; return the bytes that were not sent again."""
    import holdfast

    if kind == "import":
        return holdfast.import_(src, dst, overwrite=True, image_nbytes=64 << 10).reused_nbytes
    report = holdfast.copy(src, dst, overwrite=True)
    return report.nbytes - report.sent_nbytes


def copy_and_die_at(pipe: Connection, kind: str, src: str, dst: str, at: int) -> None:
    """Copy over a checkpoint, and die before the ``at``-th changing call, or send the count."""
    import holdfast  # noqa: F401  (imported before calls are counted)

    count = count_calls(at)
    copy_over(kind, src, dst)
    pipe.send(count())


def copy_run_and_die_at(pipe: Connection, src: str, dst: str, at: int) -> None:
    """Copy a run; die before the ``at``-th changing call, or send the count."""
    import holdfast

    count = count_calls(at)
    holdfast.copy(src, dst, recursive=True)
    pipe.send(count())


def count_calls(
    at: int, dying: Callable[[Sequence[str]], None] = lambda before: None
) -> Callable[[], int]:
    """Die before the ``at``-th call that changes the file system; return a function that counts."""
    seen: list[str] = []

    def before(number: int, label: str) -> None:
        if number == at:
            dying(seen)
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(label)

    tap = tapped(before)
    tap.__enter__()  # until this process ends

    def count() -> int:
        assert tap is not None  # keep the last reference: without it the tap would be removed
        return len(seen)

    return count


def save_with_file_limits(pipe: Connection, uri: str, step: int, limits: Sequence[int]) -> None:
    """Save once per limit of file sizes; send the step found and the error of each."""
    import holdfast

    outcomes = []
    for limit in limits:
        error = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)
        except holdfast.HoldfastError as caught:
            error = caught
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        outcomes.append((holdfast.load(uri)["step"], error))
        if error is None:
            holdfast.save(uri, state_of_step(step - 1))
    pipe.send(outcomes)


def save_against_others(pipe: Connection, uri: str, first: int, saves: int) -> None:
    """Save repeatedly while others do so too; send the outcome of each save."""
    import holdfast

    for step in range(first, first + saves):
        try:
            holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)
            pipe.send((step, None))
        except Exception as error:
            pipe.send((step, error))


SYSTEM_CALLS = (
    "copy_file_range", "fsync", "ftruncate", "link", "mkdir", "open", "posix_fallocate", "pwrite", "pwritev", "rename", "replace", "rmdir", "unlink", "write",
)  # fmt: skip

COMMIT = "rename manifest.safetensors"
"""The label of the call that makes a checkpoint visible."""


@contextlib.contextmanager
def tapped(before: Callable[[int, str], None]) -> Iterator[None]:
    """Call ``before(n, label)`` before the n-th changing call, counted from 1, by one thread at a
    time. ``label`` is the name of the call and its target: "rename manifest.safetensors". The call
    raises the errors of ``before``."""
    count, busy, lock = 0, False, threading.RLock()
    real = {name: getattr(os, name) for name in SYSTEM_CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, busy
            with lock:
                if not busy:  # otherwise ``before`` makes the call
                    count, busy = count + 1, True
                    try:
                        before(count, f"{name} {_target(name, args)}")
                    finally:
                        busy = False
            return real[name](*args, **kwargs)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _target(name: str, args: tuple[Any, ...]) -> str:
    what = args[1] if name in ("link", "rename", "replace") else args[0]
    if isinstance(what, int):
        what = os.readlink(f"/proc/self/fd/{what}")
    return os.path.basename(os.fspath(what))
