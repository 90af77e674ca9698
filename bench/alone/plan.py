"""Plans for measuring a driver alone, checked before anything is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.units import round_up, size_text
from ...drivers.registry import driver_class, serving
from ...drivers.uri import Uri
from ...errors import UsageError
from ..measured.plan import (
    Plan,
    check_memory,
    check_room,
    free_nbytes,
    local_folder,
    write_something,
)
from ..traits import traits_of
from .grid import Point, grid
from .transfer import ALIGN_NBYTES

__all__ = [
    "MetaPlan",
    "RawPlan",
    "check_meta",
    "check_raw",
    "grid_of",
    "memory_nbytes",
]

_COPIES_STORED = 3
"""Stored copies at most: an object to read, an object being replaced, and its replacement."""
_LEAST_NBYTES = 1 << 20
_OBJECTS_MAX = 10_000_000


@dataclass(frozen=True)
class RawPlan(Plan):
    """Plan of ``raw``. ``nbytes`` is the size of the object. Part sizes (in bytes) and
    concurrencies default to values around the driver's preferences."""

    part_sizes: Sequence[int] | None = None
    concurrencies: Sequence[int] | None = None

    @property
    def object_nbytes(self) -> int:
        """Size of the object, a multiple of 4096."""
        return round_up(self.nbytes, ALIGN_NBYTES)


@dataclass(frozen=True)
class MetaPlan(Plan):
    """Plan of ``meta``: ``objects`` objects of ``nbytes`` each."""

    objects: int = 1000


def grid_of(plan: RawPlan) -> list[Point]:
    """Return the points of a plan. Raises UsageError for a point that the driver does not take."""
    uri = plan.parsed
    options = driver_class(serving(uri)).OPTIONS
    return grid(
        options,
        traits_of(uri),
        part_sizes=plan.part_sizes,
        concurrencies=plan.concurrencies,
        given=uri.options,
    )


def check_raw(plan: RawPlan, free: Callable[[str], int] = free_nbytes) -> list[Point]:
    """Return the points of a valid plan.

    Raises UsageError for an invalid size, number of rounds or point, and if memory or storage space
    is too small. Raises the storage's error if it cannot be written. ``free`` returns the free
    bytes of a local folder.
    """
    if plan.nbytes < _LEAST_NBYTES:
        raise UsageError(
            f"{size_text(plan.nbytes)} is too little to measure", advice="Give 1 MiB or more."
        )
    _check_runs(plan.runs)
    _check_positive("--part-sizes", plan.part_sizes)
    _check_positive("--concurrencies", plan.concurrencies)
    points = grid_of(plan)
    if plan.part_sizes is not None and max(plan.part_sizes) > plan.nbytes:
        raise UsageError(
            f"a part of {size_text(max(plan.part_sizes))} is larger than the object, of "
            f"{size_text(plan.nbytes)}",
            advice="Give a larger --size, or smaller --part-sizes.",
        )
    check_memory(
        "the parts in flight",
        memory_nbytes(plan, points),
        advice="Give smaller --part-sizes or --concurrencies.",
    )
    _check_storage(plan.parsed, _COPIES_STORED * plan.object_nbytes, free)
    return points


def memory_nbytes(plan: RawPlan, points: Sequence[Point]) -> int:
    """Return the most memory that the parts in flight of any point take."""
    most = max(point.shape(random=False).memory_nbytes for point in points)
    return min(most, plan.object_nbytes)


def check_meta(plan: MetaPlan, free: Callable[[str], int] = free_nbytes) -> None:
    """Check a plan. Raises the same errors as :func:`check_raw`."""
    _check_runs(plan.runs)
    if not 1 <= plan.objects <= _OBJECTS_MAX:
        raise UsageError(
            f"--objects {plan.objects} cannot be measured",
            advice=f"Give a number from 1 to {_OBJECTS_MAX:,}.",
        )
    # On a file system each object takes at least one block. Half of them exist twice.
    _check_storage(plan.parsed, 2 * plan.objects * round_up(plan.nbytes, ALIGN_NBYTES), free)


def _check_storage(uri: Uri, needed: int, free: Callable[[str], int]) -> None:
    folder = local_folder(uri)
    if folder is not None:
        check_room(folder, needed, free(folder))
    asyncio.run(write_something(uri))


def _check_runs(runs: int) -> None:
    if runs < 1:
        raise UsageError(f"{runs} rounds measure nothing", advice="Give --runs 5.")


def _check_positive(argument: str, values: Sequence[int] | None) -> None:
    if values is not None and (not values or min(values) < 1):
        raise UsageError(
            f"{argument} has a value below 1",
            advice=f"Give values such as {argument} 4MiB,16MiB or 1,8.",
        )
