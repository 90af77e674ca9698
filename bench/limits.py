"""Measures the best that the machine can do: raw O_DIRECT writes and reads of the state's size, and
a memcpy of the state.

The fastest of several settings (``limit/raw_file.py``) is the limit, which is measured again in
every round.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Sequence
from pathlib import Path

import torch

from ..storage.runtime.buffers import HostBuffer
from .contest import Contestant, contest, header, rows
from .limit.raw_file import RawFile, reading_settings, writing_settings
from .limit.sweep import fastest_reader, fastest_writer
from .machine import describe, drop_caches
from .options import Options, parse, work_folder
from .report import Report, Series
from .states import State, build, flat_tensors, nbytes_of

__all__ = ["Memcpy", "best_setting"]

_MEMCPY_NBYTES = 1 << 30


def best_setting(path: Path, nbytes: int, *, reading: bool, settle_s: float) -> RawFile:
    """Return the fastest setting. For reads, ``path`` is written and kept."""
    if not reading:
        return fastest_writer(writing_settings(path, nbytes), settle_s=settle_s, say=_say)
    best = fastest_reader(
        reading_settings(path, nbytes),
        settle_s=settle_s,
        make_cold=lambda: drop_caches(path.parent),
        say=_say,
    )
    best.write()
    return best


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


class Memcpy:
    """A copy of a state into existing warm memory, with all of torch's threads.

    The target is reused and takes at most 1 GiB: far more than any cache, while leaving memory for
    others.
    """

    def __init__(self, state: State) -> None:
        self._tensors = [t.view(-1).view(torch.uint8) for t in flat_tensors(state).values()]
        largest = max(t.nbytes for t in self._tensors)
        room = HostBuffer.allocate(max(largest, min(nbytes_of(state), _MEMCPY_NBYTES)))
        self._room = torch.frombuffer(room.view, dtype=torch.uint8)
        self._room.zero_()

    def best_s(self, runs: int = 3) -> float:
        """Return the seconds of the fastest of ``runs`` copies."""
        return min(timeit.repeat(self.run, number=1, repeat=runs))

    def run(self) -> None:
        """Copy the state once."""
        at = 0
        for source in self._tensors:
            if at + source.nbytes > self._room.nbytes:
                at = 0
            self._room[at : at + source.nbytes].copy_(source)
            at += source.nbytes


def _contestants(folder: Path, state: State, options: Options) -> list[Contestant]:
    nbytes = nbytes_of(state)
    writing = best_setting(folder / "written", nbytes, reading=False, settle_s=options.settle_s)
    reading = best_setting(folder / "read", nbytes, reading=True, settle_s=options.settle_s)
    return [
        Contestant("write", writing.write, after=writing.path.unlink),
        Contestant("read", reading.read, before=lambda: drop_caches(folder)),
        Contestant("memcpy", Memcpy(state).run),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the limits of this machine and this file system."""
    options = parse("limits", __doc__, argv)
    with work_folder(options.folder) as folder:
        state = build(options.gib)
        found: list[Series] = contest(
            _contestants(folder, state, options), options.runs, options.settle_s
        )
        nbytes = nbytes_of(state)
        columns = [0, 1, 2, 3, 4]  # the other columns compare with a limit
        report = Report(
            "limits",
            f"Limits: {nbytes / 1e9:.2f} GB, {options.runs} rounds",
            describe(folder),
            [header()[c] for c in columns],
            [[row[c] for c in columns] for row in rows(found, nbytes)],
            series=found,
        )
        report.emit(options.json, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
