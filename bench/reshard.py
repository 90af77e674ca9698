"""Measures loads under another layout than that of the save: their time, and the bytes read per
byte wanted.

"Asked for" counts the requests to the storage, including checksums. "From the device" counts what
the kernel fetched for the process meanwhile, including the manifest and any program code that was
dropped with the page cache.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast

from .machine import PeakMemory, drop_caches, read_from_device_nbytes
from .meshes import LAYOUTS, lay_out
from .program import Options, Program, joined, launched, work_folder
from .report import Report, Series, Target
from .states import build, digests, zero

__all__: list[str] = []

CASES = (("4 ranks", "4 ranks"), ("4 ranks", "3 ranks"), ("2×2", "2 ranks"))
STRIPS = ("3 ranks", "2×2")
"""Loads columns of tensors stored by rows. The strips are shorter than a block, and blocks are read
and verified whole."""
HEADER = [
    "",
    "MB wanted",
    "MB asked for",
    "MB from the device",
    "asked / wanted",
    "device / wanted",
    "median s",
    "extra memory",
]


def _work(given: Options, task: dict[str, Any]) -> dict[str, Any]:
    """Save or load in a worker, and check what was loaded. Return the figures."""
    folder = given.folder / "saved"
    with joined() as (rank, _world):
        state = lay_out(build(given.gib), LAYOUTS[task["layout"]])
        if task["saves"]:
            dist.barrier()
            began_s = time.perf_counter()
            holdfast.save(folder, state)
            return {"seconds": time.perf_counter() - began_s}
        expected = digests(_locals(state))
        return {"runs": [_load_once(folder, state, expected, rank) for _ in range(given.runs)]}


def _load_once(
    folder: Path, state: dict[str, Any], expected: dict[str, bytes], rank: int
) -> dict[str, float]:
    zero(_locals(state))
    if rank == 0:
        drop_caches(folder)
    dist.barrier()
    reports: list[Any] = []
    fetched = read_from_device_nbytes()
    with PeakMemory() as memory:
        began_s = time.perf_counter()
        holdfast.load(folder, into=state, on_report=reports.append)
        seconds = time.perf_counter() - began_s
    fetched = read_from_device_nbytes() - fetched
    if digests(_locals(state)) != expected:
        raise AssertionError("what was loaded is not what this layout should hold")
    wanted = reports[0].bytes_wanted
    read = reports[0].bytes_read
    return {
        "seconds": seconds,
        "wanted": wanted,
        "read": read,
        "fetched": fetched,
        "peak": memory.nbytes,
    }


def _locals(state: dict[str, Any]) -> dict[str, Any]:
    """Return the local tensors of all DTensors in a state."""
    return {
        key: _locals(value) if isinstance(value, dict) else value.to_local()
        for key, value in state.items()
        if hasattr(value, "to_local") or isinstance(value, dict)
    }


def _case(
    source: str, target: str, given: Options, folder: Path
) -> tuple[list[list[str]], Series, list[float]]:
    """Return the rows of the table, the seconds of the slowest rank per run, and the worst
    ratios."""
    with work_folder(folder) as inner:
        saved, told = (
            launched(given, inner, {"layout": layout, "saves": saves}, world=LAYOUTS[layout].world)
            for layout, saves in ((source, True), (target, False))
        )
    name = f"{LAYOUTS[source].name} → {LAYOUTS[target].name}"
    print(f"  {name}: saved in {max(s['seconds'] for s in saved):.2f} s", flush=True)
    series = Series(
        name,
        [max(r["seconds"] for r in runs) for runs in zip(*(t["runs"] for t in told), strict=True)],
    )
    rows = []
    worst = [0.0, 0.0]
    for rank, runs in enumerate(t["runs"] for t in told):
        last = {key: max(run[key] for run in runs) for key in runs[0]}
        ratios = last["read"] / last["wanted"], last["fetched"] / last["wanted"]
        worst = [max(pair) for pair in zip(worst, ratios, strict=True)]
        moved = [f"{last[key] / 1e6:.1f}" for key in ("wanted", "read", "fetched")]
        peak = f"{last['peak'] / (1 << 20):.0f} MiB"
        rows.append(
            [
                f"{name}: rank {rank}",
                *moved,
                *(f"{x:.3f}" for x in ratios),
                f"{series.median:.2f}",
                peak,
            ]
        )
    return rows, series, worst


def _report(given: Options, folder: Path) -> Report:
    pairs = CASES[2:] if given.tiny else CASES
    cases = [_case(source, target, given, folder) for source, target in pairs]
    strips = [] if given.tiny else [_case(*STRIPS, given, folder)]
    names = ("asked of the storage", "fetched from the device")
    targets = [
        Target(
            f"bytes {name} per byte wanted, worst rank",
            max(worst[i] for _, _, worst in cases),
            1.05,
            at_least=False,
        )
        for i, name in enumerate(names)
    ]
    return Report(
        f"Loading under another layout: a state of about {given.gib:g} GiB, cold, "
        f"{given.runs} runs",
        HEADER,
        [row for rows, _, _ in (*cases, *strips) for row in rows],
        targets,
        [
            f"{series.name}: not counted; columns are wanted of what is stored by rows."
            for _, series, _ in strips
        ],
        series=[series for _, series, _ in (*cases, *strips)],
    )


main = Program("reshard", __doc__, _report, gib=1.0, runs=3, work=_work)


if __name__ == "__main__":
    sys.exit(main())
