"""Measures how long training waits for an asynchronous save, next to one memcpy of the state (the
best of three).

Each contestant runs in its own process, in turn with its memcpy. The first call is shown
separately, because memory is allocated for it. Next to it stands the time to touch the same amount
of fresh memory, measured just before, as a virtual machine may have to ask its host for it. Each
save is durable before the next begins. ``--chart`` draws the stalls beside the saves and loads of
``holdfast bench --peer all``.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast

from ..storage.runtime.buffers import HostBuffer
from .machine import PeakMemory, flush
from .measured.plan import Plan
from .measured.run import measured
from .program import GIB, TINY_GIB, Options, Program, each_alone
from .report import LIMIT, OURS, Report, Series, draw_all, ratio
from .states import Memcpy, State, build, digests, nbytes_of, zero

HEADER = ["", "median s", "min s", "max s", "of a memcpy", "s until durable", "extra memory"]
CHARTS = {
    "durable save": {"write limit": LIMIT, "save": OURS},
    "cold, verified load": {"read limit": LIMIT, "load": OURS},
}
"""Phases of ``holdfast bench`` in a chart, with their names there. Peers come with their own."""
Begin = Callable[[Path, State], Callable[[], Any]]
"""Starts an asynchronous save, and returns a function that waits for its end."""


def _begin_holdfast(path: Path, state: State) -> Callable[[], Any]:
    return holdfast.async_save(path, state).wait


def _begin_dcp(path: Path, state: State) -> Callable[[], Any]:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with warnings.catch_warnings(action="ignore"):
        saving: Any = async_save(state, checkpoint_id=path)
    return saving.result  # type: ignore[no-any-return]


CONTESTANTS: dict[str, Begin] = {OURS: _begin_holdfast, "DCP": _begin_dcp}


def _measure(given: Options, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure in a worker: the series of the memcpy, the waiting, and the time until durable."""
    name: str = task["name"]
    folder = given.folder
    if name == "DCP":
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    begin = CONTESTANTS[name]
    begin(folder / "small", build(TINY_GIB))()
    state = build(given.gib)
    memcpy = Memcpy(state)
    found = [Series("memcpy"), Series(name), Series(f"{name}, until durable")]
    fresh = Series("fresh memory", [_touch_s(nbytes_of(state))])
    for _ in range(given.runs + 1):
        _once(begin, folder / "saved", state, memcpy, found)
        time.sleep(given.settle_s)
    if given.tiny and name == OURS:
        _check_changed(folder / "checked", state)
    return [vars(series) for series in (*found, fresh)]


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
    times_s = (copied_s, freed_s - begin_s, durable_s - begin_s)
    for series, seconds in zip(found, times_s, strict=True):
        series.seconds.append(seconds)
    found[1].peak_nbytes.append(memory.nbytes)
    shutil.rmtree(path)


def _check_changed(path: Path, state: State) -> None:
    """Check that the state may change as soon as the call returns."""
    expected = digests(state)
    wait = _begin_holdfast(path, state)
    zero(state)
    wait()
    holdfast.load(path, into=state)
    if digests(state) != expected:
        raise AssertionError("what was loaded is not what the state was when async_save returned")


def _rows(name: str, memcpy: Series, waiting: Series, durable: Series, fresh: Series) -> Any:
    memory = f"{waiting.peak_nbytes[0] / GIB:.2f} GiB"
    first, later = waiting.seconds[0] / memcpy.median, ratio(_later(waiting), _later(memcpy))
    return [
        _row(f"{name}, first call", waiting.seconds[:1], first, durable.seconds[0], memory),
        _row(f"{name}, later calls", waiting.seconds[1:], later, _later(durable).median, memory),
        _row("… memcpy beside it", memcpy.seconds, 1.0, None, "–"),
        _row("… fresh memory, once", fresh.seconds, fresh.median / memcpy.median, None, "–"),
    ]


def _row(
    name: str, times_s: list[float], of_memcpy: float, durable_s: float | None, memory: str
) -> list[str]:
    median = Series(name, times_s).median
    times = [f"{x:.3f}" for x in (median, min(times_s), max(times_s))]
    return [
        name,
        *times,
        f"{of_memcpy:.2f} ×",
        "–" if durable_s is None else f"{durable_s:.2f}",
        memory,
    ]


def _later(series: Series) -> Series:
    """Return the figures without the first call, which allocates memory for all later ones."""
    return Series(series.name, series.seconds[1:])


def _report(given: Options, folder: Path) -> Report:
    found = each_alone(given, folder, CONTESTANTS)
    if given.own.chart:
        memcpy = found[OURS][0]
        stalls = [_later(memcpy), *(_later(group[1]) for group in found.values())]
        _draw(given, folder, stalls)
    return Report(
        f"How long training waits for an asynchronous save of about {given.gib:g} GiB, "
        f"{given.runs} calls after the first",
        HEADER,
        [row for name, group in found.items() for row in _rows(name, *group)],
        series=[series for group in found.values() for series in group],
    )


def _draw(given: Options, folder: Path, stalls: list[Series]) -> None:
    """Measure saves and loads beside all peers, and draw them next to the stalls."""
    plan = Plan(folder.as_uri(), int(given.gib * GIB), given.runs, peers="all")
    phases = measured(plan, print).phases
    charts = []
    for title, names in CHARTS.items():
        kind = list(names)[1]
        series = [
            Series(names.get(phase.name, phase.name.removeprefix(f"{kind}: ")), [*phase.seconds])
            for phase in phases
            if phase.name in names or phase.name.startswith(f"{kind}: ")
        ]
        charts.append(Report(title, [], [], series=series))
    stall = Report("stall of an asynchronous save", [], [], series=stalls)
    draw_all([*charts, stall], given.own.chart)


main = Program(
    "stall",
    __doc__,
    _report,
    work=_measure,
    own=lambda parser: parser.add_argument(
        "--chart", type=Path, help="also measure saves and loads beside peers, and draw all"
    ),
)


if __name__ == "__main__":
    sys.exit(main())
