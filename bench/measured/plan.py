"""What is to be measured, and whether it can be: asked before anything is written."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ...core.units import size_text
from ...drivers.registry import driver_class, open_driver, serving
from ...drivers.uri import Uri, join, parse
from ...errors import UsageError
from ..machine import available_nbytes
from ..peers.choice import asks_for_fio, chosen
from ..prices import Prices
from ..workloads.content import NORMAL, Content
from ..workloads.mlperf import Mlperf
from ..workloads.mlperf_rules import RULES
from ..workloads.sized import Sized
from ..workloads.spec import Workload

__all__ = [
    "COPIES_HELD",
    "Plan",
    "check",
    "check_here",
    "check_memory",
    "check_room",
    "free_nbytes",
    "local_folder",
    "write_something",
]

COPIES_HELD = 2.5
"""How many times a state is in memory: itself, what a phase needs beside it, and some room."""
COPIES_STORED = 5
"""How many times it is in storage at most: a checkpoint for loads, one that is being replaced and
its replacement, one that comes and goes, and what its limit reads."""
RANKS_MAX = 256
"""Of one host."""
ANSWER_S = 5.0
"""How long the first small object may take, unless the URI says otherwise."""
SETTLE_S = 1.0
SETTLE_NBYTES = 64 << 20
"""The storage rests so long before each phase, if the state is so large."""


@dataclass(frozen=True)
class Plan:
    """``uri``: below which a folder of its own is measured in, and deleted again. ``nbytes``: about
    the size of the state, of all ranks together. ``runs``: rounds; no more are begun once
    ``limit_s`` have passed. ``workload``: the state; None: one of that size in the proportions of a
    Llama. ``content``: its bytes. ``warm_ups``: rounds before that do not count. ``compression``:
    of saves, as :func:`holdfast.save` takes it. ``peers``: whom else to measure, as
    :func:`..peers.choice.chosen` takes them. ``driver_alone``: whether to measure our driver
    without the engine, too. ``prices``: of requests."""

    uri: str
    nbytes: int
    runs: int
    workload: Workload | None = None
    content: Content = NORMAL
    warm_ups: int = 0
    limit_s: float | None = None
    compression: Literal["lz4"] | None = None
    peers: str = ""
    driver_alone: bool = False
    prices: Prices | None = None

    @property
    def saved(self) -> Workload:
        """The state."""
        return self.workload or Sized(self.nbytes)

    @property
    def memory_nbytes(self) -> int:
        """About the host memory that all ranks need together."""
        return int(COPIES_HELD * self.nbytes)

    @property
    def stored_nbytes(self) -> int:
        """About the most that is in storage at a time: our own, a file each for fio and for our
        driver alone, and a checkpoint of each peer."""
        others = len(chosen(self.peers, self.parsed)) + asks_for_fio(self.peers, self.parsed)
        return (COPIES_STORED + self.driver_alone + others) * self.nbytes

    @property
    def settle_s(self) -> float:
        """How long the storage rests before each phase: as long as MLPerf's rules want it to for
        a checkpoint of theirs; after a few bytes it needs no rest."""
        if isinstance(self.workload, Mlperf):
            return RULES.rest_s
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


def free_nbytes(folder: str) -> int:
    """How many bytes there is room for in a folder of this host, which need not exist yet."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def check(
    plan: Plan, ranks: int = 1, hosts: int = 1, free: Callable[[str], int] = free_nbytes
) -> None:
    """Raises UsageError where the size or the number of rounds cannot be, or there is too little
    room for it, or a peer cannot be measured, and what the storage raises where nothing can be
    written. ``ranks``, on so many ``hosts``, hold the state together. ``free``: how many bytes
    there is room for in a folder of this host."""
    check_here(plan, ranks, hosts)
    asyncio.run(write_something(plan.parsed))
    folder = local_folder(plan.parsed)
    if folder is not None:
        check_room(folder, plan.stored_nbytes, free(folder))


def check_here(plan: Plan, ranks: int = 1, hosts: int = 1) -> None:
    """What :func:`check` can find without the storage. Raises UsageError."""
    if plan.nbytes < 1 << 20:
        raise UsageError(
            f"{size_text(plan.nbytes)} are too few to measure", advice="Give 1 MiB or more."
        )
    if ranks > 1 and plan.peers:
        raise UsageError(
            f"peers are measured by one process, not by {ranks}", advice="Leave --peer out."
        )
    chosen(plan.peers, plan.parsed)
    asks_for_fio(plan.peers, plan.parsed)
    if plan.runs < 1:
        raise UsageError(f"{plan.runs} rounds measure nothing", advice="Give --runs 5.")
    if plan.warm_ups < 0:
        raise UsageError(f"{plan.warm_ups} rounds to warm up", advice="Give --warm-ups 1.")
    if not 1 <= ranks <= RANKS_MAX * hosts:
        raise UsageError(f"{ranks} ranks cannot measure", advice=f"Give 1 to {RANKS_MAX}.")
    check_memory(
        f"a state of {size_text(plan.nbytes)}",
        plan.memory_nbytes // hosts,
        advice="Give a smaller --size, or fewer --layers of a model.",
    )


def local_folder(uri: Uri) -> str | None:
    """The folder that a URI names, if it is one of this host."""
    if uri.scheme in ("file", "lustre"):
        return uri.location
    return None


def check_memory(what: str, needed: int, *, advice: str) -> None:
    """Raise UsageError if ``what`` needs more memory than this host has free."""
    available = available_nbytes()
    if needed > available:
        raise UsageError(
            f"{what} needs {size_text(needed)} of host memory, and {size_text(available)} are free",
            advice=advice,
        )


def check_room(folder: str, needed: int, free: int) -> None:
    """Raise UsageError if more would be stored in a folder of this host than there is room for."""
    if needed > free:
        raise UsageError(
            f"{size_text(needed)} would be stored at a time in {folder}, and {size_text(free)} "
            f"are free",
            advice="Give a smaller --size.",
        )


async def write_something(uri: Uri) -> None:
    """Put a small object, and delete it, so that a measurement of storage that takes no writes
    fails before anything is prepared.

    Nothing is tried again: a server that restarts is not to be measured. A server that does not
    answer is waited for no longer than a few seconds, unless the URI says otherwise. Drivers may
    wait for a request that was cut, so their own timeouts are short, too. Raises the storage's
    errors.
    """
    known = driver_class(serving(uri)).OPTIONS
    answer_s = f"{ANSWER_S:g}"  # to some drivers, timeouts are whole numbers
    impatient: dict[str, Any] = {"deadline": 0, "timeout": answer_s, "read_timeout": answer_s}
    driver = open_driver(
        uri,
        retries=0,
        op_timeout_s=ANSWER_S + 1,
        **{name: value for name, value in impatient.items() if name in known},
    )
    key = f"holdfast-bench-{uuid.uuid4().hex[:12]}"
    try:
        await driver.put(key, b"holdfast bench")
        await driver.delete(key)
    finally:
        await driver.close()
