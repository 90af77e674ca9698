"""Journals of ranks: the ranks of a job append lines, and the demo follows them.

A line reaches the demo as soon as it is written, even if its rank is killed in the next instant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Event", "Journal", "Watcher"]


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
