"""Measures incremental saves next to whole ones and to the limit, for six ways of training.

Between two saves a part of the state changes. Each contestant saves the same state to a new folder
and removes the one before; the incremental save has that one as its base. Each result is loaded and
compared. On storage that cannot copy within itself, incremental saves are whole, and the report
says so: use a file system that clones, such as XFS.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

import holdfast

from ..errors import AccessError
from .contest import Contestant, contest
from .limit.raw_file import RawFile
from .machine import drop_caches
from .program import GIB, Options, Program
from .report import LIMIT, Report, median_ratio
from .states import State, build, digests, flat_tensors, nbytes_of

WHOLE = "whole"
INCREMENTAL = "incremental"
TABLE_ROW_NBYTES = 4096
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


def _some(tensors: list[torch.Tensor], share: float) -> Iterator[torch.Tensor]:
    """Yield tensors from the last to the first, up to this share of all bytes."""
    left = share * sum(tensor.nbytes for tensor in tensors)
    for tensor in reversed(tensors):
        if tensor.nbytes <= left:
            left -= tensor.nbytes
            yield tensor


def _of_share(state: State, share: float) -> None:
    for tensor in _some(list(flat_tensors(state).values()), share):
        tensor.add_(1)


def _every_other(state: State) -> None:
    """Change the weights and moments of every second matrix, as of the experts that got tokens."""
    for number, tensor in enumerate(flat_tensors(state).values()):
        if number % 9 < 4:
            tensor.add_(1)


def _rows(state: State) -> None:
    """Change 1 % of the rows of one half of the state, in places that vary."""
    for tensor in _some(list(flat_tensors(state).values()), 0.5):
        rows = tensor.view(-1)
        width = max(1, TABLE_ROW_NBYTES // tensor.itemsize)
        count = len(rows) // width
        for row in torch.randint(count, (max(1, count // 100),)).tolist() if count else []:
            rows[row * width : (row + 1) * width].add_(1)


WORKLOADS: dict[str, Callable[[State], None]] = {
    "LoRA": partial(_of_share, share=0.02),
    "the last layers": partial(_of_share, share=0.37),
    "experts": _every_other,
    "rows of a table": _rows,
    "nothing": lambda state: None,
    "everything": partial(_of_share, share=1.0),
}


@dataclass(eq=False)
class _Run:
    """Saves one after another, of which the newest stays."""

    folder: Path
    state: State
    incremental: bool
    step: int = 0
    written_nbytes: int = 0
    why_whole: str = ""

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
        """Compare the newest save with the state, and remove the one before."""
        if digests(holdfast.load(self.newest)) != digests(self.state):
            raise AssertionError(f"{self.newest}: what was loaded is not what was saved")
        shutil.rmtree(self.folder / str(self.step - 1), ignore_errors=True)

    def load(self) -> None:
        """Load the newest save."""
        holdfast.load(self.newest)


def _changed(state: State, change: Callable[[State], None]) -> float:
    before = digests(state)
    change(state)
    after = digests(state)
    sizes = {name: tensor.nbytes for name, tensor in flat_tensors(state).items()}
    return sum(sizes[name] for name in sizes if before[name] != after[name]) / nbytes_of(state)


def _measured(
    given: Options, folder: Path, state: State, change: Callable[[State], None]
) -> tuple[list[str], str]:
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
    return row, ours.why_whole


def _turns(state: State, change: Callable[[State], None]) -> Iterator[None]:
    while True:
        change(state)
        yield
        yield


def _report(given: Options, folder: Path) -> Report:
    rows, notes = [], set()
    for name, change in WORKLOADS.items():
        print(name, flush=True)
        inner = folder / name.replace(" ", "-")
        inner.mkdir()
        row, why = _measured(given, inner, build(given.gib), change)
        rows.append([name, *row])
        if why:
            notes.add(f"Saves were whole: {why}.")
        shutil.rmtree(inner)
    title = f"Incremental saves of {given.gib:.2g} GiB, one process, {given.runs} rounds"
    return Report(title, HEADER, rows, sorted(notes))


main = Program("incremental", __doc__, _report, gib=1.0)


if __name__ == "__main__":
    sys.exit(main())
