"""An hour of everything at once: saves, overwrites, loads, copies, deletions and kills at random,
on storage that fails.

After each operation every checkpoint is loaded again: exactly one that may be there, whole, bit for
bit. Memory, handles, threads, and bytes that belong to no checkpoint must not rise. The seed
decides what is done, in which order: give it again, and it is done again. Runs on a local folder
and on S3 (--uri, HOLDFAST_TEST_S3_URL, or a server of its own); without S3 in this process's memory
instead. A minute with --tiny.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..drivers.uri import Uri, join, parse
from .curves import Curve, Probe, draw, process_curves
from .machine import describe, share_heap
from .objects import s3_server
from .options import bare_parser, work_folder
from .report import Report
from .soakworld import OPERATIONS, Ground, World, shorten_grace

__all__: list[str] = []

TINY_MINUTES = 1.0
SLOTS = 3
LOOK_EVERY = 10
LATE_S = 300.0
"""An operation that takes longer hangs: then all stacks are printed, and the process ends."""
LOCAL_FAULTS = "error:0.004,unsure:0.004,short:0.005,delay:0.02,delay_s:0.02"
REMOTE_FAULTS = "error:0.02,unsure:0.01,short:0.02,busy:0.001,delay:0.02,delay_s:0.05"
MIB = 1 << 20


@dataclass
class _Tally:
    """Of one kind of operation: seconds of each, and how many failed because they were made to."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0

    def row(self, name: str) -> list[str]:
        times = self.seconds or [0.0]
        return [
            name,
            str(len(self.seconds)),
            str(self.failed),
            f"{statistics.median(times):.3f}",
            f"{max(times):.3f}",
        ]


@contextlib.contextmanager
def _grounds(folder: Path, uri: str | None) -> Iterator[list[Ground]]:
    local = Ground("file", Uri("file", str(folder / "local"), {}), LOCAL_FAULTS, shared=True)
    with s3_server(uri or os.environ.get("HOLDFAST_TEST_S3_URL")) as root:
        if root is None:
            print(
                "No S3 server here: local and memory only (make test-servers, or --uri).",
                flush=True,
            )
            other = Ground(
                "memory", parse(f"memory://soak-{secrets.token_hex(4)}"), LOCAL_FAULTS, shared=False
            )
        else:
            other = Ground(
                "s3", join(root, f"soak-{secrets.token_hex(4)}"), REMOTE_FAULTS, shared=True
            )
        yield [local, other]


def _soak(world: World, minutes: float) -> tuple[dict[str, _Tally], Probe]:
    """Work for so long. Raises what :meth:`World.perform` raises; which operation that was is
    printed."""
    tallies = {name: _Tally() for name in OPERATIONS}
    curves, sources = process_curves()
    left = Curve("bytes of no checkpoint", "MiB", 64)
    probe = Probe([*curves, left], [*sources, lambda: world.left_nbytes() / MIB])
    recent: collections.deque[str] = collections.deque(maxlen=20)
    end_s = time.monotonic() + 60 * minutes
    number = 0
    while time.monotonic() < end_s:
        number += 1
        faulthandler.dump_traceback_later(LATE_S, exit=True)
        began_s = time.monotonic()
        try:
            name, well = world.perform(number)
        except BaseException:
            print(
                f"operation {number} of --seed {world.seed} went wrong, after",
                *recent,
                sep="\n  ",
                flush=True,
            )
            raise
        tallies[name].seconds.append(time.monotonic() - began_s)
        tallies[name].failed += not well
        recent.append(f"{number}: {name}{'' if well else ' (made to fail)'}")
        if number % LOOK_EVERY == 0:
            world.settle()
            probe.look()
    faulthandler.cancel_dump_traceback_later()
    return tallies, probe


def _report(world: World, tallies: dict[str, _Tally], probe: Probe, folder: Path) -> Report:
    count = sum(len(t.seconds) for t in tallies.values())
    minutes = probe.at_s[-1] / 60
    where = " and ".join(ground.name for ground in world.grounds)
    notes = [
        f"{name}, medians of both halves, least and most: {', '.join(told)}"
        for name, *told in (c.row() for c in probe.curves)
    ]
    notes.append(
        "kill -9, and what was found: "
        + ", ".join(f"{n} × {what}" for what, n in sorted(world.deaths.items()))
    )
    return Report(
        "soak",
        f"Soak: {count:,} operations in {minutes:.1f} minutes on {where}, --seed {world.seed}",
        describe(folder),
        ["", "operations", "made to fail", "median s", "max s"],
        [tally.row(name) for name, tally in tallies.items()],
        [curve.target() for curve in probe.curves],
        notes,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    out = bare_parser("soak", __doc__, tiny="a minute")
    out.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    out.add_argument("--seed", type=int, help="repeat what was done with it (default: a new one)")
    out.add_argument("--uri", help="an S3 root to use (default: start a server)")
    return out.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Work, and print; 1 if a curve rises. Raises AssertionError where a checkpoint is not what it
    must be."""
    given = _arguments(argv)
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    print(f"--seed {seed}", flush=True)
    shorten_grace()
    share_heap()
    with work_folder(given.dir) as folder, _grounds(folder, given.uri) as grounds:
        world = World(grounds, SLOTS, seed)
        tallies, probe = _soak(world, TINY_MINUTES if given.tiny else given.minutes)
        report = _report(world, tallies, probe, folder)
        report.emit(None)
        if given.json is not None:
            figures = asdict(report) | {
                "at_s": probe.at_s,
                "curves": [asdict(c) for c in probe.curves],
            }
            given.json.write_text(json.dumps(figures, indent=1))
        if given.svg is not None:
            draw(report.title, probe.at_s, probe.curves, given.svg)
    return int(any(not target.met for target in report.targets))


if __name__ == "__main__":
    sys.exit(main())
