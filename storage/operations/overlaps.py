"""Tensors of a state that share memory, and that a checkpoint stores separately: tied weights of a
model that was saved untied, views of one buffer.

What is stored of them goes into memory of its own first, one tensor after the other, in the order
of the state. So it is known whether the stored values agree before anything of the state is
touched. Where they do not, what the state gets is the last one, whole, and never a mixture.

Scope: memory of one process. Tensors that are stored as one are none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...core.units import round_up
from ...drivers.contract import Driver
from ...errors import StateError
from ...planner.columns import Ints
from ..format.digest import digest
from ..format.manifest import Manifest
from ..runtime.buffers import memory_for
from ..runtime.engine import offload
from ..state.bits import writable
from ..state.compat import neg_view
from ..state.memory_table import MemoryTable
from ..state.targets import Wanted
from .fill import Report, fill

__all__ = ["Overlaps", "overlapping", "read_overlaps"]

_ALIGNED = 16
_NAMED = 5


@dataclass
class Overlaps:
    """What was read for memory that several stored tensors go to. ``conflicts``: by name, what does
    not agree."""

    conflicts: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_wanted: int = 0
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def put(self) -> None:
        """Copy what was read into the state."""
        for target, read in self._copies:
            with writable(target):
                target.copy_(read)

    def add(self, targets: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
        """``read`` is what :meth:`put` copies into ``targets``."""
        self._copies += zip(targets, read, strict=True)


async def read_overlaps(
    driver: Driver,
    manifest: Manifest,
    wanted: Wanted,
    groups: Sequence[Sequence[int]],
    budget_nbytes: int,
    report: Report,
) -> Overlaps:
    """Read what goes into buffers that share memory; ``groups`` are their numbers
    (:func:`overlapping`).

    ``driver`` is that of the images. ``report`` is called with the bytes of each buffer. Takes as
    much memory as the buffers, besides the budget. Raises DamagedError, StorageError.
    """
    found = Overlaps()
    wishes = wanted.wishes()
    for group in groups:
        targets = [wanted.buffers[number] for number in group]
        copy = await offload(_SharedCopy, targets)
        before = []
        for number, view in zip(group, copy.views, strict=True):
            part = wanted.part(number, view)
            reader = await fill(driver, manifest, part, budget_nbytes, report)
            found.bytes_read += reader.bytes_read
            found.bytes_wanted += reader.bytes_wanted
            before.append(await offload(copy.digest, view))
        found.add(targets, copy.views)
        names = [
            wanted.names.get(number) or manifest.tensors.names[wishes[number][0]]
            for number in group
        ]
        if before != [await offload(copy.digest, view) for view in copy.views]:
            found.conflicts[names[0]] = _conflict(names)
    return found


def _conflict(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMED]))
    if len(names) > _NAMED:
        shown += f" and {len(names) - _NAMED} more"
    return f"tensors {shown} share memory in the state, and are stored with different values"


class _SharedCopy:
    """A copy of the memory that ``targets`` share, in host memory. ``views``: tensors in it, laid
    out as ``targets`` are in theirs."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        spans = [_span(target) for target in targets]
        first = min(start for start, _ in spans) // _ALIGNED * _ALIGNED
        nbytes = round_up(max(stop for _, stop in spans) - first, _ALIGNED)
        if any(
            (start - first) % target.itemsize
            for target, (start, _) in zip(targets, spans, strict=True)
        ):
            raise StateError(
                "tensors share memory at addresses that are no multiples of the size of their "
                "elements"
            )
        with memory_for(f"{nbytes:,} bytes for tensors that share memory"):
            memory = torch.from_numpy(np.zeros(nbytes, np.uint8))
        self.views = [
            _view(memory, target, start - first)
            for target, (start, _) in zip(targets, spans, strict=True)
        ]

    @staticmethod
    def digest(view: torch.Tensor) -> bytes:
        """The digest of a view's elements."""
        plain = view.resolve_conj().resolve_neg().contiguous()
        return digest(plain.view(-1).view(torch.uint8).numpy().data)


def _view(memory: torch.Tensor, target: torch.Tensor, offset: int) -> torch.Tensor:
    typed = memory.view(target.dtype)
    view = typed.as_strided(target.shape, target.stride(), offset // target.itemsize)
    if target.is_conj():
        view = view.conj()
    if target.is_neg():
        view = neg_view(view)
    return view


def overlapping(wanted: Wanted) -> list[list[int]]:
    """Groups of buffers that share memory without being the same buffer, by their numbers, in
    order."""
    buffers = wanted.buffers
    memory = wanted.memory()
    numbers = wanted.numbers()
    numbers = numbers[memory.nbytes[numbers] > 0]
    if len(numbers) < 2:
        return []
    start = memory.address[numbers]
    stop = start + memory.nbytes[numbers]
    for row in np.flatnonzero(~memory.is_contiguous[numbers]).tolist():
        stop[row] = _stop(buffers[numbers[row]])
    device = _devices(buffers, memory, numbers)
    found: list[list[int]] = []
    for code in np.unique(device).tolist():
        rows = np.flatnonzero(device == code)
        rows = rows[np.argsort(start[rows], kind="stable")]
        reach = np.maximum.accumulate(stop[rows])
        apart = np.flatnonzero(start[rows][1:] >= reach[:-1]) + 1
        cuts = np.concatenate([[0], apart, [len(rows)]])
        shared = np.flatnonzero(
            np.diff(cuts) > 1
        )  # of thousands of groups, nearly all are one buffer
        found += [sorted(numbers[rows[cuts[g] : cuts[g + 1]]].tolist()) for g in shared.tolist()]
    if not found:
        return []
    wishes = wanted.wishes()
    # Two names of a tensor that is stored once put the same values into the same elements.
    return sorted(
        group
        for group in found
        if len({(*_layout(buffers[number]), wishes[number]) for number in group}) > 1
    )


def _devices(buffers: Sequence[torch.Tensor], memory: MemoryTable, numbers: Ints) -> Ints:
    """(numbers,): the device that each buffer is on, by a number of its own."""
    if memory.on_host.all():
        return np.zeros(len(numbers), np.int64)
    codes: dict[torch.device, int] = {}
    devices = (buffers[number].device for number in numbers.tolist())
    return np.array([codes.setdefault(device, len(codes)) for device in devices], np.int64)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of memory [start, stop) that its elements lie in."""
    return tensor.data_ptr(), _stop(tensor)


def _stop(tensor: torch.Tensor) -> int:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (last + 1) * tensor.itemsize
