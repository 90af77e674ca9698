"""The least that replicas on one host can take: each rank reads its part into shared memory, and
all copy everything.

Nothing is planned, verified or agreed upon. Ranks know where everything goes, the shared memory
exists and is warm, and the only message is which chunk has arrived. It goes into a pipe of each
rank, on which a thread waits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from ..core.units import ceil_div, round_up
from .limit.raw_file import RawFile
from .states import State, flat_tensors, nbytes_of

__all__ = ["BareReplicas"]

CHUNK_NBYTES = 4 << 20
READERS = 2
COPIERS = 1
"""Threads of each rank. On two cores, more copiers were slower, and other chunk sizes were no
faster."""
_COME = struct.Struct("<HH")  # rank, chunk; short enough for an atomic write to a pipe


class BareReplicas:
    """One rank's part. All ranks make one together, which writes the files to be read to
    ``folder``."""

    def __init__(self, folder: Path, state: State) -> None:
        self._rank = dist.get_rank()
        world = dist.get_world_size()
        self.nbytes = round_up(ceil_div(nbytes_of(state), world), CHUNK_NBYTES)
        """Bytes that this rank reads."""
        self._raw = RawFile(folder / f"part-{self._rank}", self.nbytes, preallocate=True)
        self._raw.write()
        memory = os.memfd_create("bare")
        os.ftruncate(memory, self.nbytes)
        os.mkfifo(folder / f"come-{self._rank}")
        shared: list[tuple[int, int]] = [(0, 0)] * world
        dist.all_gather_object(shared, (os.getpid(), memory))
        self._pipes = [os.open(folder / f"come-{rank}", os.O_RDWR) for rank in range(world)]
        self._parts = [_mapped(f"/proc/{pid}/fd/{fd}", self.nbytes) for pid, fd in shared]
        self._addresses = [
            ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in self._parts
        ]
        self._pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for key, piece in _pieces(state, self.nbytes):
            self._pieces.setdefault(key, []).append(piece)

    def run(self) -> None:
        """Read, announce chunks, and copy announced chunks until all have arrived."""
        fd = self._raw.open(os.O_RDONLY)
        chunks = [chunk for rank, chunk in self._pieces if rank == self._rank]
        with ThreadPoolExecutor(READERS) as reading, ThreadPoolExecutor(COPIERS) as copying:
            work = [reading.submit(self._read, fd, chunk) for chunk in chunks]
            work += [copying.submit(self._take) for _ in self._pieces]
            for each in work:
                each.result()
        os.close(fd)

    def _read(self, fd: int, chunk: int) -> None:
        start = chunk * CHUNK_NBYTES
        if (
            os.preadv(
                fd, [memoryview(self._parts[self._rank])[start : start + CHUNK_NBYTES]], start
            )
            != CHUNK_NBYTES
        ):
            raise OSError("the device did not give all at once")
        for pipe in self._pipes:
            os.write(pipe, _COME.pack(self._rank, chunk))

    def _take(self) -> None:
        rank, chunk = _COME.unpack(os.read(self._pipes[self._rank], _COME.size))
        for start, address, nbytes in self._pieces[rank, chunk]:
            ctypes.memmove(address, self._addresses[rank] + start, nbytes)


def _pieces(
    state: State, part_nbytes: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int, int]]]:
    """Yield the pieces of tensors, each within one chunk: its rank and chunk, its offset in that
    rank's part, its target address, and its size."""
    at = 0
    for tensor in flat_tensors(state).values():
        done = 0
        while done < tensor.nbytes:
            rank, start = divmod(at, part_nbytes)
            nbytes = min(tensor.nbytes - done, CHUNK_NBYTES - start % CHUNK_NBYTES)
            yield (rank, start // CHUNK_NBYTES), (start, tensor.data_ptr() + done, nbytes)
            at = at + nbytes
            done = done + nbytes


def _mapped(path: str, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
