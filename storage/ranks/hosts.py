"""What ranks of one host have in common; and groups of ranks of a job, such as those of one host:
found by the leader, and sent to all ranks in a few bytes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["host_key", "numbered", "numbers_in", "ranks_with"]

Ints = npt.NDArray[np.int64]


def host_key() -> str | None:
    """What ranks have in common that can share memory: one boot of one host, one network namespace,
    one user. None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot}/{namespace}/{os.getuid()}"


def numbered(names: Sequence[str | None]) -> bytes:
    """A number for each rank, compressed: ranks of one name have one number, and a rank without a
    name has a number of its own. Numbers of neighbours differ by one, if at all, or in a pattern,
    so their differences compress well."""
    number: dict[str | int, int] = {}
    numbers = [
        number.setdefault(rank if name is None else name, len(number))
        for rank, name in enumerate(names)
    ]
    return zlib.compress(np.diff(numbers, prepend=0).astype("<i4").tobytes())


def numbers_in(data: bytes) -> Ints:
    """The inverse of :func:`numbered`: the number of each rank."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<i4"), dtype=np.int64)


def ranks_with(rank: int, numbers: Ints) -> list[int]:
    """The ranks that have the number of ``rank``, itself among them; ascending."""
    found: list[int] = np.flatnonzero(numbers == numbers[rank]).tolist()
    return found
