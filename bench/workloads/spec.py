"""The interface of workloads: the tensors that each rank of a job holds, without their data.

Scope: pure, and without torch. :mod:`.materialised` makes tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ...core.safetensors import BITS, DTYPES
from ...core.units import ceil_div

__all__ = ["Spec", "Workload", "check_rank", "itemsize_of", "nbytes_of_specs"]

_ITEMSIZES = {dtype: BITS[code] // 8 for dtype, code in DTYPES.items()} | {"complex64": 8}


def itemsize_of(dtype: str) -> int:
    """Return the bytes per element of a dtype, by torch's name. Raises ValueError for an unknown
    one."""
    try:
        return _ITEMSIZES[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}") from None


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of a rank's state, without its elements.

    ``name``     fully qualified, such as ``model.layers.0.wq.weight``; unique in the job, except
                 that all ranks list a sharded tensor
    ``shape``    shape of the whole tensor
    ``dtype``    torch's name, such as ``bfloat16``
    ``sharded``  True: split along dimension 0 over the ranks, as by torch.chunk and FSDP2, so the
                 last shares may be short or empty; False: this rank's own

    Raises ValueError for an unknown dtype, a negative length, and a sharded tensor without
    dimensions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharded: bool

    def __post_init__(self) -> None:
        itemsize_of(self.dtype)
        if min(self.shape, default=0) < 0:
            raise ValueError(f"tensor {self.name!r} of shape {self.shape}")
        if self.sharded and not self.shape:
            raise ValueError(f"tensor {self.name!r} has no dimension to split")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize_of(self.dtype)

    def rows(self, rank: int, world: int) -> tuple[int, int]:
        """Return the (first, end) indices along dimension 0 that ``rank`` holds; (0, 1) for a
        tensor without dimensions."""
        if not self.shape:
            return 0, 1
        count = self.shape[0]
        if not self.sharded:
            return 0, count
        step = ceil_div(count, world)
        return min(step * rank, count), min(step * (rank + 1), count)

    def local_shape(self, rank: int, world: int) -> tuple[int, ...]:
        """Return the shape of the part that ``rank`` holds."""
        if not self.shape:
            return ()
        first, last = self.rows(rank, world)
        return last - first, *self.shape[1:]

    def local_nbytes(self, rank: int, world: int) -> int:
        """Return the bytes of the part that ``rank`` holds."""
        return math.prod(self.local_shape(rank, world)) * itemsize_of(self.dtype)


class Workload(Protocol):
    """The state of a job. Implementations are immutable, and do no I/O once made."""

    @property
    def name(self) -> str:
        """Name for people and for comparing results. Equal workloads have equal names."""

    @property
    def world(self) -> int | None:
        """Required number of ranks; None for any number."""

    def specs(self, rank: int, world: int) -> list[Spec]:
        """Return the tensors of ``rank`` in a job of ``world`` ranks, in state order. Raises
        UsageError if the workload is not defined for that many ranks, and ValueError if there is no
        such rank."""

    def nbytes(self, rank: int, world: int) -> int:
        """Return the bytes that ``rank`` holds. Raises as ``specs``."""


def nbytes_of_specs(specs: Iterable[Spec], rank: int, world: int) -> int:
    """Return the bytes that ``rank`` holds of these tensors."""
    return sum(spec.local_nbytes(rank, world) for spec in specs)


def check_rank(rank: int, world: int) -> None:
    """Raise ValueError if there is no such rank."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")
