"""Plans of measurements, checked before anything is written."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ...core.units import size_text
from ...drivers.registry import driver_class, opened_driver, serving
from ...drivers.uri import Uri, join, parse
from ...errors import UsageError
from ..machine import available_nbytes
from ..peers.choice import chosen
from ..workloads.mlperf import REST_S, Mlperf
from ..workloads.sized import sized
from ..workloads.spec import NORMAL, Content, Workload

COPIES_HELD = 2.5
"""Copies of the state in memory: the state itself, the extra memory of a phase, and a
reserve."""
COPIES_STORED = 5
"""Copies of the state in storage at most: a checkpoint to load, one being replaced and its
replacement, one that is saved and deleted, and the data that the limit reads."""
RANKS_MAX = 256
"""Limit for one host."""
ANSWER_S = 5.0
"""Time limit of the first small object, unless the URI sets one."""
SETTLE_S = 1.0
SETTLE_NBYTES = 64 << 20
"""The storage rests this long before each phase if the state has at least this size."""


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement.

    - ``uri``: the place below which a temporary folder is made
    - ``nbytes``: approximate size of the state, over all ranks
    - ``runs``: rounds; none starts once ``limit_s`` have passed
    - ``workload``: the state; None for one of ``nbytes`` in a Llama's proportions
    - ``content``: the bytes of its tensors
    - ``compression``: of saves, as in :func:`holdfast.save`
    - ``peers``: other libraries to measure, as in :func:`..peers.choice.chosen`
    - ``change``: one of :data:`..workloads.changes.CHANGES`, made before each incremental save
    - ``driver_alone``: whether to measure our driver without the engine as well
    """

    uri: str
    nbytes: int
    runs: int
    workload: Workload | None = None
    content: Content = NORMAL
    limit_s: float | None = None
    compression: Literal["lz4"] | None = None
    peers: str = ""
    driver_alone: bool = False
    change: str | None = None

    @property
    def saved(self) -> Workload:
        """The state to save."""
        return self.workload or sized(self.nbytes)

    @property
    def memory_nbytes(self) -> int:
        """Approximate host memory that all ranks need together."""
        return int(COPIES_HELD * self.nbytes)

    @property
    def stored_nbytes(self) -> int:
        """Approximate storage space needed at most: our own checkpoints, a file for
        our driver alone, and a checkpoint of each peer."""
        others = len(chosen(self.peers, self.parsed))
        return (COPIES_STORED + self.driver_alone + others) * self.nbytes

    @property
    def settle_s(self) -> float:
        """Pause before each phase, in seconds, to let the storage settle: MLPerf's value for its
        checkpoints, and 0 for small states."""
        if isinstance(self.workload, Mlperf):
            return REST_S
        if self.nbytes < SETTLE_NBYTES:
            return 0.0
        return SETTLE_S

    @property
    def parsed(self) -> Uri:
        """The parsed URI."""
        return parse(self.uri)

    def new_place(self) -> Uri:
        """Return the URI of a folder with a random name below the plan's. Creates nothing."""
        return join(self.parsed, f"holdfast-bench-{uuid.uuid4().hex[:12]}")


def free_nbytes(folder: str) -> int:
    """Return the free bytes of a local folder, which need not exist yet."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def check(
    plan: Plan, ranks: int = 1, hosts: int = 1, free: Callable[[str], int] = free_nbytes
) -> None:
    """Check a plan for ``ranks`` that hold the state together, on ``hosts``.

    Raises UsageError for an invalid size or number of rounds, for too little space or memory, and
    for a peer that cannot be measured. Raises the storage's error if it cannot be written. ``free``
    returns the free bytes of a local folder.
    """
    check_size(plan.nbytes)
    if ranks > 1 and plan.peers:
        raise UsageError(
            f"peers are measured by one process, not by {ranks}", advice="Leave --peer out."
        )
    chosen(plan.peers, plan.parsed)
    check_runs(plan.runs)
    if not 1 <= ranks <= RANKS_MAX * hosts:
        raise UsageError(f"{ranks} ranks cannot measure", advice=f"Give 1 to {RANKS_MAX}.")
    check_memory(
        f"a state of {size_text(plan.nbytes)}",
        plan.memory_nbytes // hosts,
        advice="Give a smaller --size, or fewer --layers of a model.",
    )
    check_storage(plan.parsed, plan.stored_nbytes, free)


def local_folder(uri: Uri) -> str | None:
    """Return the folder that a URI names if it is local, else None."""
    if uri.scheme in ("file", "lustre"):
        return uri.location
    return None


def check_memory(what: str, needed: int, *, advice: str) -> None:
    """Raise UsageError if ``needed`` bytes exceed the free memory of this host. ``what`` begins the
    message, ``advice`` ends it."""
    available = available_nbytes()
    if needed > available:
        raise UsageError(
            f"{what} needs {size_text(needed)} of host memory, but only {size_text(available)} are "
            "free",
            advice=advice,
        )


def check_size(nbytes: int) -> None:
    """Raise UsageError if so few bytes measure nothing."""
    if nbytes < 1 << 20:
        raise UsageError(
            f"{size_text(nbytes)} is too little to measure", advice="Give 1 MiB or more."
        )


def check_runs(runs: int) -> None:
    """Raise UsageError unless there is a round."""
    if runs < 1:
        raise UsageError(f"{runs} rounds measure nothing", advice="Give --runs 5.")


def check_storage(uri: Uri, needed: int, free: Callable[[str], int] = free_nbytes) -> None:
    """Raise UsageError if ``needed`` bytes exceed the free bytes of a local folder, which ``free``
    returns, and the storage's error if it cannot be written."""
    folder = local_folder(uri)
    if folder is not None and needed > free(folder):
        raise UsageError(
            f"{size_text(needed)} would be stored in {folder}, but only {size_text(free(folder))} "
            f"are free",
            advice="Give a smaller --size.",
        )
    asyncio.run(_write_something(uri))


async def _write_something(uri: Uri) -> None:
    """Put and delete a small object, so that a storage without write access fails before anything
    is prepared.

    Nothing is retried: a server that is restarting should not be measured. Unless the URI says
    otherwise, a server that does not answer fails after a few seconds. Drivers may wait for a
    cancelled request, so their own timeouts are shortened as well. Raises the storage's errors.
    """
    known = driver_class(serving(uri)).OPTIONS
    answer_s = f"{ANSWER_S:g}"  # some drivers take whole numbers only
    impatient: dict[str, Any] = {"deadline": 0, "timeout": answer_s, "read_timeout": answer_s}
    options = {name: value for name, value in impatient.items() if name in known}
    key = f"holdfast-bench-{uuid.uuid4().hex[:12]}"
    async with opened_driver(uri, retries=0, op_timeout_s=ANSWER_S + 1, **options) as driver:
        await driver.put(key, b"holdfast bench")
        await driver.delete(key)
