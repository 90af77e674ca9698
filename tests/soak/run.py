"""An hour of everything at once: saves, overwrites, loads, copies, deletions and kills at random, on
storage that fails.

make soak                        an hour on a local folder and on an S3 server of its own
make soak MINUTES=1              a minute
make soak URI=s3://bucket/path   on your own S3
make soak SEED=n                 what was done with that seed, in the same order

After each operation every checkpoint that it has touched is loaded again: it must be one that may
be there, bit for bit. Memory, handles, threads, and bytes that belong to no checkpoint must not
rise. Where there is no S3 server, this process's memory takes its place.
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
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests find what they share

from support.servers.start import FINDERS, started
from support.soak.curves import Curve, Probe, draw, process_curves
from support.soak.world import OPERATIONS, Ground, World, shorten_grace

from holdfast.bench.machine import describe, share_heap
from holdfast.bench.program import work_folder
from holdfast.bench.report import Report
from holdfast.drivers.uri import Uri, join, parse

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
    name = f"soak-{secrets.token_hex(4)}"
    with _s3_root(uri) as root:
        if root is not None:
            other = Ground("s3", join(root, name), REMOTE_FAULTS, shared=True)
        else:
            print(
                "No S3 server here: local and memory only (make test-servers, or URI=…).",
                flush=True,
            )
            other = Ground("memory", parse(f"memory://{name}"), LOCAL_FAULTS, shared=False)
        yield [local, other]


@contextlib.contextmanager
def _s3_root(uri: str | None) -> Iterator[Uri | None]:
    """Where S3 can be used: at ``uri``, else on a server that runs as long as this; None where
    neither is to be had."""
    if uri is not None:
        yield parse(uri)
    elif FINDERS["s3"]() is None:
        yield None
    else:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            started("s3", Path(folder)) as (root, environment),
        ):
            os.environ.update(environment)
            yield parse(root)


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
        f"Soak: {count:,} operations in {minutes:.1f} minutes on {where}, --seed {world.seed}",
        ["", "operations", "made to fail", "median s", "max s"],
        [tally.row(name) for name, tally in tallies.items()],
        [curve.target() for curve in probe.curves],
        notes,
        machine=describe(folder),
        program="soak",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument(
        "--seed", type=int, help="repeat what was done with it (default: a new one)"
    )
    parser.add_argument(
        "--uri",
        default=os.environ.get("HOLDFAST_TEST_S3_URL"),
        help="an S3 root to use (default: HOLDFAST_TEST_S3_URL, else a server is started)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        help="where to write; removed afterwards (default: here)",
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--svg", type=Path, help="also draw the curves (needs matplotlib)")
    return parser.parse_args()


def main() -> int:
    """Work, and print; 1 if a curve rises. Raises AssertionError where a checkpoint is not what it
    must be."""
    given = _arguments()
    seed = given.seed
    if seed is None:
        seed = secrets.randbelow(1 << 32)
    print(f"--seed {seed}", flush=True)
    shorten_grace()
    share_heap()
    with work_folder(given.dir) as folder, _grounds(folder, given.uri) as grounds:
        world = World(grounds, SLOTS, seed)
        tallies, probe = _soak(world, given.minutes)
        report = _report(world, tallies, probe, folder)
    report.emit(None)
    if given.json is not None:
        figures = asdict(report) | {
            "at_s": probe.at_s,
            "curves": [asdict(curve) for curve in probe.curves],
        }
        given.json.write_text(json.dumps(figures, indent=1))
    if given.svg is not None:
        draw(report.title, probe.at_s, probe.curves, given.svg)
    return int(any(not target.met for target in report.targets))


if __name__ == "__main__":
    sys.exit(main())
