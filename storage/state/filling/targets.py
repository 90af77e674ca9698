"""Matches the caller's tensors and values with a checkpoint, to find the tensors to fill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from ....planner.columns import Ints, padded, widen
from ....planner.layout import Layout, regions_of
from ....planner.loading import Targets
from ....planner.table import TensorTable
from ...format.manifest import Manifest
from ...format.tree import Key, Tree, Value, dotted, format_path
from ..adapters.composite import agrees
from ..adapters.megatron import KeyedShard
from ..adapters.multipart import InParts, is_in_parts, parts_of
from ..adapters.tensors import TensorLike, layout_of
from ..device import devices_of, refuse_forked_child
from ..dtypes import dtype_name, dtype_of, is_convertible
from ..flat_state import FlatState

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


TypedPath = tuple[tuple[str, Key], ...]
_Slot = tuple[int, str, Key]


_CASTABLE = " (cast=True converts)"
Wish = tuple[int, Layout | None]
"""(row of the tensor, the wanted part of it; None: all)"""


@dataclass
class Wanted:
    """Parts of tensors to fill, collected one by one; ``targets()`` turns them into columns."""

    buffers: list[torch.Tensor] = field(default_factory=list)
    wishes: dict[int, Wish] = field(default_factory=dict)
    """The wish for each buffer to fill, by number."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of the buffers that have one, by number."""
    _memory: MemoryTable | None = None

    def add_all_whole(
        self, tensors: Ints, buffers: Sequence[torch.Tensor], names: Sequence[str]
    ) -> None:
        """Add all of the tensors in these rows, each with its buffer and the buffer's name in the
        state."""
        first = len(self.buffers)
        numbers = range(first, first + len(buffers))
        rows = zip(numbers, tensors.tolist(), buffers, strict=True)
        self.wishes.update((number, (row, None)) for number, row, each in rows if each.numel())
        self.names.update(zip(numbers, names, strict=True))
        self.buffers += buffers

    def add_whole(self, tensor: int, buffer: torch.Tensor, name: str | None = None) -> None:
        """Add all of the tensor in row ``tensor``, to be read into ``buffer``.

        ``name``: the buffer's name in the state.
        """
        self._add((tensor, None), buffer, not buffer.numel(), name)

    def add_tensor(self, row: int, tensor: TensorLike | InParts, name: str) -> None:
        """Add everything this rank holds of a tensor, whatever its type."""
        parts: Sequence[TensorLike] = [tensor]  # type: ignore[list-item]
        if is_in_parts(tensor):
            parts = parts_of(tensor, lambda: name)
        for part in parts:
            local, layout = layout_of(part, lambda: name)
            self.add_held(row, local, layout)

    def add_held(
        self, row: int, local: torch.Tensor, layout: Layout, name: str | None = None
    ) -> None:
        """Add the part of a tensor that ``layout`` describes, to be read into ``local``."""
        if layout.local_shape == layout.shape:
            self.add_whole(row, local, name)
        else:
            self._add((row, layout), local, layout.is_empty, name)

    def _add(self, wish: Wish, buffer: torch.Tensor, is_empty: bool, name: str | None) -> None:
        number = len(self.buffers)
        self.buffers.append(buffer)
        if name is not None:
            self.names[number] = name
        if not is_empty:
            self.wishes[number] = wish

    def memory(self) -> MemoryTable:
        """Return where the buffers lie; called after all have been added.

        Raises UsageError in a child forked after CUDA was initialized, where they could not be
        filled.
        """
        if self._memory is None:
            self._memory = MemoryTable.of(self.buffers)
            if not self._memory.on_host.all() and devices_of(self.buffers):
                refuse_forked_child()
        return self._memory

    def stored_dtypes(self, tensors: TensorTable) -> dict[int, torch.dtype]:
        """Return the stored dtypes of the tensors to fill, by address."""
        return {
            self.buffers[number].data_ptr(): dtype_of(*tensors.dtypes[tensors.dtype[row]])
            for number, (row, _) in self.wishes.items()
        }

    def part(self, number: int, buffer: torch.Tensor) -> Wanted:
        """Return the wish of one buffer, redirected to ``buffer``."""
        tensor, layout = self.wishes[number]
        wanted = Wanted()
        if layout is None:
            wanted.add_whole(tensor, buffer)
        else:
            wanted.add_held(tensor, buffer, layout)
        return wanted

    def without(self, numbers: Collection[int]) -> Wanted:
        """Return the wishes of all buffers but these."""
        wishes = {number: wish for number, wish in self.wishes.items() if number not in numbers}
        return Wanted(self.buffers, wishes, self.names, self._memory)

    def targets(self, shape: Ints) -> Targets:
        """Return the wishes as columns. ``shape`` (T, D) are the shapes of the checkpoint's
        tensors."""
        width = shape.shape[1]
        all_of = [(row, number) for number, (row, part) in self.wishes.items() if part is None]
        tensor, buffer = np.array(all_of, np.int64).reshape(-1, 2).T
        whole = shape[tensor]
        zeros = np.zeros_like(whole)
        held = [(row, part, n) for n, (row, part) in self.wishes.items() if part is not None]
        parts = regions_of([part for _, part, _ in held], width)
        ends = [(row, number) for row, _, number in held]
        part_tensor, part_buffer = np.array(ends, np.int64).reshape(-1, 2)[parts.tensor].T
        return Targets(
            tensor=np.concatenate([tensor, part_tensor]),
            offsets=np.concatenate([zeros, parts.offsets]),
            lengths=np.concatenate([whole, parts.lengths]),
            local_start=np.concatenate([np.zeros_like(tensor), parts.local_start]),
            local_shape=np.concatenate([whole, parts.local_shape]),
            buffer=np.concatenate([buffer, part_buffer]),
        )


@dataclass
class Match:
    """The match of a state with a checkpoint, as one rank sees it.

    By name, with a text for people: ``missing`` are in the state only; ``mismatched`` are in both,
    but cannot be filled; ``castable`` could be filled with ``cast``; ``shared`` are one in the
    state, but stored with different values. ``tensors`` and ``values`` are the rows of the
    checkpoint that have a place in the state; ``assign`` are the values to put into its containers.
    """

    wanted: Wanted = field(default_factory=Wanted)
    missing: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    castable: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Items that a failed load began to fill, and this one would not."""
    tensors: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    """Names of the tensors and objects that a load fills."""
    assign: list[tuple[int, Key, int]] = field(default_factory=list)
    """(container of the state, key, row of the value in the checkpoint)"""


def match(flat: FlatState, manifest: Manifest, rank: int, *, cast: bool) -> Match:
    """Match ``flat`` with the checkpoint. Reads no data; finds every difference."""
    found = Match()
    _match_tensors(found, flat, manifest.tensors, rank, cast)
    _match_values(found, flat, manifest.tree, rank)
    _settle_shared_containers(found, flat, manifest.tree, rank)
    return found


def _match_tensors(
    found: Match, flat: FlatState, stored: TensorTable, rank: int, cast: bool
) -> None:
    if not len(stored):
        found.missing |= {name: _missing(flat, row) for row, name in enumerate(flat.names)}
        return
    sources = stored.find_all(flat.names, rank)
    fits = _fitting(flat, stored, sources)
    if (stored.owner < 0).all():  # each name has one row
        found.tensors.update(sources[sources >= 0].tolist())
    else:
        found.tensors.update(row for name in flat.names for row in stored.rows.get(name, ()))
    alias = np.where(stored.alias < 0, np.arange(len(stored)), stored.alias)[sources]
    if fits.all() and (sources >= 0).all() and _are_plain(flat):
        found.wanted.add_all_whole(alias, flat.locals, flat.names)
        return
    for row, (source, root, fit) in enumerate(
        zip(sources.tolist(), alias.tolist(), fits.tolist(), strict=True)
    ):
        if source < 0:
            found.missing[flat.names[row]] = _missing(flat, row)
            continue
        local = flat.locals[row]
        layout = flat.layouts[row]
        problem = None
        if not fit:
            local, layout = _clipped(flat, row, stored.shape_of(source))
            problem = _problem(stored, source, layout.shape, flat.dtypes[row], cast)
        if problem is None and not local.is_contiguous():
            problem = _unfillable(local)
        if problem is not None:
            kind = found.castable if problem.endswith(_CASTABLE) else found.mismatched
            kind[flat.names[row]] = f"{flat.path(row)}: {problem}"
        else:
            found.wanted.add_held(root, local, layout, flat.names[row])


def _are_plain(flat: FlatState) -> bool:
    """Return whether all tensors of the state are whole and contiguous.

    That holds for most states, and saves looking at each tensor.
    """
    layouts = {id(layout): layout for layout in flat.layouts}
    whole = all(layout.local_shape == layout.shape for layout in layouts.values())
    return whole and all(map(torch.Tensor.is_contiguous, flat.locals))


def _clipped(flat: FlatState, row: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, Layout]:
    """Return the part to fill from a tensor of ``shape``, which is smaller for a padded tensor."""
    origin = flat.origins[row]
    if isinstance(origin, KeyedShard) and origin.fits_in(shape):
        return layout_of(origin.clipped(shape), lambda: flat.path(row))
    return flat.locals[row], flat.layouts[row]


def _missing(flat: FlatState, row: int) -> str:
    return f"{flat.path(row)}: no tensor {flat.names[row]!r} in the checkpoint"


def _fitting(flat: FlatState, stored: TensorTable, sources: Ints) -> npt.NDArray[np.bool_]:
    """Return whether shape and dtype equal the stored ones, (rows of the state,) bool."""
    ndim = np.fromiter(map(len, flat.shapes), np.int64, len(flat.shapes))
    width = max(stored.shape.shape[1], int(ndim.max(initial=0)))
    shapes = widen(stored.shape, width, 1)[sources] == padded(flat.shapes, width, 1)
    codes = {vars(torch).get(name): code for code, (name, _) in enumerate(stored.dtypes)}
    dtypes = np.fromiter((codes.get(d, -1) for d in flat.dtypes), np.int64, len(flat.dtypes))
    fits: npt.NDArray[np.bool_] = (
        shapes.all(axis=1) & (stored.ndim[sources] == ndim) & (stored.dtype[sources] == dtypes)
    )
    return fits


def _problem(
    stored: TensorTable, source: int, shape: tuple[int, ...], wanted: torch.dtype, cast: bool
) -> str | None:
    dtype = dtype_of(*stored.dtypes[stored.dtype[source]])
    if stored.shape_of(source) != shape:
        return (
            f"shape {list(stored.shape_of(source))} in the checkpoint, {list(shape)} in the state"
        )
    if dtype == wanted:
        return None
    castable = torch.can_cast(dtype, wanted) and is_convertible(dtype, wanted)
    if cast and castable:
        return None
    text = f"dtype {dtype_name(dtype)} in the checkpoint, {dtype_name(wanted)} in the state"
    return text + _CASTABLE if castable else text


def _unfillable(local: torch.Tensor) -> str | None:
    span = 0  # bytes spanned by the smaller strides; the next stride must exceed it
    for stride, size in sorted(
        (stride, size) for stride, size in zip(local.stride(), local.shape, strict=True) if size > 1
    ):
        if stride <= span:
            return "a tensor whose elements share memory cannot be filled"
        span += stride * (size - 1)
    return None


def typed_paths(tree: Tree) -> list[TypedPath]:
    """Return the keys that lead to each container, with their types: 1, True and 1.0 are
    distinct."""
    out: list[TypedPath] = [()]
    for c in tree.containers[1:]:
        out.append((*out[c.parent], typed(c.key)))
    return out


def value_paths(tree: Tree) -> list[TypedPath]:
    """Return the keys that lead to each value, with their types."""
    containers = typed_paths(tree)
    return [(*containers[value.container], typed(value.key)) for value in tree.values]


def typed(key: Key) -> tuple[str, Key]:
    """Return ``key`` with its type."""
    return type(key).__name__, key


def _match_values(found: Match, flat: FlatState, stored: Tree, rank: int) -> None:
    at = {path: i for i, path in enumerate(value_paths(stored))}
    # The small values of modules and optimizers (hyperparameters) vary with torch's version: shared
    # ones are loaded, all others stay as they are.
    objects = subtree_paths(flat)
    lenient = [path for path, s in zip(objects, flat.subtrees, strict=True) if s.state is not None]
    filled = {
        c for c, name in zip(flat.containers, flat.names, strict=True) if name not in found.missing
    }
    absent: list[tuple[Value, list[Key]]] = []
    for path, value in zip(value_paths(flat.tree), flat.tree.values, strict=True):
        inside = next((p for p in lenient if path[: len(p)] == p), None)
        if path in at:
            found.values.add(at[path])
            if value.container in flat.made_of:
                _compare_descriptions(found, flat, value, stored.values[at[path]], rank)
                continue
            if inside is None or not _is_own_layout(path[len(inside) :]):
                found.assign.append((value.container, value.key, at[path]))
        elif inside is None and (value.container not in flat.made_of or value.container in filled):
            absent.append((value, [key for _, key in path]))
    assigned = {_slot(flat, container, key) for container, key, _ in found.assign}
    for value, keys in absent:
        if _slot(flat, value.container, value.key) not in assigned:
            found.missing[dotted(keys)] = f"{format_path(keys)}: no such value in the checkpoint"
    found.values.update(i for path, i in at.items() if any(path[: len(p)] == p for p in objects))


def _compare_descriptions(
    found: Match, flat: FlatState, present: Value, stored: Value, rank: int
) -> None:
    """Report a composite tensor of another kind, whose inner tensors would mean nothing."""
    ours = present.of(rank)
    theirs = stored.of(rank)
    if not agrees(theirs, ours):
        keys = flat.tree.paths()[present.container]
        found.mismatched[dotted(keys)] = (
            f"{format_path(keys)}: {theirs} in the checkpoint, {ours} in the state"
        )


def _settle_shared_containers(found: Match, flat: FlatState, stored: Tree, rank: int) -> None:
    """Resolve containers that are in the state at two places: the last value assigned wins.

    Reports those whose stored values differ.
    """
    last: dict[_Slot, int] = {}
    for container, key, row in found.assign:
        place = _slot(flat, container, key)
        before = last.setdefault(place, row)
        if before != row and repr(stored.values[before].of(rank)) != repr(
            stored.values[row].of(rank)
        ):
            names = [_dotted_value(stored, each) for each in (before, row)]
            found.shared[names[1]] = (
                f"values {names[0]!r} and {names[1]!r} are one object in the state, but differ in "
                f"the checkpoint"
            )
        last[place] = row
    if len(last) < len(found.assign):
        found.assign = [
            (container, key, row)
            for container, key, row in found.assign
            if last.get(_slot(flat, container, key), row) == row
        ]


def _slot(flat: FlatState, container: int, key: Key) -> _Slot:
    """Return the place of a value: the same for a container that is in the state twice, unless it
    is a tuple, which is rebuilt at each place."""
    node = flat.nodes[container]
    return ~container if isinstance(node, tuple) else id(node), *typed(key)


def _dotted_value(tree: Tree, row: int) -> str:
    value = tree.values[row]
    return dotted((*tree.paths()[value.container], value.key))


def subtree_paths(flat: FlatState) -> list[TypedPath]:
    """Return the keys that lead to each object; empty if the object is the state itself."""
    containers = typed_paths(flat.tree)
    return [
        (*containers[each.parent], typed(each.key)) if each.parent >= 0 else ()
        for each in flat.subtrees
    ]


def _is_own_layout(path: TypedPath) -> bool:
    """Return whether ``path`` is a group's list of parameters, which the loading job decides."""
    keys = [key for _, key in path]
    return len(keys) == 4 and keys[0] == "param_groups" and keys[2] == "params"
