"""Digests of host memory, block by block: they detect changes where writes cannot be tracked.

Memory is read in a way that survives unmapping (:mod:`.process_memory`), by several threads if
there is much of it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...format.digest import digest
from ...runtime.engine import CPU_THREADS
from .process_memory import read

__all__ = ["BLOCK_NBYTES", "Block", "block_of", "copy_digest", "digests_of"]

BLOCK_NBYTES = 1 << 20
ALONE = 32
"""Up to this number of blocks, one thread reads them all."""

Block = tuple[int, int]
"""Address and number of bytes."""


def block_of(address: int, nbytes: int, number: int) -> Block:
    """Return block ``number`` of the memory at ``address``. The last one may be short."""
    first = number * BLOCK_NBYTES
    return address + first, min(BLOCK_NBYTES, nbytes - first)


def digests_of(memory: Sequence[Block], to: int | None = None) -> list[list[bytes]]:
    """Return the digests of the blocks of each part of ``memory``.

    With ``to``, also copy the parts back to back to that address. Raises GoneError.
    """
    counts = [-(-nbytes // BLOCK_NBYTES) for _, nbytes in memory]
    blocks = [
        block_of(address, nbytes, number)
        for (address, nbytes), count in zip(memory, counts, strict=True)
        for number in range(count)
    ]
    places: list[int | None] = [None] * len(blocks)
    if to is not None:
        sizes = [nbytes for _, nbytes in blocks]
        places = [to + before for before in itertools.accumulate(sizes[:-1], initial=0)]
    digests = iter(_in_threads([*zip(blocks, places, strict=True)]))
    return [list(itertools.islice(digests, count)) for count in counts]


def copy_digest(address: int, to: int, nbytes: int) -> bytes:
    """Copy memory to ``to`` and return the digest of the copy. Raises GoneError."""
    read(address, to, nbytes)
    return digest(memoryview((ctypes.c_char * nbytes).from_address(to)).cast("B"))


def _in_threads(jobs: Sequence[tuple[Block, int | None]]) -> list[bytes]:
    if len(jobs) <= ALONE:
        return _in_this_thread(jobs)
    size = -(-len(jobs) // (4 * CPU_THREADS))
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    with ThreadPoolExecutor(CPU_THREADS) as threads:
        try:
            done = threads.map(_in_this_thread, batches)
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            return _in_this_thread(jobs)
        return list(itertools.chain.from_iterable(done))


def _in_this_thread(jobs: Sequence[tuple[Block, int | None]]) -> list[bytes]:
    buffer = np.empty(BLOCK_NBYTES, np.uint8)  # fits in the processor's cache
    return [
        copy_digest(address, buffer.ctypes.data if to is None else to, nbytes)
        for (address, nbytes), to in jobs
    ]
