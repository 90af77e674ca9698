"""Measures saves and cold loads through torch's distributed checkpoint (DCP): Holdfast as DCP's
storage, next to Holdfast alone and DCP with its own storage.

One process. Data that a save leaves in the page cache is synced within the measured time. Loads
start with an empty page cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import holdfast

from . import load, save
from .contest import Contestant, contest, header, rows
from .machine import describe
from .options import TINY_GIB, Options, parse, work_folder
from .peers.choice import through_dcp
from .report import Report, Series, Target, ratio
from .states import build, digests, nbytes_of

__all__: list[str] = []


def _measured(folder: Path, gib: float, options: Options) -> tuple[list[Series], int]:
    """Return the times of all saves and then all loads, and the bytes of the state."""
    folder.mkdir()
    state = build(gib)
    expected = digests(state)
    saves = [save.contestant(p, folder / "saved", state, check=False) for p in through_dcp()]
    found = contest([_fresh(c) for c in saves], options.runs, options.settle_s)
    loads = [
        load.contestant(p, folder / p.name.replace(" ", ""), state, expected) for p in through_dcp()
    ]
    loaded = contest([_fresh(c) for c in loads], options.runs, options.settle_s)
    for verb, each in (("save", found), ("load", loaded)):
        for series in each:
            series.name = f"{verb}: {series.name}"
    return found + loaded, nbytes_of(state)


def _fresh(contestant: Contestant) -> Contestant:
    """Return a contestant without the memory that earlier ones have kept: both ways to use Holdfast
    share it."""

    def before() -> None:
        contestant.before()
        holdfast.release_memory()

    return replace(contestant, before=before)


def _targets(found: Sequence[Series]) -> list[Target]:
    by_name = {series.name: series for series in found}
    return [
        Target(
            f"{verb} through DCP, as a share of the rate without",
            ratio(by_name[f"{verb}: holdfast"], by_name[f"{verb}: holdfast through DCP"]),
            0.85,
            at_least=True,
        )
        for verb in ("save", "load")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    options = parse("dcp", __doc__, argv, gib=1.5)
    with work_folder(options.folder) as folder:
        found, nbytes = _measured(folder / "small", TINY_GIB, options)  # imports everything
        judged: list[Target] = []
        if not options.tiny:
            found, nbytes = _measured(folder / "large", options.gib, options)
            judged = _targets(found)
        title = f"Through DCP: {nbytes / 1e9:.2f} GB, one process, {options.runs} rounds"
        report = Report(
            "dcp", title, describe(folder), header(), rows(found, nbytes), judged, series=found
        )
        report.emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
