"""Journals of ranks: the ranks of a job append lines, and the demo follows them and keeps a record.

A line reaches the demo as soon as it is written, even if its rank is killed in the next instant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .text import LENGTH, SEQUENCES


@dataclass(frozen=True, slots=True)
class Event:
    """An event: its ``kind``, its time in seconds since the epoch, and its data."""

    kind: str
    rank: int
    time_s: float
    told: dict[str, Any]


class Journal:
    """Journal of one rank, in an existing ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._file = (folder / f"rank-{rank}.jsonl").open("ab", buffering=0)

    def write(self, kind: str, **told: Any) -> None:
        """Append a line with one system call, so that no reader sees half of it."""
        line = {"kind": kind, "rank": self._rank, "time_s": time.time(), "told": told}
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Watcher:
    """Reads the journals in ``folder`` as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, int] = {}

    def news(self) -> Iterator[Event]:
        """Yield the events since the last call, in order for each rank."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._seen.get(path, 0))
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._seen[path] = self._seen.get(path, 0) + len(whole)
            for line in whole.splitlines():
                yield Event(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that all ranks have committed. Times are those of the slowest rank: until
    training went on, and until the commit."""

    step: int
    nbytes: int
    captured_s: float
    durable_s: float


@dataclass
class Record:
    """Record of a job, or of several that continue each other: losses, saves, loads, failures."""

    ranks: int
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    saves: list[Saved] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    """A load report for each rank."""
    failures: list[Event] = field(default_factory=list)
    _saving: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add an event."""
        told = event.told
        if event.kind == "step" and event.rank == 0:
            self.losses[told["step"]] = told["loss"]
            self.seconds[told["step"]] = told["seconds"]
        elif event.kind == "saved":
            self._add_saved(told)
        elif event.kind == "loaded":
            self.loads.append(told)
        elif event.kind == "failed":
            self.failures.append(event)

    def _add_saved(self, told: dict[str, Any]) -> None:
        reports = self._saving.setdefault(told["step"], [])
        reports.append(told)
        if len(reports) == self.ranks:
            slowest = {name: max(r[name] for r in reports) for name in ("captured_s", "durable_s")}
            self.saves.append(Saved(told["step"], sum(r["nbytes"] for r in reports), **slowest))

    @property
    def first(self) -> int:
        """The first step that was trained."""
        return min(self.losses)

    def progress(self) -> str:
        """Return the last loss and the throughput, without the first step, which sets torch up."""
        timed = list(self.seconds.values())[1:] or list(self.seconds.values())
        rate = SEQUENCES * LENGTH * len(timed) / sum(timed)
        return f"loss {list(self.losses.values())[-1]:.3f}  {rate:,.0f} bytes of text/s"

    def loaded_nbytes(self) -> tuple[int, int]:
        """Return the bytes wanted and the bytes read by all ranks together."""
        return sum(r["bytes_wanted"] for r in self.loads), sum(r["bytes_read"] for r in self.loads)

    def difference(self, other: Record) -> float:
        """Return the greatest difference in loss over the steps that both have trained."""
        common = self.losses.keys() & other.losses.keys()
        return max(abs(self.losses[step] - other.losses[step]) for step in common)
