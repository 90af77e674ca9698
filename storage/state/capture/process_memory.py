"""Reads memory of this process without crashing if it is no longer mapped.

A tensor's memory may be freed during training, and a plain copy from there ends the process with a
segmentation fault. ``process_vm_writev`` to the own process reports an error instead. So does
``/proc/self/mem``, which serves where a sandbox forbids that call. ``process_vm_readv`` takes twice
as long: it pins each page of the tensor, instead of our buffers' huge pages.

Digests of memory, block by block, detect changes where writes cannot be tracked.

Scope: addresses and sizes. Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ...format.digest import digest
from ...runtime.engine import CPU_THREADS

Ints = npt.NDArray[np.int64]

_SEGMENTS_MAX = 1024
"""IOV_MAX of Linux."""

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_PAIR = struct.Struct("=QQ")

_libc = ctypes.CDLL(None, use_errno=True)


class GoneError(Exception):
    """Memory to be read is no longer mapped. Never leaves this package."""


def read(address: int, to: int, nbytes: int) -> None:
    """Copy ``nbytes`` from ``address`` to ``to``, without the GIL.

    Raises GoneError if any of it is not mapped.
    """
    done = 0
    while done < nbytes:
        into = _PAIR.pack(to + done, nbytes - done)
        source = _PAIR.pack(address + done, nbytes - done)
        done += _copy(into, source, 1)


def gather(addresses: Ints, sizes: Ints, to: int) -> None:
    """Copy the memory ranges at ``addresses`` back to back to ``to``. Raises like :func:`read`."""
    segments = np.empty((len(addresses), 2), np.uint64)
    segments[:, 0] = addresses
    segments[:, 1] = sizes
    for start in range(0, len(segments), _SEGMENTS_MAX):
        some = segments[start : start + _SEGMENTS_MAX]
        nbytes = int(some[:, 1].sum())
        if _copy(_PAIR.pack(to, nbytes), some.tobytes(), len(some)) == nbytes:
            to += nbytes
            continue
        for address, size in some.tolist():  # one call stops at 2 GiB, or at unmapped memory
            read(address, to, size)
            to += size


def gather_segments(segments: Sequence[tuple[int, int]], to: int) -> None:
    """Copy like :func:`gather`, from (address, nbytes) pairs."""
    columns = np.array(segments, np.int64).reshape(-1, 2)
    gather(columns[:, 0], columns[:, 1], to)


def _copy(into: bytes, source: bytes, segments: int) -> int:
    """Copy with one system call and return the number of bytes copied, at least one.

    The copy may stop at the end of any segment.
    """
    done = -1
    error = errno.ENOSYS
    if _write_to is not None:
        done = int(_write_to(os.getpid(), source, segments, into, 1, 0))
        error = ctypes.get_errno()
        # The kernel cannot pin mappings of some devices, such as pinned memory that we copy to.
        if done <= 0 and error == errno.EFAULT and _read_from is not None:
            done = int(_read_from(os.getpid(), into, 1, source, segments, 0))
            error = ctypes.get_errno()
    if done > 0:
        return done
    if done < 0 and error in _REFUSED:
        return _read_file(into, source)
    if done == 0 or error == errno.EFAULT:
        raise GoneError
    raise OSError(error, os.strerror(error))


def _read_file(into: bytes, source: bytes) -> int:
    """Copy the first segment, or its beginning, from this process's memory file.

    The file is opened each time: a descriptor inherited by a forked child shows its parent's
    memory.
    """
    to, _ = _PAIR.unpack(into)
    address, nbytes = _PAIR.unpack_from(source)
    with open("/proc/self/mem", "rb", buffering=0) as file:
        try:
            done = os.preadv(file.fileno(), [(ctypes.c_char * nbytes).from_address(to)], address)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EFAULT):
                raise GoneError from None
            raise
    if not done:
        raise GoneError
    return done


_write_to = getattr(_libc, "process_vm_writev", None)
_read_from = getattr(_libc, "process_vm_readv", None)
for _call in (_write_to, _read_from):
    if _call is not None:
        _array = (ctypes.c_void_p, ctypes.c_ulong)
        _call.argtypes = [ctypes.c_int, *_array, *_array, ctypes.c_ulong]
        _call.restype = ctypes.c_ssize_t


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
