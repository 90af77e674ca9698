"""Measures the cost of parity: XOR of three blocks, P and Q of four, and the rebuild of a block,
next to a memcpy of the same size.

All of it runs on one thread, and times are processor times, which other load affects least. The
blocks are far larger than caches. The memcpy copies 16 MiB at a time, like a save; larger calls
bypass the cache and are faster on some machines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ..storage.keeper.parity.galois import Bytes, make_q, make_xor, recover
from ..storage.runtime.buffers import HostBuffer
from .contest import Contestant, contest
from .program import GIB, Options, Program
from .ratios import median_ratio
from .report import Report, Series, Target

__all__: list[str] = []

MEMCPY = "memcpy"
MEMCPY_CALL_NBYTES = 16 << 20
XOR_BLOCKS = 3
PQ_BLOCKS = 4
CHECKED_NBYTES = 1 << 20
"""Bytes to check at the beginning and at the end of each result."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class _Way:
    """One way to make parity or a block. ``share_min`` is its promised rate in units of memcpy, if
    any."""

    name: str
    share_min: float | None
    run: Callable[[], None]
    check: Callable[[], None]
    before: Callable[[], None] = _nothing


class _Memory:
    """Warm memory: random data, and room for the results."""

    def __init__(self, nbytes: int) -> None:
        unit = nbytes // (XOR_BLOCKS * PQ_BLOCKS) // 4096 * 4096
        self.nbytes = unit * XOR_BLOCKS * PQ_BLOCKS
        self._data = _allocated(self.nbytes)
        pattern = np.random.default_rng(0).integers(0, 256, unit, dtype=np.uint8)
        for number, start in enumerate(range(0, self.nbytes, unit)):
            np.add(pattern, np.uint8(number), out=self._data[start : start + unit])
        self.p, self.q, self.out = (_allocated(self.nbytes // XOR_BLOCKS) for _ in range(3))

    def blocks(self, count: int) -> list[Bytes]:
        """Return the data as ``count`` blocks."""
        return list(self._data.reshape(count, -1))

    def copy(self) -> None:
        """Copy all data into memory that is reused."""
        for block in self.blocks(XOR_BLOCKS):
            for start in range(0, len(block), MEMCPY_CALL_NBYTES):
                stop = start + MEMCPY_CALL_NBYTES
                np.copyto(self.out[start:stop], block[start:stop])


def _allocated(nbytes: int) -> Bytes:
    memory = np.frombuffer(HostBuffer.allocate(nbytes).view, np.uint8)
    memory.fill(0xAA)
    return memory


def _ways(memory: _Memory) -> list[_Way]:
    pq = _pq_way(memory)
    return [_xor_way(memory), pq, _rebuild_way(memory, pq.run)]


def _xor_way(memory: _Memory) -> _Way:
    blocks = memory.blocks(XOR_BLOCKS)

    def run() -> None:
        make_xor(memory.p, blocks)

    def check() -> None:
        for ends in _ends(memory.p, *blocks):
            _compare(ends[0], np.bitwise_xor.reduce(ends[1:]))

    return _Way("XOR 3+1", 1.0, run, check)


def _pq_way(memory: _Memory) -> _Way:
    blocks = memory.blocks(PQ_BLOCKS)
    size = len(blocks[0])

    def run() -> None:
        make_xor(memory.p[:size], blocks)
        make_q(memory.q[:size], blocks)

    def check() -> None:
        """Check that two blocks follow from the others, P and Q."""
        for p, q, *ends in _ends(memory.p[:size], memory.q[:size], *blocks):
            made = np.empty_like(p)
            recover(made, 1, {0: ends[0], 3: ends[3]}, {0: p, 1: q}, (1, 2))
            _compare(made, ends[1])

    return _Way("P+Q 4+2", 0.33, run, check)


def _rebuild_way(memory: _Memory, make_parity: Callable[[], None]) -> _Way:
    """Rebuild one of two lost blocks: the most expensive case, with four blocks in and one out."""
    blocks = memory.blocks(PQ_BLOCKS)
    size = len(blocks[0])
    out = memory.out[:size]

    def run() -> None:
        parity = {0: memory.p[:size], 1: memory.q[:size]}
        recover(out, 1, {0: blocks[0], 3: blocks[3]}, parity, (1, 2))

    def check() -> None:
        _compare(out, blocks[1])

    return _Way("one of two lost of 4+2", None, run, check, make_parity)


def _ends(*arrays: Bytes) -> list[list[Bytes]]:
    """Return the first and the last bytes of all arrays."""
    return [
        [array[:CHECKED_NBYTES] for array in arrays],
        [array[-CHECKED_NBYTES:] for array in arrays],
    ]


def _compare(made: Bytes, expected: Bytes) -> None:
    if not np.array_equal(made, expected):
        raise AssertionError("the parity that was made is wrong")


def _report(given: Options, folder: Path) -> Report:
    memory = _Memory(int(given.gib * GIB))
    ways = _ways(memory)
    contestants = [
        Contestant(MEMCPY, memory.copy),
        *(Contestant(way.name, way.run, way.before, way.check) for way in ways),
    ]
    found = contest(contestants, given.runs, given.settle_s)
    copied_s = found[0].own_processor_s
    shares = [median_ratio(copied_s, series.own_processor_s) for series in found]
    targets = [
        Target(f"{way.name}: of the rate of a memcpy", share, way.share_min, at_least=True)
        for way, share in zip(ways, shares[1:], strict=True)
        if way.share_min is not None
    ]
    return Report(
        f"Parity: {memory.nbytes / 1e9:.2f} GB of data, one thread, {given.runs} rounds",
        ["", "CPU s", "GB/s", "of memcpy"],
        [_row(series, share, memory.nbytes) for series, share in zip(found, shares, strict=True)],
        targets,
        series=found,
    )


def _row(series: Series, share: float, nbytes: int) -> list[str]:
    busy_s = median(series.own_processor_s)
    return [series.name, f"{busy_s:.3f}", f"{nbytes / busy_s / 1e9:.2f}", f"{share:.2f}"]


main = Program("parity", __doc__, _report, gib=1.0)


if __name__ == "__main__":
    sys.exit(main())
