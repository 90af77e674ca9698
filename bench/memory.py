"""Measures the host memory that saves and loads take in addition to the state, for states of
several sizes. It should stay within the budget for any size.

Each size runs in its own process. The figure is the growth of resident memory after the state was
built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import holdfast

from .machine import PeakMemory, available_nbytes, describe, drop_caches
from .options import GIB, TINY_GIB, Options, options, parser, work_folder
from .report import Report, Target
from .states import build, digests, nbytes_of, zero
from .workers import leave_findings, run_alone

__all__: list[str] = []

SIZES_GIB = (1.0, 2.0, 4.0, 8.0)
BUDGET_NBYTES = 512 << 20
"""Default budget of save and load."""


def _measure(folder: Path, gib: float) -> dict[str, Any]:
    """Measure in a worker. Return the size of the state, and the memory peaks of a save and a
    load."""
    holdfast.save(folder / "warm", build(TINY_GIB))
    holdfast.release_memory()
    state = build(gib)
    expected = digests(state)
    path = folder / "saved"
    peaks = {"save": _peak(lambda: holdfast.save(path, state))}
    zero(state)
    drop_caches(path)
    peaks["load"] = _peak(lambda: holdfast.load(path, into=state))
    if digests(state) != expected:
        raise AssertionError("what was loaded is not what was saved")
    return {"nbytes": nbytes_of(state), **peaks}


def _peak(run: Callable[[], object]) -> int:
    holdfast.release_memory()  # or the second would reuse, uncounted, memory kept from the first
    with PeakMemory() as memory:
        run()
    return memory.nbytes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises RuntimeError if a state comes back changed."""
    arguments = parser("memory", __doc__)
    arguments.add_argument("--worker", action="store_true", help="for internal use")
    arguments.add_argument("--findings", help="for internal use")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    if parsed.worker:
        leave_findings(parsed.findings, _measure(given.folder, given.gib))
        return 0
    with work_folder(given.folder) as folder:
        _report(given, folder).emit(given.json, given.svg)
    return 0


def _report(given: Options, folder: Path) -> Report:
    if given.tiny:
        sizes = [TINY_GIB]
    else:
        sizes = [s for s in SIZES_GIB if 1.4 * s * GIB < available_nbytes()]
    told = []
    for size in sizes:
        with work_folder(folder) as inner:
            told.append(run_alone("memory", ["--worker", "--dir", str(inner), "--gib", str(size)]))
        print(f"  {size:g} GiB: {told[-1]}", flush=True)
    worst = max(max(t["save"], t["load"]) for t in told)
    peak = worst / BUDGET_NBYTES
    targets = [Target("peak, in units of the budget", peak, 1.0, at_least=False)]
    if given.tiny:
        targets = []
    return Report(
        "memory",
        f"Extra host memory of a save and a load; the budget is {BUDGET_NBYTES >> 20} MiB",
        describe(folder),
        ["state", "save", "load"],
        [
            [
                f"{t['nbytes'] / GIB:.2f} GiB",
                f"{t['save'] / (1 << 20):.0f} MiB",
                f"{t['load'] / (1 << 20):.0f} MiB",
            ]
            for t in told
        ],
        targets,
    )


if __name__ == "__main__":
    sys.exit(main())
