"""Measures exports and imports by one process in each format, next to a copy of the same
checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import get_args

import holdfast

from ..storage.operations.conversion.export import Format
from .contest import Contestant, contest
from .machine import describe, drop_caches
from .options import TINY_GIB, Options, parse, work_folder
from .report import Report, Series
from .states import build, flat_tensors

__all__: list[str] = []

_COPY = "copy"


def _contestants(folder: Path) -> list[Contestant]:
    """Return a copy and, for each format, an export and an import of the exported files."""
    source = folder / "c"
    copied = folder / "copied"
    found = [
        Contestant(
            _COPY,
            lambda: _done(holdfast.copy(source, copied)),
            lambda: drop_caches(source),
            lambda: shutil.rmtree(copied),
        )
    ]
    for form in get_args(Format):
        found += _of_format(folder, form)
    return found


def _of_format(folder: Path, form: Format) -> list[Contestant]:
    source = folder / "c"
    theirs = folder / (f"{form}.pt" if form == "torch" else form)
    back = folder / f"{form}-back"

    def empty() -> None:
        """Remove the target, because a copy replaces nothing either."""
        if theirs.is_dir():
            shutil.rmtree(theirs)
        theirs.unlink(missing_ok=True)
        drop_caches(source)

    def export() -> None:
        _done(holdfast.export(source, theirs, format=form))

    def import_() -> None:
        _done(holdfast.import_(theirs, back))

    def check() -> None:
        report = holdfast.diff(source, back)
        shutil.rmtree(back)
        if not report.equal:
            raise AssertionError(f"{form}: the imported state is not the exported one")

    return [
        Contestant(f"export {form}", export, empty),
        Contestant(f"import {form}", import_, lambda: drop_caches(folder), check),
    ]


def _done(report: object) -> None:
    """Ignore the report."""


def _rows(found: Sequence[Series], nbytes: int) -> list[list[str]]:
    copy_s = found[0].median
    return [
        [
            series.name,
            f"{nbytes / series.median / 1e9:.2f}",
            f"{copy_s / series.median:.2f}",
            f"{median(series.own_processor_s) * 1e9 / nbytes:.2f}",
        ]
        for series in found
    ]


def _measure(options: Options, folder: Path) -> Report:
    state = flat_tensors(build(options.gib))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    holdfast.save(folder / "c", state)
    found = contest(_contestants(folder), options.runs, options.settle_s)
    return Report(
        "convert",
        (
            f"Exports and imports: {nbytes / 1e9:.2f} GB in {len(state)} tensors, one process, "
            f"{options.runs} rounds"
        ),
        describe(folder),
        ["", "GB/s", "of a copy's", "CPU s/GB"],
        _rows(found, nbytes),
        series=found,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    options = parse("convert", __doc__, argv, gib=1.0, runs=3)
    with work_folder(options.folder) as folder:
        holdfast.save(folder / "warm", flat_tensors(build(TINY_GIB)))
        shutil.rmtree(folder / "warm")
        _measure(options, folder).emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
