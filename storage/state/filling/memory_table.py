"""The memory of many tensors as columns: a load inspects thousands before it reads the first byte.

Scope: reads no element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from ....planner.columns import Ints

__all__ = ["MemoryTable"]

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """A row for each tensor. All columns have shape (n,).

    ``address``: of its first element, on its device. ``nbytes``: of its elements. ``dtype_id``:
    Python's id of its dtype object. ``on_host``, ``is_contiguous``: as reported by torch.
    ``as_stored``: whether its elements lie in row-major order in this process's memory, bit for
    bit.
    """

    address: Ints
    nbytes: Ints
    dtype_id: Ints
    on_host: Flags
    is_contiguous: Flags
    as_stored: Flags

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> MemoryTable:
        """Return the table of ``tensors``."""

        def flags(ask: Callable[[torch.Tensor], bool]) -> Flags:
            return np.fromiter(map(ask, tensors), np.bool_, len(tensors))

        def numbers(ask: Callable[[torch.Tensor], int]) -> Ints:
            return np.fromiter(map(ask, tensors), np.int64, len(tensors))

        on_host = flags(attrgetter("is_cpu"))
        is_contiguous = flags(torch.Tensor.is_contiguous)
        is_lazy = flags(torch.Tensor.is_conj) | flags(torch.Tensor.is_neg)
        return cls(
            numbers(torch.Tensor.data_ptr),
            numbers(attrgetter("nbytes")),
            np.fromiter(map(id, map(attrgetter("dtype"), tensors)), np.int64, len(tensors)),
            on_host,
            is_contiguous,
            on_host & is_contiguous & ~is_lazy,
        )
