"""Measures saves and loads of a whole state over S3: this library, its peers, and the bare client
at its best setting; then ten thousand small objects (see ``many``).

The limit is the bare client when it moves the state: out of the tensors, joined into parts, and
back. Two variants show its costs: the client that sends the same random bytes over and over and
discards received ones ("no tensors"), and the client that also computes the checksums of saves and
loads ("checked"). None of them writes a format, or compares what it reads.

``--uri`` names an S3 root, below which everything is deleted again. ``make bench-server
PROGRAM=objects`` starts a server first, which then shares this machine with its clients.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import holdfast

from ..drivers.uri import Uri, join, parse
from .clearing import clear
from .content import Checked, StateBytes
from .contest import CHECKED, NO_TENSORS, Contestant, busy, contest, header, rows, shares
from .limit.objects import Bare, settings
from .limit.sweep import fastest_reader, fastest_writer
from .machine import describe
from .many import many_objects
from .options import TINY_GIB, Options, options, parser
from .peers.choice import beside_ours
from .peers.peer import Peer
from .report import LIMIT, Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero

__all__: list[str] = []


def _saving(peer: Peer, uri: Uri, state: State) -> Contestant:
    return Contestant(peer.name, lambda: peer.save(uri, state), after=lambda: clear(uri))


def _loading(peer: Peer, uri: Uri, state: State, expected: dict[str, bytes]) -> Contestant:
    """Save now, and return a contestant that loads."""
    peer.save(uri, state)

    def after() -> None:
        if digests(state) != expected:
            raise AssertionError(f"{peer.name}: what was loaded is not what was saved")

    return Contestant(peer.name, lambda: peer.load(uri, state), lambda: zero(state), after)


def _moving(
    uri: Uri, given: Options, kind: str, others: Sequence[Peer]
) -> tuple[list[Series], int]:
    """Run the contest of saves or of loads. Return the times, and the bytes moved."""
    state = build(given.gib)
    nbytes = nbytes_of(state)
    expected = digests(state)
    reading = kind == "load"
    bare = _fastest(_below(uri, "bare"), nbytes, given, reading=reading)
    made = _clients(bare, state, expected, reading=reading)
    if reading:
        made += [_loading(peer, _below(uri, peer.name), state, expected) for peer in others]
        holdfast.release_memory()  # or the load would reuse, uncounted, memory kept from the save
    else:
        made += [_saving(peer, _below(uri, peer.name), state) for peer in others]
    found = contest(made, given.runs, given.settle_s)
    bare.remove()
    for peer in others:
        clear(_below(uri, peer.name))
    return found, nbytes


def _fastest(uri: Uri, nbytes: int, given: Options, *, reading: bool) -> Bare:
    """Return the bare client with its fastest setting here."""
    tried = settings(uri, nbytes)
    if given.tiny:
        tried = tried[:1]
    if reading:
        return fastest_reader(tried, settle_s=given.settle_s, make_cold=lambda: None, say=_say)
    return fastest_writer(tried, settle_s=given.settle_s, say=_say)


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _below(uri: Uri, name: str) -> Uri:
    """Return a separate root for a contestant."""
    return join(uri, name.replace(" ", "").replace(",", "-"))


def _clients(
    bare: Bare, state: State, expected: dict[str, bytes], *, reading: bool
) -> list[Contestant]:
    """Return the bare client in the three modes of the module's docstring."""
    limit = replace(bare, content=lambda: StateBytes(state))
    checked = replace(bare, content=lambda: Checked(StateBytes(state)))
    if not reading:
        return [
            Contestant(LIMIT, limit.write),
            Contestant(NO_TENSORS, bare.write),
            Contestant(CHECKED, checked.write),
        ]
    limit.write()

    def before() -> None:
        zero(state)

    def after() -> None:
        if digests(state) != expected:
            raise AssertionError("the client alone: what was placed is not what was sent")

    return [
        Contestant(LIMIT, limit.read, before, after),
        Contestant(NO_TENSORS, bare.read),
        Contestant(CHECKED, checked.read, before, after),
    ]


def _able(uri: Uri, alone: bool) -> tuple[list[Peer], list[str]]:
    """Return the peers that can save and load here, and why the others cannot. This also imports
    the peers and starts their threads before any timing."""
    state = build(TINY_GIB)
    expected = digests(state)
    able = []
    notes = []
    for peer in beside_ours(uri, alone=alone):
        try:
            contestant = _loading(peer, _below(uri, "warm-" + peer.name), state, expected)
            contestant.before()
            contestant.run()
            contestant.after()
        except Exception as error:
            if peer.name == "holdfast":
                raise
            notes.append(f"not measured: {peer.name}: {str(error).strip().splitlines()[-1]}")
        else:
            able.append(peer)
        clear(_below(uri, "warm-" + peer.name))
    return able, notes


def _targets(found: Sequence[Series], kind: str) -> list[Target]:
    by_name = {series.name: series for series in found}
    ours = by_name["holdfast"]
    out = [
        Target(
            f"{kind}: share of the client's rate",
            ratio(by_name[LIMIT], ours),
            0.9,
            at_least=True,
        )
    ]
    if "DCP, s3fs" in by_name:
        out.append(
            Target(
                f"{kind}: times faster than DCP",
                ratio(by_name["DCP, s3fs"], ours),
                2.0,
                at_least=True,
            )
        )
    return out


def _report(uri: Uri, given: Options) -> Report:
    others, notes = _able(uri, given.alone)
    holdfast.release_memory()
    table: list[list[str]] = []
    targets: list[Target] = []
    series: list[Series] = []
    for kind in ("save", "load"):
        found, nbytes = _moving(uri, given, kind, others)
        table += [[f"{kind}: {row[0]}", *row[1:]] for row in rows(found, nbytes)]
        targets += _targets(found, kind)
        notes.append(shares(found, kind))
        series += [replace(s, name=f"{kind}: {s.name}") for s in found]
    many = many_objects(uri, tiny=given.tiny)
    title = f"Over S3: {nbytes / 1e9:.2f} GB, one process, {given.runs} rounds"
    notes += [*busy(series, nbytes), many]
    if given.tiny:
        judged = []
    else:
        judged = targets
    return Report("objects", title, describe(Path()), header(), table, judged, notes, series)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises AssertionError if a state comes back changed."""
    arguments = parser("objects", __doc__, gib=1.0, runs=5)
    arguments.add_argument("--uri", required=True, help="an S3 root to use: s3://bucket/path")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    root = join(parse(parsed.uri), f"bench-{uuid.uuid4().hex}")
    _report(root, given).emit(given.json, given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
