"""Contestants in turn, round after round: what each takes is comparable, for all see the same
machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .machine import PeakMemory, flush, processor_s
from .options import GIB
from .report import LIMIT, OURS, Series, ratio

__all__ = ["Contestant", "busy", "contest", "header", "rows"]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """``run`` is timed; ``before`` and ``after`` are not. ``after`` checks the result and raises if
    it is wrong."""

    name: str
    run: Callable[[], None]
    before: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing


def contest(contestants: Sequence[Contestant], rounds: int, settle_s: float) -> list[Series]:
    """Let them run in turn, ``rounds`` times. Between two runs the storage is flushed and left
    alone for a moment."""
    found = [Series(c.name) for c in contestants]
    for number in range(rounds):
        for contestant, series in zip(contestants, found, strict=True):
            contestant.before()
            flush()
            time.sleep(settle_s)
            series.peak_nbytes.append(_timed(contestant, series))
            contestant.after()
            print(
                f"  round {number + 1}: {contestant.name}: {series.seconds[-1]:.3f} s", flush=True
            )
    return found


def _timed(contestant: Contestant, series: Series) -> int:
    with PeakMemory() as memory:
        (own_s, all_s), began_s = processor_s(), time.perf_counter()
        contestant.run()
        series.seconds.append(time.perf_counter() - began_s)
        own_stop_s, all_stop_s = processor_s()
        series.own_processor_s.append(own_stop_s - own_s)
        series.all_processor_s.append(all_stop_s - all_s)
    return memory.nbytes


def busy(found: Sequence[Series], nbytes: int) -> list[str]:
    """One line per contestant: where client and servers share a machine, a slower one may only
    have more to do."""
    gib = nbytes / GIB
    count = os.cpu_count() or 1
    return [
        f"{s.name}: processor time per GiB: {median(s.own_processor_s) / gib:.2f} s its own, "
        f"{median(s.all_processor_s) / gib:.2f} s with servers and system, "
        f"which is {median(s.all_processor_s) / (count * s.median):.0%} of what {count} "
        f"processors had"
        for s in found
    ]


def header() -> list[str]:
    """Of the table that :func:`rows` makes."""
    return [
        "",
        "median s",
        "min s",
        "max s",
        "GB/s",
        "of the limit",
        "holdfast is faster by",
        "extra memory",
    ]


def rows(found: Sequence[Series], nbytes: int) -> list[list[str]]:
    """One line per contestant; "of the limit" and "faster by" are medians of the ratios within each
    round."""
    by_name = {series.name: series for series in found}
    limit = by_name.get(LIMIT)
    ours = by_name.get(OURS)
    return [
        [
            s.name,
            *(
                f"{x:.2f}" if x >= 0.1 else f"{x:.4f}"
                for x in (s.median, min(s.seconds), max(s.seconds))
            ),
            f"{nbytes / s.median / 1e9:.2f}",
            "–" if limit is None or s is limit else f"{ratio(limit, s):.0%}",
            "–" if ours is None or s is limit or s is ours else f"{ratio(s, ours):.1f} ×",
            "–" if s.peak is None else f"{s.peak / GIB:.2f} GiB",
        ]
        for s in found
    ]
