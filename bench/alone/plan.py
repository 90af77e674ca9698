"""Plans for measuring a driver alone, checked before anything is written.

``raw`` measures at points: part size × concurrency, within the driver's limits. If a driver has an
option for its part size or its concurrency, it is opened with the point's value. Otherwise a thread
pool of eight would make a concurrency of 16 the same as 8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.units import exact_size_text, round_up, size_text
from ...drivers.contract import Traits
from ...drivers.options import Option
from ...drivers.registry import driver_class, serving
from ...errors import UsageError
from ..measured.plan import Plan, check_memory, check_runs, check_size, check_storage, free_nbytes
from ..place import traits_of
from .transfer import ALIGN_NBYTES, Shape, preferred

PART_OPTION = "part_size"
CONCURRENCY_OPTIONS = ("concurrency", "threads")
_PARTS = (4 << 20, 8 << 20, 64 << 20)
"""Candidates for the default part sizes: the driver's preferred size, and the first and last of
these that it takes."""
_COPIES_STORED = 3
"""Stored copies at most: an object to read, an object being replaced, and its replacement."""


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
class Point:
    """A point of the grid. ``options`` are keywords for opening the driver."""

    shape: Shape
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name, such as ``16MiB × 8``."""
        return f"{exact_size_text(self.shape.part_nbytes)} × {self.shape.concurrency}"


def check_raw(plan: RawPlan, free: Callable[[str], int] = free_nbytes) -> list[Point]:
    """Return the points of a valid plan.

    Raises UsageError for an invalid size, number of rounds or point, and if memory or storage space
    is too small. Raises the storage's error if it cannot be written. ``free`` returns the free
    bytes of a local folder.
    """
    check_size(plan.nbytes)
    check_runs(plan.runs)
    _check_positive("--part-sizes", plan.part_sizes)
    _check_positive("--concurrencies", plan.concurrencies)
    uri = plan.parsed
    known = driver_class(serving(uri)).OPTIONS
    points = grid(known, traits_of(uri), plan.part_sizes, plan.concurrencies, given=uri.options)
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
    check_storage(uri, _COPIES_STORED * plan.object_nbytes, free)
    return points


def memory_nbytes(plan: RawPlan, points: Sequence[Point]) -> int:
    """Return the most memory that the parts in flight of any point take."""
    most = max(point.shape.memory_nbytes for point in points)
    return min(most, plan.object_nbytes)


def _check_positive(argument: str, values: Sequence[int] | None) -> None:
    if values is not None and (not values or min(values) < 1):
        raise UsageError(
            f"{argument} has a value below 1",
            advice=f"Give values such as {argument} 4MiB,16MiB or 1,8.",
        )


def grid(
    options: Mapping[str, Option],
    traits: Traits,
    part_sizes: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
    *,
    given: Collection[str] = (),
) -> list[Point]:
    """Return all combinations of part sizes and concurrencies. None picks values around the
    driver's preferences.

    ``options`` are the driver's. ``given`` names the options that the URI sets, which a grid cannot
    vary. Raises UsageError for a point that the driver does not take.
    """
    least = traits.part_min_nbytes
    best = preferred(traits)
    sizes = _Axis("--part-sizes", PART_OPTION, best.part_nbytes, exact_size_text, options, given)
    if part_sizes is None:
        taken = sizes.taken([nbytes for nbytes in _PARTS if nbytes >= least])
        part_sizes = [best.part_nbytes, *taken[:1], *taken[-1:]]
    elif min(part_sizes) < least:
        raise UsageError(
            f"--part-sizes {exact_size_text(min(part_sizes))} is less than this storage takes",
            advice=f"Give {exact_size_text(least)} or more.",
        )
    name = next((name for name in CONCURRENCY_OPTIONS if name in options), "")
    widths = _Axis("--concurrencies", name, traits.concurrency, str, options, given)
    if concurrencies is None:
        best_width = traits.concurrency
        concurrencies = [best_width, *widths.taken([1, 4 * best_width])]
    return [
        Point(Shape(nbytes, width), {**sizes.option(nbytes), **widths.option(width)})
        for nbytes in sorted(set(part_sizes))
        for width in sorted(set(concurrencies))
    ]


@dataclass(frozen=True)
class _Axis:
    """One axis of the grid: the ``argument`` that sets its values, and the driver's option for it,
    if it has one. ``best`` is the driver's preference."""

    argument: str
    name: str
    best: int
    text: Callable[[int], str]
    options: Mapping[str, Option]
    given: Collection[str]

    def taken(self, values: Sequence[int]) -> list[int]:
        """Return the values that the driver takes; none if the URI sets the option."""
        if self.name in self.given:
            return []
        option = self.options.get(self.name)
        return [value for value in values if option is None or option.takes(self.text(value))]

    def option(self, value: int) -> dict[str, str]:
        """Return the keyword for opening the driver. Raises UsageError if it would refuse the
        value."""
        if self.name not in self.options:
            return {}
        text = self.text(value)
        if self.name in self.given:
            if value != self.best:
                raise UsageError(
                    f"the URI sets {self.name}, which {self.argument} {text} would vary",
                    advice=f"Leave {self.name} out of the URI.",
                )
            return {}
        try:
            self.options[self.name].parse(text)
        except ValueError as error:
            raise UsageError(
                f"{self.argument} {text} is beyond this storage's limits: its option {self.name} "
                f"{error}",
                advice="`holdfast drivers URI` shows its options.",
            ) from error
        return {self.name: text}
