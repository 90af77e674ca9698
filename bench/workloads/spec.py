"""The interface of workloads: the tensors that each rank of a job holds, without their data, and
the randomness of their bytes.

Scope: pure, and without torch. :mod:`.materialised` makes tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ...core.forks.cached import cached_property
from ...core.safetensors import BITS, DTYPES
from ...core.units import ceil_div
from ...errors import UsageError

PAGE_NBYTES = 4096

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


class Workload:
    """The state of a job. Implementations are immutable, and do no I/O once made.

    ``name`` is for people and for comparing results: equal workloads have equal names.
    """

    name: str

    @property
    def world(self) -> int | None:
        """Required number of ranks; None for any number."""
        return None

    def specs(self, rank: int, world: int) -> list[Spec]:
        """Return the tensors of ``rank`` in a job of ``world`` ranks, in state order. Raises
        UsageError if the workload is not defined for that many ranks, and ValueError if there is no
        such rank."""
        raise NotImplementedError

    def nbytes(self, rank: int, world: int) -> int:
        """Return the bytes that ``rank`` holds. Raises as ``specs``."""
        return sum(spec.local_nbytes(rank, world) for spec in self.specs(rank, world))


@dataclass(frozen=True)
class Listed(Workload):
    """The tensors that ``make`` yields, sharded along dimension 0 over any number of ranks. Rank 0
    holds those that cannot be sharded. ``wanted_nbytes`` is the requested size, if there is
    one."""

    name: str
    make: Callable[[], Iterable[Spec]]
    wanted_nbytes: int | None = None

    @cached_property
    def _specs(self) -> tuple[Spec, ...]:
        return tuple(self.make())

    @cached_property
    def _kinds(self) -> Counter[Spec]:
        """Numbers of tensors that differ in their names alone."""
        return Counter(replace(spec, name="") for spec in self._specs)

    def specs(self, rank: int, world: int) -> list[Spec]:
        """See :class:`Workload`."""
        check_rank(rank, world)
        return [spec for spec in self._specs if spec.sharded or rank == 0]

    def nbytes(self, rank: int, world: int) -> int:
        """See :class:`Workload`."""
        check_rank(rank, world)
        return sum(
            count * spec.local_nbytes(rank, world)
            for spec, count in self._kinds.items()
            if spec.sharded or rank == 0
        )


def check_rank(rank: int, world: int) -> None:
    """Raise ValueError if there is no such rank."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")


@dataclass(frozen=True)
class Content:
    """Content of tensors.

    Constant bytes would compress ten thousandfold and deduplicate, so a measurement with them shows
    nothing. ``normal`` fills floating-point tensors with random normals, like weights, and others
    with random bits. ``uniform`` fills all with random bits, which do not compress.
    ``random_share`` is the random part of each 4,096 bytes of a tensor; the rest is zero.
    """

    kind: Literal["normal", "uniform"] = "normal"
    random_share: float = 1.0

    @property
    def name(self) -> str:
        """The name that :func:`parse_content` accepts."""
        if self.random_share < 1:
            return f"{self.random_share:g}"
        return self.kind


NORMAL = Content()


def parse_content(text: str) -> Content:
    """Parse ``normal``, ``uniform``, or the share of random bits among zeros: ``0.25`` or ``25%``.
    Raises UsageError."""
    if text == "normal":
        return NORMAL
    if text == "uniform":
        return Content("uniform")
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 1 / PAGE_NBYTES <= share <= 1:
        raise UsageError(
            f"--entropy {text!r} is not a kind of content",
            advice="Give normal, uniform, or the share of bytes that are random, such as 25%.",
        )
    return Content("uniform", share)
