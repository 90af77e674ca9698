"""Converts floating-point elements to another dtype, as bytes."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from ...errors import UsageError
from .dtypes import dtype_of

__all__ = ["FLOATS", "convert", "is_convertible"]

Bytes = npt.NDArray[np.uint8]

FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Target dtypes: torch's names, and bytes per element."""


@functools.cache
def is_convertible(source: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether this torch copies elements of one dtype to another, by trying it."""
    ours = torch.zeros(source.itemsize, dtype=torch.uint8).view(source)
    try:
        torch.empty(1, dtype=wanted).copy_(ours)
    except RuntimeError:  # NotImplementedError is a subclass
        return False
    return True


def convert(source: Bytes, kind: tuple[str, int], into: Bytes, dtype: str, name: str) -> None:
    """Convert elements of dtype ``kind`` (name, itemsize) to ``dtype``, one of ``FLOATS``.

    Raises UsageError, naming the tensor, if a finite number would become infinite.
    """
    ours = torch.from_numpy(source).view(dtype_of(*kind))
    theirs = torch.from_numpy(into).view(dtype_of(dtype, FLOATS[dtype]))
    theirs.copy_(ours)
    infinite = theirs.isinf()
    if infinite.any() and not ours.to(torch.float64)[infinite].isinf().all():
        raise UsageError(
            f"tensor {name!r} has numbers that are too large for {dtype}",
            advice="Choose another dtype.",
        )
