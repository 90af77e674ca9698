"""Reads memory of this process without crashing if it is no longer mapped.

A tensor's memory may be freed during training, and a plain copy from there ends the process with a
segmentation fault. ``process_vm_readv`` on the own process id reports an error instead. So does
``/proc/self/mem``, which serves where a sandbox forbids that call.

Scope: addresses and sizes. Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["GoneError", "gather", "gather_segments", "read"]

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
        local = _PAIR.pack(to + done, nbytes - done)
        remote = _PAIR.pack(address + done, nbytes - done)
        done += _readv(local, remote, 1)


def gather(addresses: Ints, sizes: Ints, to: int) -> None:
    """Copy the memory ranges at ``addresses`` back to back to ``to``. Raises like :func:`read`."""
    segments = np.empty((len(addresses), 2), np.uint64)
    segments[:, 0] = addresses
    segments[:, 1] = sizes
    for start in range(0, len(segments), _SEGMENTS_MAX):
        some = segments[start : start + _SEGMENTS_MAX]
        nbytes = int(some[:, 1].sum())
        if _readv(_PAIR.pack(to, nbytes), some.tobytes(), len(some)) == nbytes:
            to += nbytes
            continue
        for address, size in some.tolist():  # one call stops at 2 GiB, or at unmapped memory
            read(address, to, size)
            to += size


def gather_segments(segments: Sequence[tuple[int, int]], to: int) -> None:
    """Copy like :func:`gather`, from (address, nbytes) pairs."""
    columns = np.array(segments, np.int64).reshape(-1, 2)
    gather(columns[:, 0], columns[:, 1], to)


def _readv(local: bytes, remote: bytes, segments: int) -> int:
    """Copy with one system call and return the number of bytes copied, at least one.

    The copy may stop at the end of any segment.
    """
    done = -1
    error = errno.ENOSYS
    if _process_vm_readv is not None:
        done = int(_process_vm_readv(os.getpid(), local, 1, remote, segments, 0))
        error = ctypes.get_errno()
    if done > 0:
        return done
    if done < 0 and error in _REFUSED:
        return _read_file(local, remote)
    if done == 0 or error == errno.EFAULT:
        raise GoneError
    raise OSError(error, os.strerror(error))


def _read_file(local: bytes, remote: bytes) -> int:
    """Copy the first segment, or its beginning, from this process's memory file.

    The file is opened each time: a descriptor inherited by a forked child shows its parent's
    memory.
    """
    to, _ = _PAIR.unpack(local)
    address, nbytes = _PAIR.unpack_from(remote)
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


_process_vm_readv = getattr(_libc, "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    _process_vm_readv.restype = ctypes.c_ssize_t
