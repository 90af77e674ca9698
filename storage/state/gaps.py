"""Measures how far the elements of two tensors are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...errors import UnsupportedFormatError
from .dtypes import dtype_of

Bytes = npt.NDArray[np.uint8]

_AT_ONCE = 1 << 20
"""Elements converted at a time."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between two tensors.

    ``differing``: number of elements with different bits. ``max_abs``: the largest absolute
    difference among them; NaN if only one of two elements is, None if the dtype has no differences.
    """

    differing: int = 0
    max_abs: float | None = 0

    def __add__(self, other: Gap) -> Gap:
        """Combine the gaps of two parts of a tensor."""
        if self.max_abs is None or other.max_abs is None:
            return Gap(self.differing + other.differing, None)
        pair = (self.max_abs, other.max_abs)
        largest = math.nan if any(map(math.isnan, pair)) else max(pair)
        return Gap(self.differing + other.differing, largest)


def gap_between(a: Bytes, b: Bytes, dtype: str, itemsize: int) -> Gap:
    """Return the gap between two equally long runs of elements, given as bytes."""
    gap = Gap()
    step = _AT_ONCE * itemsize
    for start in range(0, len(a), step):
        gap += _gap(a[start : start + step], b[start : start + step], dtype, itemsize)
    return gap


def _gap(a: Bytes, b: Bytes, dtype: str, itemsize: int) -> Gap:
    ours = a.reshape(-1, itemsize)
    theirs = b.reshape(-1, itemsize)
    differs = (ours != theirs).any(axis=1)
    count = int(np.count_nonzero(differs))
    if not count:
        return Gap()
    return Gap(
        count, _largest(ours[differs].reshape(-1), theirs[differs].reshape(-1), dtype, itemsize)
    )


def _largest(a: Bytes, b: Bytes, dtype: str, itemsize: int) -> float | None:
    """Return the largest absolute difference; None if torch cannot convert the dtype."""
    if dtype == "bool" or dtype.startswith(("int", "uint")):
        return _largest_of_integers(a, b, dtype)
    try:
        kind = dtype_of(dtype, itemsize)
        wide = torch.complex128 if kind.is_complex else torch.float64
        ours = torch.from_numpy(a).view(kind).to(wide)
        theirs = torch.from_numpy(b).view(kind).to(wide)
    except (UnsupportedFormatError, RuntimeError):  # RuntimeError: torch cannot convert it
        return None
    apart = (ours - theirs).abs()
    apart[ours.isnan() & theirs.isnan()] = 0.0  # NaNs with different bits
    return float(apart.max())


def _largest_of_integers(a: Bytes, b: Bytes, dtype: str) -> int | None:
    """Return the exact largest difference; a conversion to float64 could round it."""
    try:
        kind = np.dtype(dtype)
    except TypeError:  # torch has integers smaller than a byte
        return None
    ours = a.view(kind)
    theirs = b.view(kind)
    if dtype == "bool":  # any byte but 0 is True
        ours = (a != 0).view(np.uint8)
        theirs = (b != 0).view(np.uint8)
    high = np.maximum(ours, theirs).astype(np.int64 if kind.kind == "i" else np.uint64)
    low = np.minimum(ours, theirs).astype(high.dtype)
    # Modulo 2**64 is exact, since every difference is smaller.
    return int((high.view(np.uint64) - low.view(np.uint64)).max())
