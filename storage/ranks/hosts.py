"""Host identity, compact encoding of a number per rank, such as that of its host, and what the
ranks of a host share."""

from __future__ import annotations

import functools
import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BUDGET_MIN_NBYTES = 32 << 20
"""Memory that a rank needs to make progress."""

_log = logging.getLogger(__name__)


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


def share_of(budget_nbytes: int, ranks: int) -> int:
    """Return the share of each of ``ranks`` on one host: at least :data:`BUDGET_MIN_NBYTES`, with
    a warning if the budget is too short for that."""
    share_nbytes = budget_nbytes // ranks
    if share_nbytes >= BUDGET_MIN_NBYTES:
        return share_nbytes
    _warn_short(budget_nbytes, ranks)
    return BUDGET_MIN_NBYTES


@functools.cache
def _warn_short(budget_nbytes: int, ranks: int) -> None:
    _log.warning(
        "a budget of %s bytes is short for the %d ranks of a host: each takes %s bytes",
        f"{budget_nbytes:,}",
        ranks,
        f"{BUDGET_MIN_NBYTES:,}",
    )
