"""Results of the planning benchmark: as rows, targets and curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .llama import Job
from .report import Target

__all__ = ["HEADER", "MIB", "Found", "draw", "targets_of"]

TARGETS = 8960
"""Number of ranks of the job with targets."""
MIB = 1 << 20


@dataclass
class Found:
    """Result for one job. Times are seconds of one processor, per rank or on the leader."""

    job: Job
    first_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    tensors: int = 0
    shards: list[int] = field(default_factory=list)
    fragment_nbytes: list[int] = field(default_factory=list)
    again_nbytes: list[int] = field(default_factory=list)
    host_nbytes: int = 0
    """First message of a host to the leader."""
    stated_nbytes: tuple[int, int] = (0, 0)
    """Messages of a rank at the start of a save: the first time, and again."""
    lead_s: tuple[float, float] = (0.0, 0.0)
    merge_s: float = 0.0
    merge_nbytes: int = 0
    decode_s: float = 0.0
    """Decoding and checking the manifest, which one rank per host does."""
    verified_s: list[float] = field(default_factory=list)
    """Decoding the rows that a rank wants, which the other ranks do."""
    verified_nbytes: int = 0
    manifest_nbytes: int = 0
    stored: int = 0
    """Shards of all ranks."""

    @property
    def name(self) -> str:
        return f"{self.job.kind}, {self.job.world:,} ranks"

    def row(self) -> list[str]:
        stated = (f"{n / 1e3:.1f}" for n in self.stated_nbytes)
        lead = (f"{s:.2f}" for s in self.lead_s)
        if any(self.stated_nbytes):
            begun = [*stated, *lead]
        else:
            begun = ["–"] * 4
        whole = [
            f"{self.host_nbytes / 1e3:.0f}",
            f"{self.merge_s:.2f}",
            f"{self.merge_nbytes / MIB:,.0f}",
        ]
        whole += [f"{self.manifest_nbytes / 1e6:.1f}", f"{self.decode_s:.2f}"]
        whole += [
            f"{max(self.verified_s, default=0) * 1e3:.0f}",
            f"{self.verified_nbytes / MIB:.0f}",
        ]
        whole += [f"{max(self.load_s, default=0) * 1e3:.0f}"]
        if not self.manifest_nbytes:
            whole = ["–"] * len(whole)
        return [
            self.name,
            f"{self.tensors}",
            f"{max(self.shards)}",
            f"{max(self.first_s) * 1e3:.1f}",
            f"{max(self.again_s) * 1e3:.1f}",
            f"{max(self.fragment_nbytes) / 1e3:.1f}",
            f"{max(self.again_nbytes) / 1e3:.1f}",
            *begun,
            *whole,
        ]


HEADER = ["", "tensors", "shards", "first ms", "again ms", "fragment kB", "again kB"]
HEADER += [
    "begin kB",
    "again kB",
    "leader s",
    "again s",
    "host kB",
    "merge s",
    "merge MiB",
    "manifest MB",
]
HEADER += ["checking it s", "of it ms", "of it MiB", "load plan ms"]
PER_SHARD: dict[str, Callable[[Found], float]] = {
    "merge per shard": lambda f: f.merge_s,
    "a merge's memory per shard": lambda f: f.merge_nbytes,
    "a manifest per shard": lambda f: f.manifest_nbytes,
}
"""Figures that should grow no faster than the shards of all ranks."""
CURVES: dict[str, Callable[[Found], float]] = {
    "first plan of a rank, ms": lambda f: max(f.first_s) * 1e3,
    "the same plan again, ms": lambda f: max(f.again_s) * 1e3,
    "what a rank tells, first, kB": lambda f: max(f.fragment_nbytes) / 1e3,
    "what a rank tells again, kB": lambda f: max(f.again_nbytes) / 1e3,
    "merge of all, s": lambda f: f.merge_s,
    "memory of the merge, MiB": lambda f: f.merge_nbytes / MIB,
    "manifest, MB": lambda f: f.manifest_nbytes / 1e6,
    "load plan of a rank, ms": lambda f: max(f.load_s) * 1e3,
}


def targets_of(all_found: Sequence[Found]) -> list[Target]:
    """Return the targets of a job with 8,960 ranks, and the limits of growth with the number of
    ranks."""
    ours = [found for found in all_found if found.job.world == TARGETS]
    if not ours:
        figures = {}
    else:
        figures = {
            "first plan of a rank, s": (max(max(f.first_s) for f in ours), 1.0),
            "the same plan again, s": (max(max(f.again_s) for f in ours), 0.005),
            "merge, s": (max(f.merge_s for f in ours), 10.0),
            "manifest, MB": (max(f.manifest_nbytes for f in ours) / 1e6, 100.0),
            "load plan of a rank, s": (max(max(f.load_s) for f in ours), 1.0),
        }
    least = {f.job.kind: f for f in all_found if f.job.dp == min(o.job.dp for o in all_found)}
    grown = max(_per_row(f) / _per_row(least[f.job.kind]) for f in all_found)
    targets = [
        Target(f"{name}, {TARGETS:,} ranks", *figure, at_least=False)
        for name, figure in figures.items()
    ]
    most = max(f.job.world for f in all_found)
    growth = {"a first plan per tensor and shard": grown}
    growth |= {name: _growth(all_found, of) for name, of in PER_SHARD.items()}
    return targets + [
        Target(f"growth of {name}, to {most:,} ranks", n, 1.5, at_least=False)
        for name, n in growth.items()
    ]


def _growth(all_found: Sequence[Found], of: Callable[[Found], float]) -> float:
    """Return the greatest growth per shard, relative to the smallest job of the same kind."""
    merged = [f for f in all_found if f.manifest_nbytes]
    per_shard = {f.name: of(f) / f.stored for f in merged}
    least = {f.job.kind: per_shard[f.name] for f in sorted(merged, key=lambda f: -f.job.world)}
    return max((per_shard[f.name] / least[f.job.kind] for f in merged), default=0.0)


def _per_row(found: Found) -> float:
    """Return the seconds of a first plan per tensor and shard."""
    return statistics.median(found.first_s) / (found.tensors + statistics.median(found.shards))


def draw(all_found: Sequence[Found], file: Path) -> None:
    """Draw curves over the number of ranks. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    for axes, (title, of) in zip(rows.flat, CURVES.items(), strict=True):
        for kind in dict.fromkeys(f.job.kind for f in all_found):
            ours = [f for f in all_found if f.job.kind == kind and f.manifest_nbytes]
            axes.plot([f.job.world for f in ours], [of(f) for f in ours], marker="o", label=kind)
        axes.set_xscale("log")
        axes.set_xlabel("ranks")
        axes.set_title(title, fontsize="medium")
        axes.set_ylim(bottom=0)
    rows.flat[0].legend(fontsize="small")
    figure.savefig(file)
    plt.close(figure)
