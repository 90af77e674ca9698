"""Which options of a driver are tried, and with which values.

Options are known by their names: a driver of a third party that calls the size of its parts
``part_size`` is tuned like one of ours. Only options that change how fast a storage is used are
tried, none that changes what is stored or how safe it is (a block size, a number of replicas).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ...drivers.configuration.tuned import TUNABLE, tuned_file
from ...drivers.layers.stack import common_options
from ...drivers.options import Option
from ...drivers.registry import driver_class, resolved_options, serving
from ...drivers.uri import Uri
from ...errors import UsageError

__all__ = ["Space", "choices", "space_of"]

_VALUES: Mapping[str, tuple[str, ...]] = {
    "part_size": ("8MiB", "16MiB", "32MiB", "64MiB"),
    "concurrency": ("4", "8", "16", "32", "64"),
    "threads": ("2", "4", "8", "16", "32"),
    "streams": ("1", "2", "4", "8"),
    "direct": ("auto", "off"),
    "max_concurrency": ("off", "4", "2", "1"),
}
"""``max_concurrency`` can only lower what a driver does at a time, so it is tried where the driver
has no option of its own for that."""
_AT_A_TIME = ("concurrency", "threads")


@dataclass(frozen=True)
class Space:
    """``candidates``: values of the same options each, the defaults first. ``fixed``: the options
    that were not tried because the user has set them, with who says so."""

    candidates: tuple[Mapping[str, str], ...]
    fixed: Mapping[str, str]

    @property
    def default(self) -> Mapping[str, str]:
        """What applies without a profile."""
        return self.candidates[0]


def space_of(uri: Uri) -> Space:
    """What can be tried for ``uri``. The storage is not touched. Raises UsageError where that is
    nothing, and as open_driver does."""
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
    """The values of the driver's ``own`` options, and of those that are ``common`` to all schemes,
    in all combinations; but not of those in ``fixed``."""
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
    """The default first; then those that the option takes."""
    default = "off" if option.default is None else option.text(option.default)
    return [default, *(text for text in _VALUES[name] if text != default and option.takes(text))]
