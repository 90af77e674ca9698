"""Tensors that share memory in the state but are stored separately in the checkpoint.

Examples are tied weights of a model that was saved untied, and views of one buffer. Their stored
values are first read into separate memory, one tensor after the other in the order of the state. So
conflicting values are detected before the state is touched. On a conflict the state gets the last
tensor's values completely, never a mixture.

A checkpoint may lack some of the names that share memory, if the others fill all of it.

Scope: memory of one process.
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
from ...state.filling.targets import Match, MemoryTable, Wanted
from ...state.flat_state import FlatState
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
    wishes = wanted.wishes
    numbers = np.fromiter(wishes, np.int64, len(wishes))
    # Two names of a tensor that is stored once put the same values into the same elements.
    return sorted(
        group
        for group in _groups(buffers, wanted.memory(), numbers)
        if len({(*_layout(buffers[number]), wishes[number]) for number in group}) > 1
    )


def filled_by_others(flat: FlatState, found: Match) -> set[str]:
    """Return the names of missing tensors whose memory this load fills under other names.

    Most are tied weights: model files have them under one name only. Others are views of stored
    tensors, or consist of such views.
    """
    names = flat.names
    absent = [row for row, name in enumerate(names) if name in found.missing]
    if not absent:
        return set()
    present = [row for row, name in enumerate(names) if name not in found.missing]
    places = {name: id(place) for name, place in flat.without_memory.items()}
    given = {places.get(names[row]) for row in present} - {None}
    others = [*found.wanted.buffers, *(flat.locals[row] for row in present)]
    covered = _covered([flat.locals[row] for row in absent], others)
    unfilled = {
        names[row]
        for row, is_covered in zip(absent, covered, strict=True)
        if not is_covered and places.get(names[row]) not in given
    }
    return {names[row] for row in absent} - unfilled


def _covered(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each of ``tensors`` if its memory also belongs to ``others``, every byte of it.

    A tensor without elements must be one of the others. Tensors on the meta device have no memory.
    """
    empty = [other for other in others if not other.numel() and not other.is_meta]
    covered = [
        not tensor.numel()
        and any(tensor.device == other.device and tensor.is_set_to(other) for other in empty)
        for tensor in tensors
    ]
    both = [*tensors, *others]
    numbers = np.flatnonzero([not tensor.is_meta for tensor in both])
    for group in _groups(both, MemoryTable.of(both), numbers):
        ours = [number for number in group if number < len(tensors)]
        theirs = group[len(ours) :]
        if not ours or not theirs:
            continue
        start, stop = _runs([both[number] for number in theirs])
        for number in ours:
            starts, stops = _runs([both[number]])
            run = start.searchsorted(starts, side="right") - 1
            covered[number] = bool(((run >= 0) & (stops <= stop[run])).all())
    return covered


def _runs(tensors: Sequence[torch.Tensor]) -> tuple[Ints, Ints]:
    """Return the address range of each run of adjacent bytes in the memory of ``tensors``: the
    starts, and the stops, both ascending."""
    firsts = []
    sizes = []
    for tensor in tensors:
        first = np.array([tensor.data_ptr()])
        nbytes = tensor.itemsize
        for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            step = stride * tensor.itemsize
            if step <= nbytes:
                nbytes += step * (length - 1)
            else:
                first = np.add.outer(first, step * np.arange(length)).reshape(-1)
        firsts.append(first)
        sizes.append(np.full(len(first), nbytes))
    first = np.concatenate(firsts)
    order = np.argsort(first, kind="stable")
    first = first[order]
    reach = np.maximum.accumulate(first + np.concatenate(sizes)[order])
    begins = np.flatnonzero(np.r_[True, first[1:] > reach[:-1]])
    return first[begins], reach[np.r_[begins[1:] - 1, len(first) - 1]]


def _groups(buffers: Sequence[torch.Tensor], memory: MemoryTable, numbers: Ints) -> list[list[int]]:
    """Return groups of at least two of the buffers in ``numbers`` whose memory overlaps."""
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
    return found


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
