"""Curves of the resources that a process uses over time, and a test for growth.

A leak is a curve that rises throughout the run. After a warm-up, the median of the second half is
compared with the median of the first, so that a single peak has no effect.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.bench.machine import trim_heap
from holdfast.bench.report import Target
from holdfast.storage.runtime.buffers import release_pools

__all__ = ["Curve", "Probe", "draw", "process_curves"]

WARM_UP = 0.2
"""The initial fraction of a run: pools fill and caches warm up."""
MIB = 1 << 20


@dataclass
class Curve:
    """One quantity over time.

    ``slack`` and ``slack_share`` (of the first half's median) limit its rise.
    """

    name: str
    unit: str
    slack: float
    slack_share: float = 0.0
    values: list[float] = field(default_factory=list)

    @property
    def halves(self) -> tuple[float, float]:
        """Return the medians of both halves after the warm-up; two values are required."""
        rest = self.values[min(int(len(self.values) * WARM_UP), len(self.values) - 2) :]
        middle = len(rest) // 2
        return statistics.median(rest[:middle]), statistics.median(rest[middle:])

    def target(self) -> Target:
        """Return a target that is met by a flat curve."""
        first, second = self.halves
        bound = max(self.slack, self.slack_share * first)
        return Target(f"rise of {self.name}, {self.unit}", second - first, bound, at_least=False)

    def row(self) -> list[str]:
        """Return name, medians of the halves, minimum and maximum."""
        return [
            self.name,
            *(f"{x:,.1f}" for x in (*self.halves, min(self.values), max(self.values))),
        ]


@dataclass
class Probe:
    """A sampler of curves. ``sources`` return the values, in the order of ``curves``."""

    curves: Sequence[Curve]
    sources: Sequence[Callable[[], float]]
    at_s: list[float] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Append a value to each curve.

        Garbage, freed memory that the C library retains, and pooled buffers do not count.
        """
        gc.collect()
        release_pools()
        trim_heap()
        self.at_s.append(time.monotonic() - self.began_s)
        for curve, source in zip(self.curves, self.sources, strict=True):
            curve.values.append(source())


def process_curves() -> tuple[list[Curve], list[Callable[[], float]]]:
    """Return curves and sources for memory, handles and threads of this process."""
    curves = [
        Curve("resident memory", "MiB", 32, 0.1),
        Curve("open handles", "", 3),
        Curve("threads", "", 3),
    ]
    return curves, [_resident_mib, lambda: _entries("fd"), lambda: _entries("task")]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def _entries(folder: str) -> float:
    return len(os.listdir(f"/proc/self/{folder}"))


def draw(title: str, at_s: Sequence[float], curves: Sequence[Curve], file: Path) -> None:
    """Draw one strip per curve; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, strips = plt.subplots(
        len(curves), figsize=(7, 1.3 * len(curves) + 0.6), sharex=True, layout="constrained"
    )
    for axes, curve in zip(strips, curves, strict=True):
        axes.plot([at / 60 for at in at_s], curve.values, color="tab:green", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(curve.unit)
        axes.set_title(curve.name, fontsize="small", loc="left")
    strips[-1].set_xlabel("minutes")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file)
    plt.close(figure)
