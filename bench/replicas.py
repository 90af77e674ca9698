"""Measures cold loads of the same state by four ranks of one host: each byte read once and passed
on, next to all ranks reading everything.

Times are those of the whole job, from a barrier before to a barrier after. In the limit, each rank
reads a quarter of a replica's bytes and discards them: the storage's own rate, which four replicas
cannot reach, because each of them also copies everything.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

import holdfast

from .contest import HEADER, rows
from .limit.raw_file import RawFile
from .machine import PeakMemory, drop_caches, flush, read_from_device_nbytes
from .program import Options, Program, joined, launched
from .report import LIMIT, OURS, Report, Series
from .states import State, build, digests, nbytes_of, zero

WORLD = 4
ALONE = "holdfast, exchange=False"
DCP = "DCP"


def _measure(given: Options, task: object) -> dict[str, Any]:
    """Measure in a worker. Return the seconds, memory, and bytes requested from the storage and
    fetched from the device, by contestant and round."""
    folder = given.dir
    with joined() as (rank, world):
        state = build(given.gib)
        expected = digests(state)
        nbytes = nbytes_of(state)
        contestants = _contestants(folder, state, given, rank, world)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
        for number in range(given.runs + (not given.tiny)):
            for name, load in contestants.items():
                zero(state)
                told = _timed(load, folder, rank, given.settle_s)
                if name != LIMIT and digests(state) != expected:
                    raise AssertionError(f"{name}: what was loaded is not what was saved")
                if number or given.tiny:  # otherwise the first round is a warm-up
                    for key, value in told.items():
                        found[name].setdefault(key, []).append(value)
        return {"found": found, "nbytes": nbytes}


def _contestants(
    folder: Path, state: State, given: Options, rank: int, world: int
) -> dict[str, Callable[[], int | None]]:
    """Return each contestant's work on this rank. It returns the bytes requested, if known."""
    raw = RawFile(folder / f"raw-{rank}", nbytes_of(state) // world, preallocate=True)
    raw.write()
    holdfast.save(folder / "ours", state)
    holdfast.release_memory()  # or the load would reuse, uncounted, memory kept from the save

    def ours(exchange: Any) -> int:
        reports: list[holdfast.LoadReport] = []
        holdfast.load(folder / "ours", into=state, exchange=exchange, on_report=reports.append)
        return reports[0].bytes_read

    def limit() -> int:
        raw.read()
        return raw.nbytes

    out: dict[str, Callable[[], int | None]] = {LIMIT: limit}
    out[OURS] = lambda: ours(given.tiny or "auto")  # by default, small loads are not exchanged
    out[ALONE] = lambda: ours(False)
    if not given.alone:
        _dcp(folder, state, saving=True)
        out[DCP] = lambda: _dcp(folder, state, saving=False)
    return out


def _dcp(folder: Path, state: State, *, saving: bool) -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    with warnings.catch_warnings(action="ignore"):
        if saving:
            state_dict_saver.save(state, checkpoint_id=folder / "dcp")
        else:
            state_dict_loader.load(state, checkpoint_id=folder / "dcp")


def _timed(
    load: Callable[[], int | None], folder: Path, rank: int, settle_s: float
) -> dict[str, float]:
    dist.barrier()
    if rank == 0:
        flush()
        time.sleep(settle_s)
        drop_caches(folder)
    with PeakMemory() as memory:
        dist.barrier()
        began_s = time.perf_counter()
        began_processor_s = time.process_time()
        fetched = read_from_device_nbytes()
        asked = load()
        processor_s = time.process_time() - began_processor_s
        dist.barrier()
        seconds = time.perf_counter() - began_s
    device = read_from_device_nbytes() - fetched
    return {
        "seconds": seconds,
        "peak": memory.nbytes,
        "asked": asked or 0,
        "device": device,
        "processor": processor_s,
    }


def _joined(told: Sequence[dict[str, Any]]) -> tuple[list[Series], dict[str, tuple[float, float]]]:
    """Return the job's series and, by contestant, the bytes requested and the bytes fetched from
    the device, in units of one replica."""
    nbytes = told[0]["nbytes"]
    found = []
    times = {}
    for name in told[0]["found"]:
        columns = {
            key: [rank["found"][name][key] for rank in told] for key in told[0]["found"][name]
        }
        seconds = [max(each) for each in zip(*columns["seconds"], strict=True)]
        peaks = [int(sum(each)) for each in zip(*columns["peak"], strict=True)]
        processors_s: list[float] = list(map(sum, zip(*columns["processor"], strict=True)))
        found.append(Series(name, seconds, peaks, processors_s))
        asked, device = (
            max(map(sum, zip(*columns[key], strict=True))) / nbytes for key in ("asked", "device")
        )
        times[name] = asked, device
    return found, times


def _report(given: Options, folder: Path) -> Report:
    told = launched(given, folder, world=WORLD)
    found, times = _joined(told)
    nbytes = told[0]["nbytes"]
    table = [
        [
            *row,
            f"{median(s.own_processor_s):.2f}",
            f"{times[s.name][0]:.3f}" if times[s.name][0] else "–",
            f"{times[s.name][1]:.2f}",
        ]
        for row, s in zip(rows(found, nbytes), found, strict=True)
    ]
    return Report(
        f"Cold load of {nbytes / 1e9:.2f} GB by each of {WORLD} ranks, {given.runs} rounds; "
        f"GB/s of one replica",
        [*HEADER, "processor s", "replicas asked for", "from the device"],
        table,
        series=found,
    )


main = Program("replicas", __doc__, _report, gib=1.0, work=_measure)


if __name__ == "__main__":
    sys.exit(main())
