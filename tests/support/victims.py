"""Processes that save or copy, and die of SIGKILL while they do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .gang import PRELOAD

__all__ = ["copy_and_die_at", "save_against_others", "save_and_die_at", "save_until_killed", "spawned", "state_of_step"]

SYSTEM_CALLS = (
    "fsync", "ftruncate", "link", "mkdir", "open", "posix_fallocate", "pwrite", "pwritev", "rename", "replace", "rmdir", "unlink", "write",
)  # fmt: skip


def state_of_step(step: int) -> dict[str, Any]:
    """A state whose every element says which step it is of."""
    import torch

    return {
        "step": step, "x": torch.full((300_000,), step, dtype=torch.int32), "list": [torch.full((7, i), float(step)) for i in range(5)],
        "name": f"step {step}",
    }  # fmt: skip


def spawned(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A new process that runs ``target(pipe, *args)``, and our end of the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def save_until_killed(pipe: Connection, uri: str, step: int) -> None:
    """Save one step after the other; say before each that it begins, and after each that it is committed."""
    import holdfast

    while True:
        pipe.send(("begin", step))
        holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)
        pipe.send(("committed", step))
        step += 1


def save_and_die_at(pipe: Connection, uri: str, step: int, at: int) -> None:
    """Save once, and die before the ``at``-th system call that changes the file system. Say if that never came."""
    import holdfast

    count = count_calls(at)
    holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)
    pipe.send(count())


def copy_and_die_at(pipe: Connection, src: str, dst: str, at: int) -> None:
    """Copy over what is there, and die before the ``at``-th system call that changes the file system. Say if that never
    came."""
    import holdfast

    count = count_calls(at)
    holdfast.copy(src, dst, overwrite=True)
    pipe.send(count())


def count_calls(at: int) -> Callable[[], int]:
    """From now on this process dies before its ``at``-th system call that changes the file system. Returns what tells how
    many there were."""
    count, lock = 0, threading.Lock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def save_against_others(pipe: Connection, uri: str, first: int, saves: int) -> None:
    """Save again and again where others do so too; tell per save what came of it."""
    import holdfast

    for step in range(first, first + saves):
        try:
            holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)
            pipe.send((step, None))
        except Exception as error:
            pipe.send((step, error))
