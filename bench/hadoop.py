"""Measures saves and loads over HDFS by one process, next to four parallel hdfs-native streams of
the same size; then ten thousand small objects (see ``many``).

The limit is the streams that move the state, out of the tensors and into them. Two variants show
its costs: streams that send the same random bytes over and over and discard received ones ("no
tensors"), and streams that also compute the checksums of saves and loads ("checked").

``--uri`` names a file system, in which a folder is made and deleted again. ``make bench-server
PROGRAM=hadoop SERVER=hdfs`` starts a Hadoop first, which then shares processors and disk with its
client.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace

import holdfast

from ..drivers.uri import Uri, join, parse
from .clearing import clear
from .content import Checked, StateBytes
from .contest import CHECKED, NO_TENSORS, Contestant, busy, contest, header, rows, shares
from .limit.streams import connected_streams
from .machine import describe
from .many import many_objects
from .options import TINY_GIB, Options, options, parser
from .report import LIMIT, OURS, Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero

__all__: list[str] = []

STREAMS = 4
DELETED_S = 6.0
"""Rest before a save. DataNodes learn every three seconds which blocks the previous save has
replaced, and are then busy deleting them."""


def _measure(uri: Uri, given: Options) -> tuple[int, list[Series], list[Series], str]:
    """Return the size of the state, the times of its saves and loads, and a sentence on many small
    objects."""
    saved = str(join(uri, "saved"))
    try:
        # The first saves trigger imports, and let the servers compile their code.
        holdfast.save(saved, build(TINY_GIB))
        state = build(given.gib)
        holdfast.save(saved, state)
        nbytes = nbytes_of(state)
        expected = digests(state)
        bare = replace(connected_streams(join(uri, "limit"), nbytes), streams=STREAMS)
        ways = {
            LIMIT: replace(bare, content=lambda: StateBytes(state)),
            NO_TENSORS: bare,
            CHECKED: replace(bare, content=lambda: Checked(StateBytes(state))),
        }
        ways[LIMIT].write()
        saving = [
            *(Contestant(name, streams.write) for name, streams in ways.items()),
            Contestant(OURS, lambda: _save(saved, state)),
        ]
        if given.tiny:
            rest_s = given.settle_s
        else:
            rest_s = DELETED_S
        written = contest(saving, given.runs, rest_s)
        ways[LIMIT].write()

        def before() -> None:
            zero(state)

        def after() -> None:
            _check(state, expected)

        loading = [
            Contestant(LIMIT, ways[LIMIT].read, before, after),
            Contestant(NO_TENSORS, ways[NO_TENSORS].read),
            Contestant(CHECKED, ways[CHECKED].read, before, after),
            Contestant(OURS, lambda: _load(saved, state), before, after),
        ]
        read = contest(loading, given.runs, given.settle_s)
        return nbytes, written, read, many_objects(join(uri, "many"), tiny=given.tiny)
    finally:
        clear(uri)


def _save(uri: str, state: State) -> None:
    holdfast.save(uri, state)


def _load(uri: str, state: State) -> None:
    holdfast.load(uri, into=state)


def _check(state: State, expected: dict[str, bytes]) -> None:
    if digests(state) != expected:
        raise AssertionError("what was loaded is not what was saved")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    arguments = parser("hadoop", __doc__, gib=2.0)
    arguments.add_argument("--uri", required=True, help="hdfs://host:port/folder to use")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    root = join(parse(parsed.uri), f"bench-{uuid.uuid4().hex}")
    _report(given, *_measure(root, given)).emit(given.json, given.svg)
    return 0


def _report(
    given: Options, nbytes: int, saving: list[Series], loading: list[Series], many: str
) -> Report:
    series: list[Series] = []
    table: list[list[str]] = []
    targets: list[Target] = []
    notes: list[str] = []
    for what, found in (("save", saving), ("load", loading)):
        series += [replace(s, name=f"{what}: {s.name}") for s in found]
        table += [[f"{what}: {row[0]}", *row[1:]] for row in rows(found, nbytes)]
        by_name = {series.name: series for series in found}
        share = ratio(by_name[LIMIT], by_name[OURS])
        notes.append(shares(found, what))
        targets.append(Target(f"{what}, as a share of four streams", share, 0.9, at_least=True))
    if given.tiny:
        targets = []
    title = (
        f"HDFS: {nbytes / 1e9:.2f} GB, one process, {given.runs} rounds; the limit is "
        f"{STREAMS} parallel streams, from tensors and into them"
    )
    notes += [*busy(series, nbytes), many]
    return Report("hadoop", title, describe(given.folder), header(), table, targets, notes, series)


if __name__ == "__main__":
    sys.exit(main())
