"""Save and load over HDFS by one process, beside four parallel hdfs-native streams of as many
bytes, which are the limit; and ten thousand small objects, see ``many``.

Against the file system that --uri or HOLDFAST_TEST_HDFS_URL names (host and port), else against a
Hadoop on this machine, which then shares processors and disk with its client; where that is not
installed (make test-servers) nothing is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import holdfast

from ..core.units import ceil_div
from ..drivers.uri import Uri, join, parse
from .contest import Contestant, busy, contest, header, rows
from .machine import describe
from .many import many_objects
from .options import TINY_GIB, Options, options, parser, work_folder
from .report import Report, Series, Target, ratio
from .states import State, build, digests, nbytes_of, zero

if TYPE_CHECKING:
    from hdfs_native import Client

__all__: list[str] = []

STREAMS = 4
PIECE_NBYTES = 4 << 20
SERVER = Path(__file__).parents[1] / "tests/support/servers/hadoop.py"


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
            at = 0 if at + len(piece) > PIECE_NBYTES else at
            into[at : at + len(piece)] = piece
            at += len(piece)


@contextmanager
def _server(given: str | None, folder: Path, datanodes: int) -> Iterator[str | None]:
    """The URI of a file system; None where none is to be had."""
    given = given or os.environ.get("HOLDFAST_TEST_HDFS_URL")
    if given is not None or not SERVER.exists():
        yield given
        return
    command = [sys.executable, str(SERVER), "--dir", str(folder), "--datanodes", str(datanodes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip() or None
        finally:
            process.stdin.close()


def _measure(uri: Uri, given: Options) -> tuple[int, list[Series], list[Series], str]:
    """The size of the state, then the times of saving and of loading it; and what came of many
    small objects."""
    from hdfs_native import Client

    authority, _, path = uri.location.partition("/")
    client = Client(f"hdfs://{authority}")
    saved = str(join(uri, "saved"))
    try:
        holdfast.save(
            saved, build(TINY_GIB)
        )  # everybody imports what they need, and the servers get warm
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
    arguments.add_argument(
        "--datanodes", type=int, default=1, help="of the server that is started (default: 1)"
    )
    arguments.add_argument("--uri", help="hdfs://host:port/folder of a file system of one's own")
    parsed = arguments.parse_args(argv)
    given = options(parsed)
    with work_folder(given.folder) as folder, _server(parsed.uri, folder, parsed.datanodes) as root:
        if root is None:
            print("No Hadoop here, nothing measured: make test-servers, or --uri.", flush=True)
            return 0
        nbytes, saving, loading, many = _measure(
            join(parse(root), f"bench-{uuid.uuid4().hex}"), given
        )
        sides = (("save", saving), ("load", loading))
        series = [replace(s, name=f"{what}: {s.name}") for what, found in sides for s in found]
        table = [
            [f"{what}: {row[0]}", *row[1:]] for what, found in sides for row in rows(found, nbytes)
        ]
        judged = [
            Target(f"{what}, as a share of four streams", ratio(*found), 0.9, at_least=True)
            for what, found in sides
        ]
        title = (
            f"HDFS: {nbytes / 1e9:.2f} GB, one process, {given.runs} rounds; the limit is "
            f"{STREAMS} parallel streams"
        )
        if given.tiny:
            judged = []
        report = Report(
            "hadoop",
            title,
            describe(folder),
            header(),
            table,
            judged,
            [*busy(series, nbytes), many],
            series,
        )
        report.emit(given.json, given.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
