"""The points at which a driver is measured: part size × concurrency, within the driver's limits.

If a driver has an option for its part size or its concurrency, it is opened with the point's value.
Otherwise a thread pool of eight would make a concurrency of 16 the same as 8.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.units import exact_size_text
from ...drivers.contract import Traits
from ...drivers.options import Option
from ...errors import UsageError
from .transfer import Shape, preferred

__all__ = ["CONCURRENCY_OPTIONS", "PART_OPTION", "Point", "grid"]

PART_OPTION = "part_size"
CONCURRENCY_OPTIONS = ("concurrency", "threads")
_PARTS = (4 << 20, 8 << 20, 64 << 20)
"""Candidates for the default part sizes: the driver's preferred size, and the first and last of
these that it takes."""


@dataclass(frozen=True)
class Point:
    """A point of the grid. ``options`` are keywords for opening the driver."""

    part_nbytes: int
    concurrency: int
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name, such as ``16MiB × 8``."""
        return f"{exact_size_text(self.part_nbytes)} × {self.concurrency}"

    def shape(self, *, random: bool) -> Shape:
        """Return the shape of a transfer at this point."""
        return Shape(self.part_nbytes, self.concurrency, random)


def grid(
    options: Mapping[str, Option],
    traits: Traits,
    *,
    part_sizes: Sequence[int] | None,
    concurrencies: Sequence[int] | None,
    given: Collection[str] = (),
) -> list[Point]:
    """Return all combinations of part sizes and concurrencies. None picks values around the
    driver's preferences.

    ``options`` are the driver's. ``given`` names the options that the URI sets, which a grid cannot
    vary. Raises UsageError for a point that the driver does not take.
    """
    part_sizes = sorted(set(part_sizes or _default_parts(options, traits, given)))
    concurrencies = sorted(set(concurrencies or _default_concurrencies(options, traits, given)))
    return [
        Point(part_nbytes, concurrency, _options(options, given, traits, part_nbytes, concurrency))
        for part_nbytes in part_sizes
        for concurrency in concurrencies
    ]


def _default_parts(
    options: Mapping[str, Option], traits: Traits, given: Collection[str]
) -> list[int]:
    best = preferred(traits).part_nbytes
    if PART_OPTION in given:
        return [best]
    option = options.get(PART_OPTION)
    taken = [
        nbytes
        for nbytes in _PARTS
        if nbytes >= traits.part_min_nbytes
        and (option is None or option.takes(exact_size_text(nbytes)))
    ]
    return [best, *taken[:1], *taken[-1:]]


def _default_concurrencies(
    options: Mapping[str, Option], traits: Traits, given: Collection[str]
) -> list[int]:
    best = traits.concurrency
    if _concurrency_option(options) in given:
        return [best]
    option = options.get(_concurrency_option(options))
    return [
        number
        for number in (1, best, 4 * best)
        if number == best or option is None or option.takes(str(number))
    ]


def _concurrency_option(options: Mapping[str, Option]) -> str:
    """Return the name of the driver's concurrency option; "" if it has none."""
    return next((name for name in CONCURRENCY_OPTIONS if name in options), "")


def _options(
    options: Mapping[str, Option],
    given: Collection[str],
    traits: Traits,
    part_nbytes: int,
    concurrency: int,
) -> dict[str, str]:
    """Return the keywords for opening the driver at a point. Raises UsageError if it would refuse
    them."""
    if part_nbytes < traits.part_min_nbytes:
        raise UsageError(
            f"--part-sizes {exact_size_text(part_nbytes)} is less than this storage takes",
            advice=f"Give {exact_size_text(traits.part_min_nbytes)} or more.",
        )
    wanted = {
        PART_OPTION: ("--part-sizes", exact_size_text(part_nbytes), traits.part_nbytes),
        _concurrency_option(options): ("--concurrencies", str(concurrency), traits.concurrency),
    }
    values = {PART_OPTION: part_nbytes, _concurrency_option(options): concurrency}
    found: dict[str, str] = {}
    for name, (argument, text, preferred_value) in wanted.items():
        if name not in options:
            continue
        if name in given:
            if values[name] != preferred_value:
                raise UsageError(
                    f"the URI sets {name}, which {argument} {text} would vary",
                    advice=f"Leave {name} out of the URI.",
                )
            continue
        _check(options[name], name, argument, text)
        found[name] = text
    return found


def _check(option: Option, name: str, argument: str, text: str) -> None:
    try:
        option.parse(text)
    except ValueError as error:
        raise UsageError(
            f"{argument} {text} is beyond this storage's limits: its option {name} {error}",
            advice="`holdfast drivers URI` shows its options.",
        ) from error
