"""Tensors that share memory in the state but are stored separately in the checkpoint.

Examples are tied weights of a model that was saved untied, and views of one buffer. Their stored
values are first read into separate memory, one tensor after the other in the order of the state. So
conflicting values are detected before the state is touched. On a conflict the state gets the last
tensor's values completely, never a mixture.

Scope: memory of one process. Tensors that are stored once are not handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ....core.units import round_up
from ....drivers.contract import Driver
from ....errors import StateError
from ....planner.columns import Ints
from ...format.digest import digest
from ...format.manifest import Manifest
from ...runtime.buffers import memory_for
from ...runtime.engine import offload
from ...state.bits import span_of, writable
from ...state.compat import neg_view
from ...state.filling.targets import MemoryTable, Wanted
from .fill import Report, fill

_ALIGNED = 16
_NAMED = 5


@dataclass
class Overlaps:
    """Values read for memory shared by several stored tensors. ``conflicts``: by name, those
    that disagree."""

    conflicts: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_wanted: int = 0
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def put(self) -> None:
        """Copy the values into the state."""
        for target, read in self._copies:
            with writable(target):
                target.copy_(read)

    def add(self, targets: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
        """Make :meth:`put` copy ``read`` into ``targets``."""
        self._copies += zip(targets, read, strict=True)


async def read_overlaps(
    driver: Driver,
    manifest: Manifest,
    wanted: Wanted,
    groups: Sequence[Sequence[int]],
    budget_nbytes: int,
    report: Report,
) -> Overlaps:
    """Read the values of buffers that share memory; ``groups`` are their numbers
    (:func:`overlapping`).

    ``driver`` must be the driver for images. ``report`` is called with the bytes of each buffer.
    Needs as much memory as the buffers, in addition to the budget. Raises DamagedError and
    StorageError.
    """
    found = Overlaps()
    wishes = wanted.wishes
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
    """A host copy of the memory that ``targets`` share. ``views`` are tensors in it with the
    same layout."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        spans = [(target.data_ptr(), _stop(target)) for target in targets]
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
    """Return groups of distinct buffers that share memory, by their numbers, in order."""
    buffers = wanted.buffers
    memory = wanted.memory()
    numbers = np.fromiter(wanted.wishes, np.int64, len(wanted.wishes))
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
        )  # nearly all of the thousands of groups are a single buffer
        found += [sorted(numbers[rows[cuts[g] : cuts[g + 1]]].tolist()) for g in shared.tolist()]
    if not found:
        return []
    wishes = wanted.wishes
    # Two names of a tensor that is stored once put the same values into the same elements.
    return sorted(
        group
        for group in found
        if len({(*_layout(buffers[number]), wishes[number]) for number in group}) > 1
    )


def _devices(buffers: Sequence[torch.Tensor], memory: MemoryTable, numbers: Ints) -> Ints:
    """Return each buffer's device as an integer code, (numbers,)."""
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


def _stop(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + span_of(tensor) * tensor.itemsize
