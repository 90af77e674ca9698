"""Host identity, and compact encoding of a number per rank, such as that of its host."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def host_key() -> str | None:
    """Return an id shared by ranks that can share memory; None if the system provides none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot}/{namespace}/{os.getuid()}"


def numbered(names: Sequence[str | None]) -> bytes:
    """Assign a number to each rank, and compress the numbers. Ranks with equal names get equal
    numbers; a rank without a name gets a number of its own."""
    number: dict[str | int, int] = {}
    numbers = [
        number.setdefault(rank if name is None else name, len(number))
        for rank, name in enumerate(names)
    ]
    return compressed(numbers)


def compressed(numbers: Sequence[int]) -> bytes:
    """Compress the numbers of all ranks. Neighbours differ little or in a regular pattern, so their
    differences compress well."""
    return zlib.compress(np.diff(np.array(numbers, "<i8"), prepend=0).tobytes())


def numbers_in(data: bytes) -> Ints:
    """Decode the result of :func:`compressed` or :func:`numbered`."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<i8"), dtype=np.int64)


def ranks_with(rank: int, numbers: Ints) -> list[int]:
    """Return the ranks with the same number as ``rank``, itself included, ascending."""
    found: list[int] = np.flatnonzero(numbers == numbers[rank]).tolist()
    return found
