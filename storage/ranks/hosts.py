"""Which ranks of a job go together, such as those of one host: found by the leader, and told to all
in a few bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["numbered", "numbers_in", "ranks_with"]

Ints = npt.NDArray[np.int64]


def numbered(names: Sequence[str | None]) -> bytes:
    """A number for each rank, by the name that it has told: ranks of one name have one number, and
    a rank without a name has one of its own. In few bytes: numbers of neighbours differ by one, if
    at all, or in a pattern."""
    number: dict[str | int, int] = {}
    numbers = [
        number.setdefault(rank if name is None else name, len(number))
        for rank, name in enumerate(names)
    ]
    return zlib.compress(np.diff(numbers, prepend=0).astype("<i4").tobytes())


def numbers_in(told: bytes) -> Ints:
    """The numbers that :func:`numbered` has told."""
    return np.cumsum(np.frombuffer(zlib.decompress(told), "<i4"), dtype=np.int64)


def ranks_with(rank: int, numbers: Ints) -> list[int]:
    """Those that have the number of ``rank``, which is among them; ascending."""
    found: list[int] = np.flatnonzero(numbers == numbers[rank]).tolist()
    return found
