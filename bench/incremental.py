"""Measures incremental saves next to whole ones and to the limit, for six ways of training.

Between two saves a part of the state changes. Each contestant saves the same state to a new folder
and removes its previous save, the base of an incremental one. Each result is loaded and compared.
The report says whether saves share files by hard links, and why saves were whole if the
storage has neither copies nor links.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import holdfast

from ..errors import AccessError
from .contest import Contestant, contest
from .limit.raw_file import RawFile
from .machine import drop_caches
from .program import GIB, Options, Program
from .report import LIMIT, Report, median_ratio
from .states import State, build, digests, flat_tensors, nbytes_of
from .workloads.changes import CHANGES, Change

WHOLE = "whole"
INCREMENTAL = "incremental"
HEADER = [
    "changes",
    "tensors changed",
    "bytes written",
    "whole s",
    "incremental s",
    "of whole",
    "of the limit",
    "extra memory",
    "load s",
    "of whole",
]


@dataclass(eq=False)
class _Run:
    """A sequence of saves. Only the newest stays."""

    folder: Path
    state: State
    incremental: bool
    step: int = 0
    written_nbytes: int = 0
    why_whole: str = ""
    linked: bool = False

    @property
    def newest(self) -> Path:
        """Return the folder of the newest save."""
        return self.folder / str(self.step)

    def save(self) -> None:
        """Save the state beside the newest save."""
        base = self.newest if self.incremental and self.step else None
        report = holdfast.save(self.folder / str(self.step + 1), self.state, base=base)
        self.step += 1
        self.written_nbytes = report.written_nbytes
        self.why_whole = report.why_whole

    def check(self) -> None:
        """Compare the newest save with the state, and remove the previous save."""
        if digests(holdfast.load(self.newest)) != digests(self.state):
            raise AssertionError(f"{self.newest}: what was loaded is not what was saved")
        self.linked |= any(path.stat().st_nlink > 1 for path in self.newest.rglob("*.safetensors"))
        shutil.rmtree(self.folder / str(self.step - 1), ignore_errors=True)

    def load(self) -> None:
        """Load the newest save."""
        holdfast.load(self.newest)


def _changed(state: State, change: Change) -> float:
    before = digests(state)
    change(list(flat_tensors(state).values()))
    after = digests(state)
    sizes = {name: tensor.nbytes for name, tensor in flat_tensors(state).items()}
    return sum(sizes[name] for name in sizes if before[name] != after[name]) / nbytes_of(state)


def _measured(
    given: Options, folder: Path, state: State, change: Change
) -> tuple[list[str], set[str]]:
    nbytes = nbytes_of(state)
    whole, ours = (_Run(folder / name, state, name == INCREMENTAL) for name in (WHOLE, INCREMENTAL))
    for run in (whole, ours):
        run.save()
    share = _changed(state, change)
    raw = RawFile(folder / "raw", nbytes, preallocate=True)

    def cold(run: _Run) -> None:
        with suppress(AccessError):
            drop_caches(run.newest)

    # Both save the same changes: the contestant that saves first in a round makes them.
    changes = iter(_turns(state, change))
    found = contest(
        [
            Contestant(LIMIT, raw.write),
            Contestant(WHOLE, whole.save, lambda: next(changes), whole.check),
            Contestant(INCREMENTAL, ours.save, lambda: next(changes), ours.check),
        ],
        given.runs,
        given.settle_s,
    )
    loads = contest(
        [
            Contestant(WHOLE, whole.load, partial(cold, whole)),
            Contestant(INCREMENTAL, ours.load, partial(cold, ours)),
        ],
        given.runs,
        given.settle_s,
    )
    limit_s, whole_s, ours_s = (series.seconds for series in found)
    row = [
        f"{share:.1%}",
        f"{ours.written_nbytes / whole.written_nbytes:.1%}",
        f"{median(whole_s):.2f}",
        f"{median(ours_s):.2f}",
        f"{median_ratio(ours_s, whole_s):.2f}",
        f"{median_ratio(limit_s, ours_s):.0%}",
        f"{(found[2].peak or 0) / GIB:.2f} GiB",
        f"{median(loads[1].seconds):.2f}",
        f"{median_ratio(loads[1].seconds, loads[0].seconds):.2f}",
    ]
    notes = {f"Saves were whole: {ours.why_whole}."} if ours.why_whole else set()
    if ours.linked:
        notes.add("Unchanged blocks stay in files of earlier saves, which are linked.")
    return row, notes


def _turns(state: State, change: Change) -> Iterator[None]:
    tensors = list(flat_tensors(state).values())
    while True:
        change(tensors)
        yield
        yield


def _report(given: Options, folder: Path) -> Report:
    rows: list[list[str]] = []
    notes: set[str] = set()
    for name, change in CHANGES.items():
        print(name, flush=True)
        inner = folder / name
        inner.mkdir()
        row, found = _measured(given, inner, build(given.gib), change)
        rows.append([name, *row])
        notes |= found
        shutil.rmtree(inner)
    title = f"Incremental saves of {given.gib:.2g} GiB, one process, {given.runs} rounds"
    return Report(title, HEADER, rows, sorted(notes))


main = Program("incremental", __doc__, _report, gib=1.0)


if __name__ == "__main__":
    sys.exit(main())
