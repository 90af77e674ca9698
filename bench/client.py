"""Measures saves and loads of a whole state over a network, next to the plain client with the
fastest setting: obstore for object stores, hdfs-native for HDFS.

The limit is the client when it moves the state: out of the tensors, and back. Two variants show its
costs: the client that sends the same random bytes over and over and discards received ones ("no
tensors"), and the client that also computes the checksums of saves and loads ("checked"). None of
them writes a format, or compares what it reads.

``--uri`` names a folder, below which everything is deleted again. ``make bench-server
PROGRAM=client SERVER=s3`` starts a server first, which then shares this machine with its clients.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import holdfast

from ..drivers.uri import Uri, join, parse
from ..errors import UsageError
from .clearing import clear
from .content import Checked, Content, StateBytes
from .contest import Contestant, contest, header, rows
from .limit.objects import Bare
from .limit.of import limit_of
from .limit.streams import Streams
from .program import GIB, TINY_GIB, Options, Program
from .report import LIMIT, OURS, Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero

__all__: list[str] = []

NO_TENSORS = "no tensors"
CHECKED = "checked"
HDFS_REST_S = 6.0
"""Rest before a save to HDFS. DataNodes learn every three seconds which blocks the previous save
has replaced, and are then busy deleting them."""


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _ways(client: object, state: State) -> dict[str, Bare | Streams]:
    """Return the client in the three modes of the module's docstring."""
    if not isinstance(client, Bare | Streams):
        raise UsageError(
            "no plain client moves tensors to this storage",
            advice="Give a URI of an object store or of HDFS, or use `holdfast bench`.",
        )

    def moving(content: Callable[[], Content]) -> Bare | Streams:
        return replace(client, content=content)

    return {
        LIMIT: moving(lambda: StateBytes(state)),
        NO_TENSORS: client,
        CHECKED: moving(lambda: Checked(StateBytes(state))),
    }


def _measure(uri: Uri, state: State, given: Options) -> dict[str, list[Series]]:
    """Return the times of saves and of loads."""
    saved = str(join(uri, "saved"))
    expected = digests(state)

    def check() -> None:
        if digests(state) != expected:
            raise AssertionError("what was loaded is not what was saved")

    # The first saves trigger imports, and let the servers compile their code.
    holdfast.save(saved, build(TINY_GIB))
    holdfast.save(saved, state)
    limit = limit_of(join(uri, "bare"), nbytes_of(state), say=_say)
    writing = _ways(limit.writing, state)
    saving = [
        *(Contestant(name, way.write) for name, way in writing.items()),
        Contestant(OURS, lambda: _save(saved, state)),
    ]
    rest_s = given.settle_s
    if uri.scheme == "hdfs" and not given.tiny:
        rest_s = HDFS_REST_S
    found = {"save": contest(saving, given.runs, rest_s)}
    reading = _ways(limit.reading, state)
    reading[LIMIT].write()
    holdfast.release_memory()  # or the load would reuse, uncounted, memory kept from the save
    empty = partial(zero, state)
    loading = [
        Contestant(LIMIT, reading[LIMIT].read, empty, check),
        Contestant(NO_TENSORS, reading[NO_TENSORS].read),
        Contestant(CHECKED, reading[CHECKED].read, empty, check),
        Contestant(OURS, lambda: _load(saved, state), empty, check),
    ]
    found["load"] = contest(loading, given.runs, given.settle_s)
    return found


def _save(uri: str, state: State) -> None:
    holdfast.save(uri, state)


def _load(uri: str, state: State) -> None:
    holdfast.load(uri, into=state)


def _report(given: Options, folder: Path) -> Report:
    state = build(given.gib)
    nbytes = nbytes_of(state)
    uri = join(parse(given.own.uri), f"bench-{uuid.uuid4().hex}")
    try:
        found = _measure(uri, state, given)
    finally:
        clear(uri)
    report = Report(
        f"Over {uri.scheme}: {nbytes / 1e9:.2f} GB, one process, {given.runs} rounds", header(), []
    )
    for kind, series in found.items():
        report.rows += [[f"{kind}: {row[0]}", *row[1:]] for row in rows(series, nbytes)]
        report.series += [replace(s, name=f"{kind}: {s.name}") for s in series]
        by_name = {s.name: s for s in series}
        shares = {name: ratio(by_name[name], by_name[OURS]) for name in by_name if name != OURS}
        report.targets.append(
            Target(f"{kind}: share of the client's rate", shares[LIMIT], 0.9, at_least=True)
        )
        report.notes.append(
            f"{kind}: share of the rate of the client without tensors: "
            f"{shares[NO_TENSORS]:.2f}; with checksums: {shares[CHECKED]:.2f}"
        )
    report.notes += [_busy(series, nbytes) for series in report.series]
    return report


def _busy(series: Series, nbytes: int) -> str:
    """Return a line on processor time. If client and servers share a machine, a slower contestant
    may only have more to do."""
    gib = nbytes / GIB
    count = os.cpu_count() or 1
    own_s, all_s = median(series.own_processor_s), median(series.all_processor_s)
    return (
        f"{series.name}: processor time per GiB: {own_s / gib:.2f} s its own, {all_s / gib:.2f} s "
        f"with servers and system, which is {all_s / (count * series.median):.0%} of what {count} "
        "processors had"
    )


main = Program(
    "client",
    __doc__,
    _report,
    gib=1.0,
    own=lambda parser: parser.add_argument(
        "--uri", required=True, help="where to measure, such as s3://bucket/path"
    ),
)


if __name__ == "__main__":
    sys.exit(main())
