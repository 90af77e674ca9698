"""Measures the costs and savings of lz4: durable saves and cold loads by one process, plain and
compressed.

One state looks trained to lz4. Another one compresses well: half of it is moments that are still
zero, and masks.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import holdfast

from .contest import Contestant, contest
from .machine import describe, drop_caches
from .options import TINY_GIB, Options, parse, work_folder
from .report import Report, Series
from .states import State, build, digests, flat_tensors, nbytes_of, zero

__all__: list[str] = []

WAYS: tuple[Literal["lz4"] | None, ...] = (None, "lz4")


def _shrinking(gib: float) -> State:
    """Return a state of the same size, with zero moments, and a mask for each weight instead of its
    bf16 copy."""
    state = build(gib)
    for moments in state["optim"].values():
        moments["exp_avg"].zero_()
        moments["exp_avg_sq"].zero_()
    masks = {name: (weight.abs() > 1.5).to(torch.int16) for name, weight in state["model"].items()}
    return state | {"model": masks}


def _contestants(folder: Path, kind: str, state: State, stored: dict[str, int]) -> list[Contestant]:
    expected = digests(state)
    found = list[Contestant]()
    for way in WAYS:
        path = folder / str(way)
        name = f"{kind}, {way or 'plain'}"

        def save(path: Path = path, way: Any = way, name: str = name) -> None:
            stored[name] = holdfast.save(path, state, compression=way).stored_nbytes

        def before(path: Path = path) -> None:
            zero(state)
            drop_caches(path)

        def check(name: str = name) -> None:
            if digests(state) != expected:
                raise AssertionError(f"{name}: what was loaded is not what was saved")

        def load(path: Path = path) -> None:
            holdfast.load(path, state)

        found.append(Contestant(f"{name}: save", save))
        found.append(Contestant(f"{name}: load", load, before, check))
    return found


def _rows(found: Sequence[Series], stored: dict[str, int], nbytes: int) -> list[list[str]]:
    """Return a row for each kind of state and way of storing it."""
    by_name = {series.name: series for series in found}
    rows = []
    for name, stored_nbytes in stored.items():
        took = [by_name[f"{name}: {what}"] for what in ("save", "load")]
        busy_s = [median(series.own_processor_s) for series in took]
        rates = [f"{nbytes / series.median / 1e9:.2f}" for series in took]
        rows.append(
            [
                name,
                f"{stored_nbytes / nbytes:.1%}",
                *rates,
                *(f"{s * 1e9 / nbytes:.2f}" for s in busy_s),
            ]
        )
    return rows


def _measure(options: Options, folder: Path) -> Report:
    found = list[Series]()
    stored = dict[str, int]()
    nbytes = 0
    for kind, make in (("trained", build), ("shrinks", _shrinking)):
        state = make(options.gib)
        nbytes = nbytes_of(state)
        found += contest(_contestants(folder, kind, state, stored), options.runs, options.settle_s)
        for path in folder.iterdir():
            shutil.rmtree(path)
    return Report(
        "packed",
        (
            f"Plain and lz4: {nbytes / 1e9:.2f} GB in {len(flat_tensors(state))} tensors, one "
            f"process, {options.runs} rounds"
        ),
        describe(folder),
        ["", "stored", "save GB/s", "load GB/s", "save CPU s/GB", "load CPU s/GB"],
        _rows(found, stored, nbytes),
        series=found,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    options = parse("packed", __doc__, argv, gib=1.0, runs=3)
    with work_folder(options.folder) as folder:
        holdfast.save(folder / "warm", build(TINY_GIB), compression="lz4")
        shutil.rmtree(folder / "warm")
        _measure(options, folder).emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
