"""Measures two ranks of one host that each save and load half of a state, next to one process that
does all of it.

Times are those of the whole job, from a barrier before to a barrier after. Two ranks should be no
slower, within the noise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import holdfast

from ..core.units import ceil_div
from .contest import header, rows
from .machine import PeakMemory, describe, drop_caches, flush
from .meshes import split_evenly
from .options import TINY_GIB, Options, options, parser, work_folder
from .report import Report, Series, Target
from .states import State, build, digests, zero
from .workers import joined, leave_findings, run_ranks

__all__: list[str] = []

OPERATIONS = ("save", "load")
RUNS_A_LAUNCH = 2
NO_SLOWER = 0.95


def _measure(folder: Path, given: Options, runs: int) -> dict[str, Any]:
    """Measure in a worker. Return the seconds of each save and load, and this rank's bytes."""
    with joined() as (rank, world):
        mesh = init_device_mesh("cpu", (world,))
        holdfast.save(folder / "warm", split_evenly(build(TINY_GIB, seed=rank, share=world), mesh))
        share = build(given.gib, seed=rank, share=world)
        state = split_evenly(share, mesh)
        expected = digests(share)
        found = [Series(name) for name in OPERATIONS]
        for number in range(runs):
            path = folder / f"{world}-{number}"
            _timed(found[0], lambda: holdfast.save(path, state), path, rank)  # noqa: B023 - called at once
            zero(share)
            if number == 0:
                # or the load would reuse, uncounted, memory kept from the save
                holdfast.release_memory()
            _timed(found[1], lambda: holdfast.load(path, into=state), path, rank)  # noqa: B023 - called at once
            if digests(share) != expected:
                raise AssertionError("what was loaded is not what was saved")
        return {"series": [vars(s) for s in found], "nbytes": _nbytes(share)}


def _nbytes(share: State) -> int:
    return sum(
        _nbytes(v) if isinstance(v, dict) else getattr(v, "nbytes", 0) for v in share.values()
    )


def _timed(series: Series, run: Callable[[], object], path: Path, rank: int) -> None:
    if rank == 0:
        flush()
        time.sleep(0.5)
        drop_caches(path)
    with PeakMemory() as memory:
        dist.barrier()
        began_s = time.perf_counter()
        run()
        dist.barrier()
        series.seconds.append(time.perf_counter() - began_s)
    series.peak_nbytes.append(memory.nbytes)


def _contest(given: Options, folder: Path) -> tuple[dict[str, list[Series]], int]:
    """Launch one process and two in turn."""
    found = {
        op: [Series(f"{op}, {n} process{'es' if n > 1 else ''}") for n in (1, 2)]
        for op in OPERATIONS
    }
    nbytes = 0
    for launch in range(ceil_div(given.runs, RUNS_A_LAUNCH)):
        for world in (1, 2):
            with work_folder(folder) as inner:
                told = run_ranks("ranks", world, [*given.arguments(inner), "--worker"])
            for number, operation in enumerate(OPERATIONS):
                parts = [rank["series"][number] for rank in told]
                series = found[operation][world - 1]
                series.seconds += map(max, zip(*(part["seconds"] for part in parts), strict=True))
                series.peak_nbytes += map(
                    sum, zip(*(part["peak_nbytes"] for part in parts), strict=True)
                )
                print(
                    f"  launch {launch + 1}: {series.name}: {series.seconds[-1]:.2f} s", flush=True
                )
            nbytes = sum(rank["nbytes"] for rank in told)
    return found, nbytes


def _targets(found: dict[str, list[Series]]) -> list[Target]:
    return [
        Target(
            f"{op}: rate of two processes, in units of one's",
            one.median / two.median,
            NO_SLOWER,
            at_least=True,
        )
        for op, (one, two) in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises RuntimeError if a rank fails, or if a state comes back changed."""
    arguments = parser("ranks", __doc__)
    arguments.add_argument("--worker", action="store_true", help="for internal use")
    arguments.add_argument("--findings", help="for internal use")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    if parsed.worker:
        leave_findings(
            parsed.findings, _measure(given.folder, given, 1 if given.tiny else RUNS_A_LAUNCH)
        )
        return 0
    with work_folder(given.folder) as folder:
        found, nbytes = _contest(given, folder)
        series = [s for pair in found.values() for s in pair]
        columns = [0, 1, 2, 3, 4, 7]  # there is no limit and no peer here
        title = (
            f"Two processes, each with half of {nbytes / 1e9:.2f} GB, and one with all; "
            f"{len(series[0].seconds)} runs"
        )
        targets = _targets(found)
        if given.tiny:
            targets = []
        Report(
            "ranks", title, describe(folder), [header()[c] for c in columns],
            [[row[c] for c in columns] for row in rows(series, nbytes)],
            targets, series=series,
        ).emit(given.json, given.svg)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
