"""What is to be measured, and whether it can be: asked before anything is written."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...core.units import size_text
from ...drivers.registry import open_driver
from ...drivers.uri import Uri, join, parse
from ...errors import UsageError
from ..machine import available_nbytes
from ..peers.choice import chosen

__all__ = ["Plan", "check", "local_folder"]

COPIES_HELD = 2.5
"""How many times a state is in memory: itself, what a phase needs beside it, and some room."""
COPIES_STORED = 5
"""How many times it is in storage at most: a checkpoint for loads, one that is being replaced and
its replacement, one that comes and goes, and what its limit reads."""
RANKS_MAX = 256
"""Of one host."""
SETTLE_S = 1.0
SETTLE_NBYTES = 64 << 20
"""The storage rests so long before each phase, if the state is so large."""


@dataclass(frozen=True)
class Plan:
    """``uri``: below which a folder of its own is measured in, and deleted again. ``nbytes``: about
    the size of the state, of all ranks together. ``runs``: rounds; no more are begun once
    ``limit_s`` have passed. ``warm_ups``: rounds before that do not count. ``compression``: of
    saves, as :func:`holdfast.save` takes it. ``peers``: whom else to measure, as
    :func:`..peers.choice.chosen` takes them. ``driver_alone``: whether to measure our driver
    without the engine, too."""

    uri: str
    nbytes: int
    runs: int
    warm_ups: int = 0
    limit_s: float | None = None
    compression: Literal["lz4"] | None = None
    peers: str = ""
    driver_alone: bool = False

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


def check(plan: Plan, ranks: int = 1, free: Callable[[str], int] = _free_nbytes) -> None:
    """Raises UsageError where the size or the number of rounds cannot be, or there is too little
    room for it, or a peer cannot be measured, and what the storage raises where nothing can be
    written. ``ranks``: of this host, which hold the state together. ``free``: how many bytes there
    is room for in a folder of this host."""
    if plan.nbytes < 1 << 20:
        raise UsageError(
            f"{size_text(plan.nbytes)} are too few to measure", advice="Give 1 MiB or more."
        )
    if ranks > 1 and plan.peers:
        raise UsageError(
            f"peers are measured by one process, not by {ranks}", advice="Leave --peer out."
        )
    chosen(plan.peers, plan.parsed)
    if plan.runs < 1:
        raise UsageError(f"{plan.runs} rounds measure nothing", advice="Give --runs 5.")
    if plan.warm_ups < 0:
        raise UsageError(f"{plan.warm_ups} rounds to warm up", advice="Give --warm-ups 1.")
    if not 1 <= ranks <= RANKS_MAX:
        raise UsageError(f"{ranks} ranks cannot measure", advice=f"Give 1 to {RANKS_MAX}.")
    needed = int(COPIES_HELD * plan.nbytes)
    available = available_nbytes()
    if needed > available:
        raise UsageError(
            f"a state of {size_text(plan.nbytes)} needs {size_text(needed)} of host memory, and "
            f"{size_text(available)} are free",
            advice="Give a smaller --size.",
        )
    asyncio.run(_write_something(plan.parsed))
    folder = local_folder(plan.parsed)
    if folder is not None:
        _check_room(folder, _copies_stored(plan) * plan.nbytes, free(folder))


def _copies_stored(plan: Plan) -> int:
    """Our own, what our driver alone reads, and a checkpoint of each peer, to be loaded."""
    return COPIES_STORED + plan.driver_alone + len(chosen(plan.peers, plan.parsed))


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
