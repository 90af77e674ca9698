"""Measures how long training waits for an asynchronous save, next to one memcpy of the state (the
best of three).

Each contestant runs in its own process, in turn with its memcpy. The first call is shown
separately, because memory is allocated for it. Next to it stands the time to touch the same amount
of fresh memory, measured just before, as a virtual machine may have to ask its host for it. Each
save is durable before the next begins.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast

from ..storage.runtime.buffers import HostBuffer
from .limits import Memcpy
from .machine import PeakMemory, describe, flush
from .options import GIB, TINY_GIB, Options, work_folder
from .report import Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero
from .workers import each_alone

__all__: list[str] = []

Begin = Callable[[Path, State], Callable[[], Any]]
"""Starts an asynchronous save, and returns a function that waits for its end."""


def _begin_holdfast(path: Path, state: State) -> Callable[[], Any]:
    return holdfast.async_save(path, state).wait


def _begin_dcp(path: Path, state: State) -> Callable[[], Any]:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with warnings.catch_warnings(action="ignore"):
        saving: Any = async_save(state, checkpoint_id=path)
    return saving.result  # type: ignore[no-any-return]


def _check_holdfast(path: Path, state: State, expected: dict[str, bytes]) -> None:
    holdfast.load(path, into=state)
    if digests(state) != expected:
        raise AssertionError("what was loaded is not what the state was when async_save returned")


CONTESTANTS: dict[str, Begin] = {"holdfast": _begin_holdfast, "DCP": _begin_dcp}


def _measure(name: str, given: Options, _: float) -> list[dict[str, Any]]:
    """Measure in a worker: the series of the memcpy, the waiting, and the time until durable."""
    with work_folder(given.folder) as folder:
        if name == "DCP":
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
        small = build(TINY_GIB)
        CONTESTANTS[name](folder / "small", small)()
        state = build(given.gib)
        memcpy = Memcpy(state)
        found = [
            Series("memcpy"),
            Series(name),
            Series(f"{name}, until durable"),
            Series("fresh memory"),
        ]
        found[3].seconds.append(_touch_s(nbytes_of(state)))
        for _ in range(given.runs + 1):
            _once(CONTESTANTS[name], folder / "saved", state, memcpy, found)
            time.sleep(given.settle_s)
        if given.tiny and name == "holdfast":
            _check_changed(folder / "checked", state)
    return [vars(series) for series in found]


def _touch_s(nbytes: int) -> float:
    """Return the seconds to write once to fresh memory and free it."""
    began_s = time.perf_counter()
    room = HostBuffer.allocate(nbytes)
    torch.frombuffer(room.view, dtype=torch.uint8).fill_(1)
    return time.perf_counter() - began_s


def _once(begin: Begin, path: Path, state: State, memcpy: Memcpy, found: list[Series]) -> None:
    flush()
    copied_s = memcpy.best_s()
    with PeakMemory() as memory:
        begin_s = time.perf_counter()
        wait = begin(path, state)
        freed_s = time.perf_counter()
        wait()
        durable_s = time.perf_counter()
    for series, seconds in zip(
        found, (copied_s, freed_s - begin_s, durable_s - begin_s), strict=False
    ):
        series.seconds.append(seconds)
    found[1].peak_nbytes.append(memory.nbytes)
    shutil.rmtree(path)


def _check_changed(path: Path, state: State) -> None:
    """Check that the state may change as soon as the call returns."""
    expected = digests(state)
    wait = _begin_holdfast(path, state)
    zero(state)
    wait()
    _check_holdfast(path, state, expected)


def _rows(found: dict[str, list[Series]]) -> list[list[str]]:
    rows = []
    for name, (memcpy, waiting, durable, fresh) in found.items():
        first, later = _split(waiting)
        for label, series in ((f"{name}, first call", first), (f"{name}, later calls", later)):
            times = [f"{x:.3f}" for x in (series.median, min(series.seconds), max(series.seconds))]
            if series is later:
                to_memcpy = ratio(series, _split(memcpy)[1])
            else:
                to_memcpy = series.median / memcpy.median
            if series is first:
                rest = durable.seconds[0]
            else:
                rest = _split(durable)[1].median
            rows.append(
                [
                    label,
                    *times,
                    f"{to_memcpy:.2f} ×",
                    f"{rest:.2f}",
                    f"{waiting.peak_nbytes[0] / GIB:.2f} GiB",
                ]
            )
        for label, beside in (("memcpy beside it", memcpy), ("fresh memory, once", fresh)):
            times = [f"{x:.3f}" for x in (beside.median, min(beside.seconds), max(beside.seconds))]
            rows.append([f"… {label}", *times, f"{beside.median / memcpy.median:.2f} ×", "–", "–"])
    return rows


def _split(series: Series) -> tuple[Series, Series]:
    return Series(series.name, series.seconds[:1]), Series(series.name, series.seconds[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a saved state is not that at the call's
    return."""
    return each_alone("stall", __doc__, list(CONTESTANTS), _measure, _report, argv)


def _report(found: dict[str, list[Series]], given: Options, folder: Path) -> Report:
    memcpy, ours, *_ = found["holdfast"]
    target = Target(
        "waiting, in units of a memcpy",
        ratio(_split(ours)[1], _split(memcpy)[1]),
        1.3,
        at_least=False,
    )
    targets = [target]
    if given.tiny:
        targets = []
    return Report(
        "stall",
        (
            f"How long training waits for an asynchronous save of about {given.gib:g} GiB, "
            f"{given.runs} calls after the first"
        ),
        describe(folder),
        ["", "median s", "min s", "max s", "of a memcpy", "s until durable", "extra memory"],
        _rows(found),
        targets,
        series=[series for group in found.values() for series in group],
    )


if __name__ == "__main__":
    sys.exit(main())
