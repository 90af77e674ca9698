"""Contestants that take turns, round after round: their times are comparable, because all meet the
same conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ..drivers.uri import Uri
from ..errors import HoldfastError, StorageError
from .machine import PeakMemory, flush
from .program import GIB
from .report import LIMIT, OURS, Series, median_ratio


@dataclass(frozen=True)
class Contestant:
    """A contestant. ``run`` is timed; ``before`` and ``after`` are not. ``after`` checks the result
    and raises if it is wrong."""

    name: str
    run: Callable[[], object]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


@contextmanager
def blaming(name: str, uri: Uri) -> Iterator[None]:
    """Raise a StorageError that names ``name`` for any error of another program in the block.
    Errors of Holdfast pass unchanged."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise StorageError(f"{name} failed: {reason}", uri=uri.redacted) from error


def blamed(contestant: Contestant, uri: Uri) -> Contestant:
    """Return the contestant with its errors raised by :func:`blaming`."""

    def call(step: Callable[[], object]) -> None:
        with blaming(contestant.name, uri):
            step()

    return replace(
        contestant,
        run=partial(call, contestant.run),
        before=partial(call, contestant.before),
        after=partial(call, contestant.after),
    )


def _print(line: str) -> None:
    print(f"  {line}", flush=True)


def contest(
    contestants: Sequence[Contestant],
    rounds: int,
    settle_s: float,
    say: Callable[[str], None] = _print,
    meet: Callable[[], None] = lambda: None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> list[Series]:
    """Run the contestants in turn, for ``rounds`` rounds, and return their times.

    Every other round is in reverse order, so that the after-effects of a run do not always hit the
    same contestant. Before each run the storage is flushed and rests for ``settle_s``. ``say`` is
    called for each run, ``meet`` right before it, so that ranks can wait for each other, and
    ``may_go_on`` after each round.
    """
    found = [Series(c.name) for c in contestants]
    in_order = list(zip(contestants, found, strict=True))
    for number in range(rounds):
        for contestant, series in in_order[:: -1 if number % 2 else 1]:
            contestant.before()
            flush()
            time.sleep(settle_s)
            _time(contestant, series, meet)
            contestant.after()
            say(f"round {number + 1}: {contestant.name}: {series.seconds[-1]:.3f} s")
        if not may_go_on():
            break
    return found


def _time(contestant: Contestant, series: Series, meet: Callable[[], None]) -> None:
    with PeakMemory() as memory:
        meet()
        own_s, began_s = time.process_time(), time.perf_counter()
        contestant.run()
        taken_s = time.perf_counter() - began_s
        own_stop_s = time.process_time()
    series.seconds.append(taken_s)
    series.own_processor_s.append(own_stop_s - own_s)
    series.peak_nbytes.append(memory.nbytes)


HEADER = [
    "",
    "median s",
    "min s",
    "max s",
    "GB/s",
    "of the limit",
    "holdfast is faster by",
    "extra memory",
]
"""Header of the table in :func:`rows`."""


def rows(found: Sequence[Series], nbytes: int) -> list[list[str]]:
    """Return a row for each contestant. "of the limit" and "faster by" are medians of the ratios
    within each round."""
    by_name = {series.name: series for series in found}
    limit = by_name.get(LIMIT)
    ours = by_name.get(OURS)
    return [
        [
            s.name,
            *map(_seconds, (s.median, min(s.seconds), max(s.seconds))),
            f"{nbytes / s.median / 1e9:.2f}",
            _of_the_limit(s, limit),
            _faster_by(s, ours),
            _gib(s.peak),
        ]
        for s in found
    ]


def _seconds(value_s: float) -> str:
    if value_s >= 0.1:
        return f"{value_s:.2f}"
    return f"{value_s:.4f}"


def _of_the_limit(series: Series, limit: Series | None) -> str:
    if limit is None or series is limit:
        return "–"
    return f"{median_ratio(limit.seconds, series.seconds):.0%}"


def _faster_by(series: Series, ours: Series | None) -> str:
    if ours is None or series is ours or series.name == LIMIT:
        return "–"
    return f"{median_ratio(series.seconds, ours.seconds):.1f} ×"


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "–"
    return f"{nbytes / GIB:.2f} GiB"
