"""Measures the overhead of measuring: phases of ``holdfast bench`` next to hand-written loops, and
saves with telemetry next to saves without.

The two of a pair take turns, so both meet the same conditions. The figure is the median of the
ratios within rounds, with its 95 % confidence interval. The harness times a phase and also watches
memory and processor time; a hand-written loop only reads the clock twice. A second figure is the
ratio of this process's processor time, which other load disturbs less.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import holdfast

from ..core.aio import at_most
from ..core.units import round_up
from ..drivers.registry import open_driver
from ..drivers.uri import Uri, join, parse
from ..storage.runtime.buffers import HostBuffer
from .clearing import clear
from .contest import Contestant, contest
from .limit.alone import Alone
from .machine import describe, drop_caches, flush
from .measured.plan import local_folder
from .options import Options, options, parser
from .ratios import Interval, of_pairs
from .report import Report, Series, Target
from .states import State, build, nbytes_of
from .traits import traits_of

__all__ = ["BareLoop", "Pair", "alternated", "judged"]

HARNESS_MAX = 1.03
"""Limit of a phase's time in ``holdfast bench``, in units of the hand-written loop."""
TELEMETRY_MAX = 1.01
"""Limit of the time of a save with telemetry, in units of one without."""
KEY = "bare"


class BareLoop:
    """The least code that moves ``nbytes``, rounded up to 4096, through a driver, with the settings
    of :class:`.limit.alone.Alone`: the driver's preferred part size and concurrency."""

    def __init__(self, place: Uri, nbytes: int) -> None:
        self._place = place
        self._nbytes = round_up(nbytes, 4096)
        traits = traits_of(place)
        self._part_nbytes = traits.part_nbytes
        self._width = 1 if traits.part_order == "serial" else traits.concurrency
        self._buffers = [HostBuffer.allocate(self._part_nbytes).view for _ in range(self._width)]
        for buffer in self._buffers:
            buffer[:] = bytes(range(256)) * (len(buffer) // 256)

    def write(self) -> None:
        """Write an object, durably."""
        asyncio.run(self._write())

    async def _write(self) -> None:
        driver = open_driver(self._place)
        upload = await driver.create(KEY, self._nbytes)
        await at_most(
            self._width,
            (upload.write(start, self._part(start)) for start in self._starts()),
        )
        await upload.commit()
        await driver.close()

    def read(self) -> None:
        """Read the object."""
        asyncio.run(self._read())

    async def _read(self) -> None:
        driver = open_driver(self._place)
        if driver.traits.piece_nbytes:
            reads = (
                driver.read_pieces(KEY, start, len(self._part(start)), lambda piece: None)
                for start in self._starts()
            )
        else:
            reads = (driver.read(KEY, start, self._part(start)) for start in self._starts())
        await at_most(self._width, reads)
        await driver.close()

    def remove(self) -> None:
        """Delete the object."""
        clear(join(self._place, KEY))

    def _starts(self) -> range:
        return range(0, self._nbytes, self._part_nbytes)

    def _part(self, start: int) -> memoryview:
        number = start // self._part_nbytes
        return self._buffers[number % self._width][: self._nbytes - start]


@dataclass(frozen=True)
class Pair:
    """Two functions to compare. ``measured`` and ``bare`` return their seconds, and the seconds of
    this process's processor time."""

    name: str
    measured: Callable[[], tuple[float, float]]
    bare: Callable[[], tuple[float, float]]
    ratio_max: float


def alternated(pair: Pair, rounds: int) -> tuple[Series, Series]:
    """Run both in turn, in reverse order in every other round. A first round that starts and
    imports everything does not count."""
    pair.measured()
    pair.bare()
    measured, bare = Series(f"{pair.name}: measured"), Series(f"{pair.name}: bare")
    in_order = [(measured, pair.measured), (bare, pair.bare)]
    for number in range(rounds):
        for series, run in in_order[:: -1 if number % 2 else 1]:
            took_s, processor_s = run()
            series.seconds.append(took_s)
            series.own_processor_s.append(processor_s)
        print(
            f"  {pair.name}: {measured.seconds[-1]:.3f} s, bare {bare.seconds[-1]:.3f} s",
            flush=True,
        )
    return measured, bare


def _by_harness(contestant: Contestant, settle_s: float) -> tuple[float, float]:
    """Return what ``holdfast bench`` would report for one round of a phase."""
    (series,) = contest([contestant], 1, settle_s, say=lambda line: None)
    return series.seconds[0], series.own_processor_s[0]


def _by_hand(contestant: Contestant, settle_s: float) -> tuple[float, float]:
    contestant.before()
    flush()
    time.sleep(settle_s)
    began_processor_s = time.process_time()
    began_s = time.perf_counter()
    contestant.run()
    took_s = time.perf_counter() - began_s
    processor_s = time.process_time() - began_processor_s
    contestant.after()
    return took_s, processor_s


def _pair(name: str, phase: Contestant, bare: Contestant, settle_s: float) -> Pair:
    return Pair(
        name,
        partial(_by_harness, phase, settle_s),
        partial(_by_hand, bare, settle_s),
        HARNESS_MAX,
    )


def _pairs(place: Uri, state: State, settle_s: float) -> list[Pair]:
    """Return the phases of ``holdfast bench``, and telemetry. Writes the data to be read."""
    alone = Alone(place, nbytes_of(state))
    loop = BareLoop(place, nbytes_of(state))
    alone.write()
    loop.write()
    stored, saved = join(place, "stored"), join(place, "saved")
    holdfast.save(str(stored), state)
    write = Contestant("write", alone.write)
    bare_write = Contestant("write", loop.write)
    make_cold = partial(_make_cold, place)
    read = Contestant("read", alone.read, make_cold)
    bare_read = Contestant("read", loop.read, make_cold)
    save = Contestant("save", partial(_save, saved, state), after=partial(clear, saved))
    load = Contestant("load", partial(_load, stored, state), make_cold)
    silent = Contestant("save", partial(_save_silently, saved, state), after=partial(clear, saved))
    return [
        _pair("write alone", write, bare_write, settle_s),
        _pair("read alone", read, bare_read, settle_s),
        _pair("save", save, save, settle_s),
        _pair("load", load, load, settle_s),
        Pair(
            "telemetry of a save",
            partial(_by_hand, save, settle_s),
            partial(_by_hand, silent, settle_s),
            TELEMETRY_MAX,
        ),
    ]


def _make_cold(place: Uri) -> None:
    folder = local_folder(place)
    if folder is not None:
        drop_caches(Path(folder))


def _save(uri: Uri, state: State) -> None:
    holdfast.save(str(uri), state)


def _save_silently(uri: Uri, state: State) -> None:
    holdfast.save(str(uri), state, telemetry="off")


def _load(uri: Uri, state: State) -> None:
    holdfast.load(str(uri), into=state)


def _row(pair: Pair, measured: Series, bare: Series) -> list[str]:
    seconds = of_pairs(measured.seconds, bare.seconds)
    processor = of_pairs(measured.own_processor_s, bare.own_processor_s)
    return [
        pair.name,
        f"{measured.median:.3f}",
        f"{bare.median:.3f}",
        f"{seconds.ratio:.3f}",
        f"{seconds.low:.3f} to {seconds.high:.3f}",
        f"{processor.ratio:.3f}",
        f"{processor.low:.3f} to {processor.high:.3f}",
    ]


def judged(pair: Pair, found: Interval) -> Target | str:
    """Return the target if the confidence interval decides it, else a sentence that says so."""
    if found.low <= pair.ratio_max < found.high:
        return (
            f"{pair.name}: not shown whether it takes at most {pair.ratio_max:g} times as long: "
            f"{found.low:.3f} to {found.high:.3f}"
        )
    return Target(f"{pair.name}: times as long", found.ratio, pair.ratio_max, at_least=False)


def _report(given: Options, place: Uri, only: str) -> Report:
    state = build(given.gib)
    pairs = [pair for pair in _pairs(place, state, given.settle_s) if only in pair.name]
    found = [(pair, *alternated(pair, given.runs)) for pair in pairs]
    verdicts = [
        judged(pair, of_pairs(measured.seconds, bare.seconds)) for pair, measured, bare in found
    ]
    if given.tiny:
        verdicts = []
    return Report(
        "overhead",
        f"Overhead of measuring: {nbytes_of(state) / 1e9:.2f} GB, {given.runs} rounds",
        describe(Path(local_folder(place) or ".")),
        ["", "measured s", "bare s", "ratio", "95 %", "of processor time", "95 %"],
        [_row(*each) for each in found],
        [verdict for verdict in verdicts if isinstance(verdict, Target)],
        [verdict for verdict in verdicts if isinstance(verdict, str)],
        series=[series for _, *both in found for series in both],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Return 1 if measuring is shown to cost too much."""
    arguments = parser("overhead", __doc__, gib=2.0, runs=31)
    arguments.add_argument("--uri", help="measure below this URI instead of --dir")
    arguments.add_argument("--only", default="", help="pairs with this in their names")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    place = join(parse(parsed.uri or given.folder), f"holdfast-bench-{uuid.uuid4().hex[:12]}")
    try:
        report = _report(given, place, parsed.only)
    finally:
        clear(place)
        holdfast.release_memory()
    report.emit(given.json, given.svg)
    return int(any(not target.met for target in report.targets))


if __name__ == "__main__":
    sys.exit(main())
