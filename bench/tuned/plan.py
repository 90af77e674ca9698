"""Plans of tuning, checked before anything is written: the options and values to try for a driver.

Options are recognised by name, so a third-party driver with an option ``part_size`` is tuned like
ours. Only options that affect speed are tried, none that change what is stored or how safe it is,
such as a block size or a number of replicas.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.units import size_text
from ...drivers.configuration.tuned import TUNABLE, tuned_file
from ...drivers.layers.stack import common_options
from ...drivers.options import Option
from ...drivers.registry import driver_class, resolved_options, serving
from ...drivers.uri import Uri
from ...errors import UsageError
from ..measured.plan import Plan, check_memory, check_size, check_storage, free_nbytes

LEAST_NBYTES = 64 << 20
"""Smallest useful state. Below this, saves measure overhead, and large parts have no chance."""
_LEAST_LIMIT_S = 1.0
_COPIES_STORED = 2
_VALUES: Mapping[str, tuple[str, ...]] = {
    "part_size": ("8MiB", "16MiB", "32MiB", "64MiB"),
    "concurrency": ("4", "8", "16", "32", "64"),
    "threads": ("2", "4", "8", "16", "32"),
    "streams": ("1", "2", "4", "8"),
    "direct": ("auto", "off"),
    "max_concurrency": ("off", "4", "2", "1"),
}
"""``max_concurrency`` can only lower a driver's concurrency, so it is tried only for drivers
without such an option of their own."""
_AT_A_TIME = ("concurrency", "threads")


@dataclass(frozen=True)
class TuningPlan(Plan):
    """Settings of tuning. ``nbytes`` is the size of the largest state, ``time_limit_s`` the
    approximate total time, and ``pairs_max`` the limit of comparisons with the defaults."""

    time_limit_s: float = 60.0
    pairs_max: int = 20

    @property
    def least_nbytes(self) -> int:
        """Size of the smallest state that is saved and loaded."""
        return min(LEAST_NBYTES, self.nbytes)


@dataclass(frozen=True)
class Space:
    """``candidates`` hold values of the same options, the defaults first. ``fixed`` maps the
    options that the user has set, and that are therefore not tried, to their sources."""

    candidates: tuple[Mapping[str, str], ...]
    fixed: Mapping[str, str]

    @property
    def default(self) -> Mapping[str, str]:
        """The values without a profile."""
        return self.candidates[0]


def check_tuning(plan: TuningPlan, free: Callable[[str], int] = free_nbytes) -> Space:
    """Return the candidates to try.

    Raises UsageError without any, for an invalid size or time, and for too little memory or
    space. Raises the storage's error if it cannot be written. ``free`` returns the free bytes of a
    local folder.
    """
    check_size(plan.nbytes)
    if plan.time_limit_s < _LEAST_LIMIT_S:
        raise UsageError(
            f"{plan.time_limit_s:g} s is too short for tuning", advice="Give --time-limit 60s."
        )
    space = _space_of(plan.parsed)
    check_memory(
        f"a state of {size_text(plan.nbytes)}",
        plan.memory_nbytes,
        advice="Give a smaller --size.",
    )
    check_storage(plan.parsed, _COPIES_STORED * plan.nbytes, free)
    return space


def _space_of(uri: Uri) -> Space:
    """Return the candidates for ``uri`` without touching the storage. Raises UsageError if there is
    nothing to tune, and as open_driver does."""
    cls = driver_class(serving(uri))
    profiles = tuned_file(os.environ)
    fixed = {
        name: found.source
        for name, found in resolved_options(uri).items()
        if found.text is not None
        and (profiles is None or not found.source.startswith(f"{profiles} ["))
    }
    space = choices(cls.OPTIONS, common_options(remote=cls.remote), fixed)
    if len(space.candidates) == 1:
        said = "; ".join(f"{source} sets {name}" for name, source in space.fixed.items())
        raise UsageError(
            f"{uri.redacted} has no option that could be tuned" + (f": {said}" if said else ""),
            advice="What you set yourself always wins over a profile.",
        )
    return space


def choices(
    own: Mapping[str, Option], common: Mapping[str, Option], fixed: Mapping[str, str]
) -> Space:
    """Return all combinations of values of the driver's ``own`` options and the ``common`` ones,
    without those in ``fixed``."""
    known = {**common, **own}
    tunable = [
        name
        for name in TUNABLE
        if name in own or (name in common and not any(other in own for other in _AT_A_TIME))
    ]
    tried = {name: _values(name, known[name]) for name in tunable if name not in fixed}
    combinations = itertools.product(*tried.values())
    return Space(
        tuple(dict(zip(tried, values, strict=True)) for values in combinations),
        {name: fixed[name] for name in tunable if name in fixed},
    )


def _values(name: str, option: Option) -> list[str]:
    """Return the default, and the other values that the option accepts."""
    default = "off" if option.default is None else option.text(option.default)
    return [default, *(text for text in _VALUES[name] if text != default and option.takes(text))]
