"""Save and load over HDFS by one process, beside four parallel hdfs-native streams of as many
bytes, which are the limit; then ten thousand small objects, see ``many``.

``--uri`` names a file system, in which one folder is made and deleted again. ``make bench-server
PROGRAM=hadoop SERVER=hdfs`` starts a Hadoop first, which then shares processors and disk with its
client.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import holdfast

from ..core.units import ceil_div
from ..drivers.uri import Uri, join, parse
from .contest import Contestant, busy, contest, header, rows
from .machine import describe
from .many import many_objects
from .options import TINY_GIB, Options, options, parser
from .report import Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero

if TYPE_CHECKING:
    from hdfs_native import Client

__all__: list[str] = []

STREAMS = 4
PIECE_NBYTES = 4 << 20


class _Streams:
    """Four files, each written and read by a thread, with hdfs-native alone: no format, no checksums
    of ours, no joining.

    hdfs-native verifies HDFS's own checksums here, too. What is read is dropped into 4 MiB that each
    thread uses again and again, and that stay in the processor's cache; a load keeps what it reads.
    """

    def __init__(self, client: Client, folder: str, nbytes: int) -> None:
        self._client = client
        self._folder = folder
        self._nbytes = ceil_div(nbytes, STREAMS)
        self._content = os.urandom(PIECE_NBYTES)

    def write(self) -> None:
        self._each(self._write)

    def read(self) -> None:
        self._each(self._read)

    def _each(self, work: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(STREAMS) as threads:
            list(threads.map(work, range(STREAMS)))

    def _write(self, number: int) -> None:
        from hdfs_native import WriteOptions

        options = WriteOptions(overwrite=True, create_parent=True)
        with self._client.create(f"{self._folder}/{number}", options) as file:
            for start in range(0, self._nbytes, PIECE_NBYTES):
                file.write(self._content[: self._nbytes - start])

    def _read(self, number: int) -> None:
        into = memoryview(bytearray(PIECE_NBYTES))
        at = 0
        for piece in self._client.read(f"{self._folder}/{number}").read_range_stream(
            0, self._nbytes
        ):
            if at + len(piece) > PIECE_NBYTES:
                at = 0
            into[at : at + len(piece)] = piece
            at += len(piece)


def _measure(uri: Uri, given: Options) -> tuple[int, list[Series], list[Series], str]:
    """The size of the state, the times of saving and of loading it, and a sentence about many small
    objects."""
    from hdfs_native import Client

    authority, _, path = uri.location.partition("/")
    client = Client(f"hdfs://{authority}")
    saved = str(join(uri, "saved"))
    try:
        # The first save imports what is needed, and warms up the servers.
        holdfast.save(saved, build(TINY_GIB))
        state = build(given.gib)
        nbytes = nbytes_of(state)
        expected = digests(state)
        streams = _Streams(client, f"/{path}/limit", nbytes)
        streams.write()
        saving = [
            Contestant("limit", streams.write),
            Contestant("holdfast", lambda: _save(saved, state)),
        ]
        written = contest(saving, given.runs, given.settle_s)
        loading = [
            Contestant("limit", streams.read),
            Contestant(
                "holdfast",
                lambda: _load(saved, state),
                lambda: zero(state),
                lambda: _check(state, expected),
            ),
        ]
        read = contest(loading, given.runs, given.settle_s)
        return nbytes, written, read, many_objects(join(uri, "many"), tiny=given.tiny)
    finally:
        client.delete(f"/{path}", recursive=True)


def _save(uri: str, state: State) -> None:
    holdfast.save(uri, state)


def _load(uri: str, state: State) -> None:
    holdfast.load(uri, into=state)


def _check(state: State, expected: dict[str, bytes]) -> None:
    if digests(state) != expected:
        raise AssertionError("what was loaded is not what was saved")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; raises AssertionError where a state does not come back as it was."""
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
    for what, found in (("save", saving), ("load", loading)):
        series += [replace(s, name=f"{what}: {s.name}") for s in found]
        table += [[f"{what}: {row[0]}", *row[1:]] for row in rows(found, nbytes)]
        share = ratio(*found)
        targets.append(Target(f"{what}, as a share of four streams", share, 0.9, at_least=True))
    if given.tiny:
        targets = []
    title = (
        f"HDFS: {nbytes / 1e9:.2f} GB, one process, {given.runs} rounds; the limit is "
        f"{STREAMS} parallel streams"
    )
    notes = [*busy(series, nbytes), many]
    return Report("hadoop", title, describe(given.folder), header(), table, targets, notes, series)


if __name__ == "__main__":
    sys.exit(main())
