"""Measures the rebuild of a lost host's image from three other hosts, and the making of parity from
their images: over ``peer://``, next to bare sockets that move the same bytes.

Each host is a process that serves its memory on loopback, so they share the processors with the
measured process. *Bare sockets* receive with as many threads as the drivers of three hosts, a
mebibyte at a time, and discard the data. A rebuilt image is checked against its label.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from ..drivers.options import option_values
from ..drivers.peer.driver import PeerDriver
from ..drivers.uri import parse as parse_uri
from ..planner.parity import Lane
from ..storage.arenas.label import Label
from ..storage.keeper.parity.combining import Block
from ..storage.keeper.parity.guarding import guard, image_nbytes, rebuild
from ..storage.keeper.serving.serve_options import new_token
from ..storage.runtime.engine import run
from .contest import Contestant, contest
from .guarded_group import (
    ASKED,
    GENERATION,
    GROUP,
    RUN,
    key_of,
    label_key,
    room,
    serve_group,
)
from .machine import describe
from .options import GIB, Options, options, parser, work_folder
from .report import LIMIT, OURS, Report, Series, Target, ratio

__all__: list[str] = []

LOST = 0
LEFT = (1, 2, 3)
PULLED_PER_BYTE = 3
"""Bytes pulled per rebuilt byte: two data blocks and one parity block."""
GUARD = "parity"
THREADS_PER_HOST = 4
_RECEIVED_NBYTES = 1 << 20
_ASKED_NBYTES = 4 << 20


@dataclass(frozen=True)
class _Way:
    """A way to move ``nbytes``."""

    name: str
    nbytes: int
    run: Callable[[], None]


class _Peers:
    """The three surviving hosts, as drivers."""

    def __init__(self, ports: Mapping[int, int], token: str) -> None:
        self._drivers = {}
        for member, port in ports.items():
            uri = parse_uri(f"peer://127.0.0.1:{port}/{RUN}")
            values = {**option_values(PeerDriver.OPTIONS, uri), "token": token}
            self._drivers[member] = PeerDriver(uri, values)
        self.labels = run(self._labels())
        self.label = Label.decode(self.labels[LOST])
        self._image = room(self.label.nbytes)

    async def _labels(self) -> dict[int, bytes]:
        (driver, *_) = self._drivers.values()
        return {rank: await driver.get(label_key(rank)) for rank in range(len(GROUP.names))}

    async def _pull(
        self, member: int, lane: int, block: Block, start: int, into: memoryview
    ) -> None:
        at = start + getattr(block, "start", 0)
        await self._drivers[member].read(key_of(block), at, into)

    @property
    def lane(self) -> Lane:
        """The lane of the images."""
        sizes = {rank: image_nbytes(Label.decode(label)) for rank, label in self.labels.items()}
        (lane,) = GROUP.lanes(sizes)
        return lane

    def rebuild(self) -> None:
        """Rebuild the lost image."""
        run(rebuild(GROUP, LOST, [LOST], self.labels, self._pull, self._image))

    def guard(self) -> None:
        """Make the parity that the lost host would hold, and discard it."""
        run(guard(GROUP, LOST, GENERATION, self.labels, self._pull, room)).close()

    def close(self) -> None:
        """Close the drivers."""
        run(self._close())
        self._image.close()

    async def _close(self) -> None:
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))


class _Bare:
    """Threads that receive the same blocks, each over its own connection."""

    def __init__(self, ports: Mapping[int, int], blocks: Sequence[Block]) -> None:
        self._shares: list[tuple[socket.socket, list[tuple[str, int, int]]]] = []
        for member, port in ports.items():
            ranges = list(_ranges([block for block in blocks if block.member == member]))
            for number in range(THREADS_PER_HOST):
                connection = socket.create_connection(("127.0.0.1", port))
                self._shares.append((connection, ranges[number::THREADS_PER_HOST]))
        self._threads = ThreadPoolExecutor(len(self._shares))

    def run(self) -> None:
        """Receive all blocks."""
        list(self._threads.map(self._receive, self._shares))

    def _receive(self, share: tuple[socket.socket, Sequence[tuple[str, int, int]]]) -> None:
        connection, ranges = share
        piece = memoryview(bytearray(_RECEIVED_NBYTES))
        for key, start, nbytes in ranges:
            connection.sendall(ASKED.pack(key.encode(), start, nbytes))
            left = nbytes
            while left:
                count = connection.recv_into(piece[: min(left, _RECEIVED_NBYTES)])
                if not count:
                    raise AssertionError("the bare server has ended")
                left -= count

    def close(self) -> None:
        """Close all connections."""
        self._threads.shutdown()
        for connection, _ in self._shares:
            connection.close()


def _ranges(blocks: Sequence[Block]) -> Iterator[tuple[str, int, int]]:
    """Yield ranges of about the size of a pull."""
    for block in blocks:
        first = getattr(block, "start", 0)
        for start in range(0, block.nbytes, _ASKED_NBYTES):
            nbytes = min(_ASKED_NBYTES, block.nbytes - start)
            yield key_of(block), first + start, nbytes


@contextmanager
def _served(nbytes: int, token: str) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Start the surviving hosts, and yield the ports of their keepers and of their bare servers."""
    command = [sys.executable, "-m", "holdfast.bench.rebuild", "--serve", str(nbytes), token]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        ports, bare_ports = {}, {}
        try:
            for _ in LEFT:
                found = serving.stdout.readline().split()
                if len(found) != 3:
                    raise RuntimeError("the hosts to be measured did not start")
                member, port, bare_port = map(int, found)
                ports[member], bare_ports[member] = port, bare_port
            yield ports, bare_ports
        finally:
            serving.stdin.close()


def _report(given: Options, machine: dict[str, str]) -> Report:
    image_nbytes = int(given.gib * GIB) // PULLED_PER_BYTE
    token = new_token()
    with _served(image_nbytes, token) as (ports, bare_ports):
        peers = _Peers(ports, token)
        lane = peers.lane
        blocks = lane.to_pull([LOST], LOST)
        bare = _Bare(bare_ports, blocks)
        (own,) = lane.held_by(LOST)
        moved = sum(block.nbytes for block in blocks)
        ways = [
            _Way(LIMIT, moved, bare.run),
            _Way(OURS, moved, peers.rebuild),
            _Way(GUARD, sum(block.nbytes for block in lane.data(own.stripe)), peers.guard),
        ]
        try:
            found = contest([Contestant(w.name, w.run) for w in ways], given.runs, given.settle_s)
        finally:
            bare.close()
            peers.close()
    targets = []
    if not given.tiny:
        name = "rebuild of an image, share of the rate of bare sockets"
        targets.append(Target(name, ratio(found[0], found[1]), 0.5, at_least=True))
    return Report(
        "rebuild",
        f"Hosts protected by XOR in a group of four: {moved / 1e9:.2f} GB pulled for an "
        f"image of {peers.label.nbytes / 1e9:.2f} GB, {given.runs} rounds",
        machine,
        ["", "median s", "GB/s pulled", "of the limit", "own CPU s per GiB", "all CPU s per GiB"],
        [_row(way, series, found[0], moved) for way, series in zip(ways, found, strict=True)],
        targets,
        series=found,
    )


def _row(way: _Way, series: Series, limit: Series, moved: int) -> list[str]:
    share = ratio(limit, series) * way.nbytes / moved
    gib = way.nbytes / GIB
    return [
        way.name,
        f"{series.median:.3f}",
        f"{way.nbytes / series.median / 1e9:.2f}",
        f"{share:.2f}",
        f"{median(series.own_processor_s) / gib:.2f}",
        f"{median(series.all_processor_s) / gib:.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Return 1 if a target was missed. Raises DamagedError if the rebuilt image
    is wrong."""
    arguments = parser("rebuild", __doc__, gib=1.5)
    arguments.add_argument("--serve", nargs=2, help="for internal use")
    parsed = arguments.parse_args(argv)
    if parsed.serve:
        nbytes, token = parsed.serve
        serve_group(int(nbytes), token, LEFT)
        return 0
    given = options(parsed)
    with work_folder(given.folder) as folder:
        report = _report(given, describe(folder))
    report.emit(given.json, given.svg)
    return int(any(not target.met for target in report.targets))


if __name__ == "__main__":
    sys.exit(main())
