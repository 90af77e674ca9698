"""What a load fills: the tensors and values of the caller's state, held against what a checkpoint has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...planner.columns import padded
from ...planner.loading import Targets
from ...planner.table import TensorTable
from ..manifest import Manifest
from ..tree import Key, Tree, format_path
from .dtypes import dtype_name, dtype_of
from .state import FlatState

__all__ = ["Match", "Wanted", "match"]

TypedPath = tuple[tuple[str, Key], ...]


@dataclass
class Wanted:
    """Boxes to be filled, collected row by row; ``targets()`` makes columns of them."""

    buffers: list[torch.Tensor] = field(default_factory=list)
    _tensor: list[int] = field(default_factory=list)
    _boxes: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = field(default_factory=list)
    _buffer: list[int] = field(default_factory=list)

    def add(self, tensor: int, buffer: torch.Tensor, boxes: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> None:
        """Want boxes (offsets, lengths, local offsets) of the tensor in row ``tensor``, in ``buffer``."""
        for box in boxes:
            self._tensor.append(tensor)
            self._boxes.append(box)
            self._buffer.append(len(self.buffers))
        self.buffers.append(buffer)

    def add_whole(self, tensor: int, buffer: torch.Tensor) -> None:
        """Want all of a tensor."""
        zeros = (0,) * buffer.ndim
        self.add(tensor, buffer, [(zeros, buffer.shape, zeros)] if buffer.numel() else [])

    def targets(self, width: int) -> Targets:
        """Columns, padded to ``width`` dimensions."""
        offsets, lengths, local = zip(*self._boxes, strict=True) if self._boxes else ((), (), ())
        return Targets(
            tensor=np.array(self._tensor, np.int64),
            offsets=padded(offsets, width, 0),
            lengths=padded(lengths, width, 1),
            local_offsets=padded(local, width, 0),
            local_shape=padded([self.buffers[b].shape for b in self._buffer], width, 1),
            buffer=np.array(self._buffer, np.int64),
        )


@dataclass
class Match:
    """A state held against a checkpoint, as one rank sees it.

    ``missing`` are in the state only; ``mismatched`` are in both, but cannot be filled; ``tensors`` and ``values`` are the
    rows of the checkpoint that the state has a place for; ``assign`` the values to be put into its containers.
    """

    wanted: Wanted = field(default_factory=Wanted)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    tensors: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    assign: list[tuple[int, Key, int]] = field(default_factory=list)
    """(container of the state, key, row of the value in the checkpoint)"""


def match(flat: FlatState, manifest: Manifest, rank: int, *, cast: bool) -> Match:
    """Hold ``flat`` against the checkpoint. Reads no data; finds every difference."""
    found = Match()
    _match_tensors(found, flat, manifest.tensors, rank, cast)
    _match_values(found, flat, manifest.tree)
    return found


def _match_tensors(found: Match, flat: FlatState, stored: TensorTable, rank: int, cast: bool) -> None:
    dtypes = [dtype_of(*kind) for kind in stored.dtypes]
    for row, (name, shape, dtype, local) in enumerate(zip(flat.names, flat.shapes, flat.dtypes, flat.locals, strict=True)):
        source = stored.find(name, rank)
        if source is None:
            found.missing.append(f"{flat.path(row)}: no tensor {name!r} in the checkpoint")
            continue
        found.tensors.update(stored.rows[name])
        problem = _problem(stored.shape_of(source), dtypes[stored.dtype[source]], shape, dtype, cast) or _unfillable(local)
        if problem:
            found.mismatched.append(f"{flat.path(row)}: {problem}")
            continue
        source = source if stored.alias[source] < 0 else int(stored.alias[source])
        part = flat.parts[row]
        if part is None:
            found.wanted.add_whole(source, local)
        else:
            found.wanted.add(source, local, [(p.box.offsets, p.box.lengths, p.local_offsets) for p in part.pieces])


def _problem(stored: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, ...], wanted: torch.dtype, cast: bool) -> str | None:
    if stored != shape:
        return f"shape {list(stored)} in the checkpoint, {list(shape)} in the state"
    if dtype == wanted or (cast and torch.can_cast(dtype, wanted)):
        return None
    hint = " (cast=True converts)" if not cast and torch.can_cast(dtype, wanted) else ""
    return f"dtype {dtype_name(dtype)} in the checkpoint, {dtype_name(wanted)} in the state{hint}"


def _unfillable(local: torch.Tensor) -> str | None:
    shared = any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))
    return "an expanded tensor, whose elements share memory, cannot be filled" if shared else None


def typed_paths(tree: Tree) -> list[TypedPath]:
    """Per container, the keys that lead to it, each with its type: 1, True and 1.0 are different keys here."""
    out: list[TypedPath] = [()]
    for c in tree.containers[1:]:
        out.append((*out[c.parent], (type(c.key).__name__, c.key)))
    return out


def _match_values(found: Match, flat: FlatState, stored: Tree) -> None:
    theirs = typed_paths(stored)
    at = {(*theirs[v.container], (type(v.key).__name__, v.key)): i for i, v in enumerate(stored.values)}
    ours = typed_paths(flat.tree)
    lenient = [path for path in _opened(flat, ours)]
    for value in flat.tree.values:
        path = (*ours[value.container], (type(value.key).__name__, value.key))
        inside = next((p for p in lenient if path[: len(p)] == p), None)
        if path in at:
            found.values.add(at[path])
            if inside is None or not _is_own_layout(path[len(inside) :]):
                found.assign.append((value.container, value.key, at[path]))
        elif inside is None:
            found.missing.append(f"{format_path(key for _, key in path)}: no such value in the checkpoint")
    taken = [*lenient, *((*ours[s.parent], (type(s.key).__name__, s.key)) if s.parent >= 0 else () for s in flat.subtrees if s.state is None)]
    found.values.update(i for path, i in at.items() if any(path[: len(p)] == p for p in taken))


def _opened(flat: FlatState, ours: Sequence[TypedPath]) -> list[TypedPath]:
    """Paths of modules and optimizers. Their small values (hyperparameters) vary with torch's version: those that both
    have are taken over, others are let be."""
    return [
        (*ours[s.parent], (type(s.key).__name__, s.key)) if s.parent >= 0 else () for s in flat.subtrees if s.state is not None
    ]


def _is_own_layout(path: TypedPath) -> bool:
    """Which parameters an optimizer's group has is for the job to say that loads, not for the one that saved."""
    keys = [key for _, key in path]
    return len(keys) == 4 and keys[0] == "param_groups" and keys[2] == "params"
