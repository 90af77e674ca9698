"""Measures the rebuild of a lost host's image from three other hosts, and the making of parity from
their images, over ``peer://``.

Each host is a process that serves its memory on loopback, so they share the processors with the
measured process. A rebuilt image is checked against its label.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from ..core.units import ceil_div, round_up
from ..drivers.options import option_values
from ..drivers.peer.driver import PeerDriver
from ..drivers.uri import parse as parse_uri
from ..errors import NotFoundError
from ..planner.image import BLOCK_NBYTES, CHUNK_NBYTES, DIGEST_NBYTES, PAGE_NBYTES
from ..planner.parity import Lane, ParityBlock
from ..storage.arenas.hosts import GuardedGroup
from ..storage.arenas.label import GenerationId, Label
from ..storage.arenas.memory import Memory, reserved_memory
from ..storage.keeper.options import ServeOptions, new_token
from ..storage.keeper.parity.combining import Block
from ..storage.keeper.parity.guarding import guard, image_nbytes, rebuild
from ..storage.keeper.sealing import seal
from ..storage.keeper.serving.memory_catalog import Content, Item
from ..storage.keeper.serving.serve import serve
from ..storage.runtime.engine import run as run_async
from .contest import Contestant, contest
from .program import GIB, Options, Program
from .report import OURS, Report, Series

__all__: list[str] = []

RUN = "run"
GENERATION = GenerationId(1, 1)
GROUP = GuardedGroup("xor", ("a", "b", "c", "d"), ((0,), (1,), (2,), (3,)))
LOST = 0
LEFT = (1, 2, 3)
PULLED_PER_BYTE = 3
"""Bytes pulled per rebuilt byte: two data blocks and one parity block."""
GUARD = "parity"


def _key_of(block: Block) -> str:
    """Return the key of the object that contains a block."""
    if isinstance(block, ParityBlock):
        return f"{block.member}/parity-{block.stripe}-{block.row}"
    return f"{block.member}/image"


def _label_key(rank: int) -> str:
    return f"{rank}/label"


class _Shelf:
    """Objects in memory, by their keys below :data:`RUN`."""

    def __init__(self, objects: Mapping[str, memoryview]) -> None:
        self.objects = objects

    def listing(self) -> Sequence[Item]:
        """See ``Catalog``."""
        return [Item(f"{RUN}/{key}", len(view), 0.0) for key, view in self.objects.items()]

    @contextmanager
    def open(self, key: str) -> Iterator[Content]:
        """See ``Catalog``."""
        view = self.objects.get(key.removeprefix(f"{RUN}/"))
        if view is None:
            raise NotFoundError("no such object", key=key)
        yield Content(view, 0.0)

    def status(self) -> Mapping[str, object]:
        """See ``Catalog``."""
        return {}

    def metrics(self) -> str:
        """See ``Catalog``."""
        return ""


async def _image(rank: int, nbytes: int) -> tuple[Memory, Label]:
    """Return a sealed image of random bytes."""
    hashed_end = round_up(nbytes, PAGE_NBYTES)
    memory = reserved_memory(hashed_end + DIGEST_NBYTES * ceil_div(hashed_end, BLOCK_NBYTES))
    random = np.random.default_rng(rank)
    for start in range(0, nbytes, CHUNK_NBYTES):
        part = memory.view[start : min(start + CHUNK_NBYTES, nbytes)]
        part[:] = random.bytes(len(part))
    draft = Label(
        run=RUN,
        generation=GENERATION,
        rank=rank,
        world=len(GROUP.names),
        nbytes=memory.nbytes,
        hashed_end=hashed_end,
        chunk_nbytes=CHUNK_NBYTES,
        block_nbytes=BLOCK_NBYTES,
        created_s=0.0,
    )
    digests = await seal(memory, hashed_end, CHUNK_NBYTES, BLOCK_NBYTES)
    return memory, replace(draft, digests=digests)


async def _objects(nbytes: int) -> tuple[dict[str, Memory], dict[str, bytes]]:
    """Return all images of ``nbytes`` with all their parity, and the labels."""
    images, labels = {}, {}
    for rank in range(len(GROUP.names)):
        images[rank], label = await _image(rank, nbytes)
        labels[rank] = label.encode()

    async def pull(member: int, lane: int, block: Block, start: int, into: memoryview) -> None:
        assert not isinstance(block, ParityBlock)
        begin = block.start + start
        into[:] = images[member].view[begin : begin + len(into)]

    objects = {f"{rank}/image": memory for rank, memory in images.items()}
    for member in range(len(GROUP.names)):
        held = await guard(GROUP, member, GENERATION, labels, pull, reserved_memory)
        for parity in held.parities:
            assert parity.memory is not None
            objects[_key_of(parity.block)] = parity.memory
    return objects, {_label_key(rank): label for rank, label in labels.items()}


def _serve_group(nbytes: int, token: str, members: Sequence[int]) -> None:
    """Serve the memory of these ``members`` of a group, each in its own process, until standard
    input ends. Images have ``nbytes``. Each member prints its number and
    the port of its server."""
    objects, labels = asyncio.run(_objects(nbytes))
    children = []
    for member in members:
        child = os.fork()  # no thread of the work so far is left
        if not child:
            asyncio.run(_serve_member(member, token, objects, labels))
            return
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


async def _serve_member(
    member: int, token: str, objects: Mapping[str, Memory], labels: Mapping[str, bytes]
) -> None:
    # A forked process has the memory's descriptors, but not its mappings.
    held = {
        key: Memory(os.dup(memory.fd), memory.nbytes, writable=False).view
        for key, memory in objects.items()
        if key.startswith(f"{member}/")
    }
    held.update({key: memoryview(label) for key, label in labels.items()})
    async with serve(cast(Any, _Shelf(held)), ServeOptions(token)) as server:
        # One write, because print may write the words separately, mixed with other members'
        # output.
        os.write(sys.stdout.fileno(), f"{member} {server.port}\n".encode())
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class _Peers:
    """The three surviving hosts, as drivers."""

    def __init__(self, ports: Mapping[int, int], token: str) -> None:
        self._drivers = {}
        for member, port in ports.items():
            uri = parse_uri(f"peer://127.0.0.1:{port}/{RUN}")
            values = {**option_values(PeerDriver.OPTIONS, uri), "token": token}
            self._drivers[member] = PeerDriver(uri, values)
        self.labels = run_async(self._labels())
        self.label = Label.decode(self.labels[LOST])
        self._image = reserved_memory(self.label.nbytes)

    async def _labels(self) -> dict[int, bytes]:
        (driver, *_) = self._drivers.values()
        return {rank: await driver.get(_label_key(rank)) for rank in range(len(GROUP.names))}

    async def _pull(
        self, member: int, lane: int, block: Block, start: int, into: memoryview
    ) -> None:
        at = start + getattr(block, "start", 0)
        await self._drivers[member].read(_key_of(block), at, into)

    @property
    def lane(self) -> Lane:
        """The lane of the images."""
        sizes = {rank: image_nbytes(Label.decode(label)) for rank, label in self.labels.items()}
        (lane,) = GROUP.lanes(sizes)
        return lane

    def rebuild(self) -> None:
        """Rebuild the lost image."""
        run_async(rebuild(GROUP, LOST, [LOST], self.labels, self._pull, self._image))

    def guard(self) -> None:
        """Make the parity that the lost host would hold, and discard it."""
        run_async(guard(GROUP, LOST, GENERATION, self.labels, self._pull, reserved_memory)).close()

    def close(self) -> None:
        """Close the drivers."""
        run_async(self._close())
        self._image.close()

    async def _close(self) -> None:
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))


@contextmanager
def _served(nbytes: int, token: str) -> Iterator[dict[int, int]]:
    """Start the surviving hosts, and yield the ports of their servers."""
    command = [sys.executable, "-m", "holdfast.bench.rebuild", "--serve", str(nbytes), token]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        try:
            told = [serving.stdout.readline().split() for _ in LEFT]
            if not all(told):
                raise RuntimeError("the hosts to be measured did not start")
            yield {int(member): int(port) for member, port in told}
        finally:
            serving.stdin.close()


def _report(given: Options, folder: Path) -> Report:
    token = new_token()
    with _served(int(given.gib * GIB) // PULLED_PER_BYTE, token) as ports:
        peers = _Peers(ports, token)
        lane = peers.lane
        (own,) = lane.held_by(LOST)
        ways: dict[str, tuple[Sequence[Block], Callable[[], None]]] = {
            OURS: (lane.to_pull([LOST], LOST), peers.rebuild),
            GUARD: (lane.data(own.stripe), peers.guard),
        }
        try:
            contestants = [Contestant(name, way) for name, (_, way) in ways.items()]
            found = contest(contestants, given.runs, given.settle_s)
        finally:
            peers.close()
    return Report(
        "Hosts protected by XOR in a group of four: an image of "
        f"{peers.label.nbytes / 1e9:.2f} GB, {given.runs} rounds",
        ["", "median s", "GB/s pulled", "own CPU s per GiB", "all CPU s per GiB"],
        [_row(series, sum(block.nbytes for block in ways[series.name][0])) for series in found],
        series=found,
    )


def _row(series: Series, nbytes: int) -> list[str]:
    gib = nbytes / GIB
    return [
        series.name,
        f"{series.median:.3f}",
        f"{nbytes / series.median / 1e9:.2f}",
        f"{median(series.own_processor_s) / gib:.2f}",
        f"{median(series.all_processor_s) / gib:.2f}",
    ]


PROGRAM = Program("rebuild", __doc__, _report, gib=1.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises DamagedError if the rebuilt image is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--serve"]:
        _, nbytes, token = arguments
        _serve_group(int(nbytes), token, LEFT)
        return 0
    return PROGRAM(arguments)


if __name__ == "__main__":
    sys.exit(main())
