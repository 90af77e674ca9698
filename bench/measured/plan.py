"""What is to be measured, and whether it can be: asked before anything is written."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from ...core.units import size_text
from ...drivers.registry import open_driver
from ...drivers.uri import Uri, join, parse
from ...errors import UsageError
from ..machine import available_nbytes
from ..workloads.content import NORMAL, Content
from ..workloads.sized import Sized
from ..workloads.spec import Workload

__all__ = ["Plan", "check", "check_here", "local_folder"]

COPIES_HELD = 2.5
"""How many times a state is in memory: itself, what a phase needs beside it, and some room."""
COPIES_STORED = 5
"""How many times it is in storage at most: a checkpoint for loads, one that is being replaced and
its replacement, and an object for each of the two limits."""
SETTLE_S = 1.0
SETTLE_NBYTES = 64 << 20
"""The storage rests so long before each phase, if the state is so large."""


@dataclass(frozen=True)
class Plan:
    """``uri``: below which a folder of its own is measured in, and deleted again. ``nbytes``: about
    the size of the state. ``runs``: rounds. ``workload``: the state; None: one of that size in the
    proportions of a Llama. ``content``: its bytes."""

    uri: str
    nbytes: int
    runs: int
    workload: Workload | None = None
    content: Content = NORMAL

    @property
    def saved(self) -> Workload:
        """The state."""
        return self.workload or Sized(self.nbytes)

    @property
    def memory_nbytes(self) -> int:
        """About the host memory that is needed."""
        return int(COPIES_HELD * self.nbytes)

    @property
    def stored_nbytes(self) -> int:
        """The most that is in storage at a time, about."""
        return COPIES_STORED * self.nbytes

    @property
    def settle_s(self) -> float:
        """How long the storage rests before each phase: after a few bytes it needs no rest."""
        if self.nbytes < SETTLE_NBYTES:
            return 0.0
        return SETTLE_S

    @property
    def parsed(self) -> Uri:
        """The URI."""
        return parse(self.uri)

    def new_place(self) -> Uri:
        """A folder of its own below the URI."""
        return join(self.parsed, f"holdfast-bench-{uuid.uuid4().hex[:12]}")


def _free_nbytes(folder: str) -> int:
    return shutil.disk_usage(folder).free


def check(plan: Plan, free: Callable[[str], int] = _free_nbytes) -> None:
    """Raises UsageError where the size or the number of rounds cannot be, or there is too little
    room for it, and what the storage raises where nothing can be written. ``free``: how many bytes
    there is room for in a folder of this host."""
    check_here(plan)
    asyncio.run(_write_something(plan.parsed))
    folder = local_folder(plan.parsed)
    if folder is not None:
        _check_room(folder, plan.stored_nbytes, free(folder))


def check_here(plan: Plan) -> None:
    """What :func:`check` can find without the storage. Raises UsageError."""
    if plan.nbytes < 1 << 20:
        raise UsageError(
            f"{size_text(plan.nbytes)} are too few to measure", advice="Give 1 MiB or more."
        )
    if plan.runs < 1:
        raise UsageError(f"{plan.runs} rounds measure nothing", advice="Give --runs 5.")
    available = available_nbytes()
    if plan.memory_nbytes > available:
        raise UsageError(
            f"a state of {size_text(plan.nbytes)} needs {size_text(plan.memory_nbytes)} of host "
            f"memory, and {size_text(available)} are free",
            advice="Give a smaller --size, or fewer --layers of a model.",
        )


def local_folder(uri: Uri) -> str | None:
    """The folder that a URI names, if it is one of this host."""
    if uri.scheme in ("file", "lustre"):
        return uri.location
    return None


def _check_room(folder: str, needed: int, free: int) -> None:
    if needed > free:
        raise UsageError(
            f"{size_text(needed)} would be stored at a time in {folder}, and {size_text(free)} "
            f"are free",
            advice="Give a smaller --size.",
        )


async def _write_something(uri: Uri) -> None:
    """Put a small object, and delete it: what cannot be written is known at once."""
    driver = open_driver(uri)
    key = f"holdfast-bench-{uuid.uuid4().hex[:12]}"
    try:
        await driver.put(key, b"holdfast bench")
        await driver.delete(key)
    finally:
        await driver.close()
