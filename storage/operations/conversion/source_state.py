"""The state of an import: its tensors have no memory; their chunks are read from source files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from ....core.garbage import collector_paused
from ....planner.box import Box
from ....planner.columns import volumes
from ....planner.layout import BoxLayout, Layout
from ...pipeline.file_chunks import Enclosed, Stretch
from ...state.adapters.shards import Shard
from ...state.dtypes import dtype_of
from ...state.flat_state import FlatState
from ...state.flattening.by_path import Path, flat_state_at, sound_paths
from ...state.plan import ImagePlan
from .model_source import Model, SourceTensor

__all__ = ["places_of", "source_state"]

_STAND_IN = torch.empty(0)
"""Stands for every tensor, because none is in memory."""


def source_state(
    model: Model, new_names: Mapping[str, str]
) -> tuple[FlatState, Sequence[SourceTensor]]:
    """Return a state with the contents of ``model`` under new names, and the source of each row.

    An item that keeps its name also keeps its path in the state, if known; otherwise its name is a
    top-level key. Raises StateError for a value that cannot be stored.
    """
    with collector_paused():
        return _source_state(model, new_names)


def _source_state(
    model: Model, new_names: Mapping[str, str]
) -> tuple[FlatState, Sequence[SourceTensor]]:
    parts: defaultdict[str, list[SourceTensor]] = defaultdict(list)
    for tensor in model.tensors:
        parts[new_names[tensor.name]].append(tensor)
    values = {new_names[name]: value for name, value in model.values.items()}
    items = {**values, **dict.fromkeys(parts, _STAND_IN)}
    flat = flat_state_at(_paths_of(model, new_names), items)
    flat.placeholders = {}  # tensors without elements are imported as such: no module holds them
    sources = [parts[name][0] for name in flat.names]
    for name, container in list(zip(flat.names, flat.containers, strict=True)):
        further = parts[name][1:]
        flat.names += [name] * len(further)
        flat.containers += [container] * len(further)
        sources += further
    flat.shapes = [tensor.shape for tensor in sources]
    flat.dtypes = [dtype_of(tensor.dtype, tensor.itemsize) for tensor in sources]
    flat.layouts = [_layout_of(tensor) for tensor in sources]
    flat.locals = [_STAND_IN] * len(sources)
    flat.origins = [_STAND_IN] * len(sources)
    flat.alias = _aliases(sources)
    return flat, sources


def places_of(
    plan: ImagePlan, sources: Sequence[SourceTensor]
) -> list[tuple[Stretch | Enclosed, int, int]]:
    """Return the source of each shard of an image: a place, the offset in it, and a size in
    bytes."""
    held = plan.held
    starts = (held.local_start * held.itemsize).tolist()
    sizes = (volumes(held.lengths) * held.itemsize).tolist()
    places = [sources[row].where for row in held.tensor.tolist()]
    return list(zip(places, starts, sizes, strict=True))


def _paths_of(model: Model, new_names: Mapping[str, str]) -> dict[str, Path]:
    """Return the path of each item in the state, by new name."""
    if not model.paths:
        return {new_name: (new_name,) for new_name in new_names.values()}
    paths: dict[str, Path] = {}
    for name, new_name in new_names.items():
        path = model.paths.get(name, ())
        if new_name != name or ".".join(map(str, path)) != name:
            path = (new_name,)
        paths[new_name] = path
    return sound_paths(paths)


def _layout_of(tensor: SourceTensor) -> Layout:
    """Return the layout of a tensor or part."""
    if not isinstance(tensor.part, tuple):
        box = tensor.part or Box((0,) * len(tensor.shape), tensor.shape)
        return BoxLayout(tensor.shape, box)
    start, stop = tensor.part
    return Shard(torch.empty(()).expand(stop - start), shape=tensor.shape, flat=tensor.part).layout


def _aliases(sources: Sequence[SourceTensor]) -> list[int]:
    """Return per row an earlier row that is the same whole tensor in the same file range, or -1."""
    first: dict[object, int] = {}
    aliases = []
    for row, tensor in enumerate(sources):
        before = row
        if tensor.where.nbytes and tensor.part is None:
            before = first.setdefault((tensor.where, tensor.dtype, tensor.shape), row)
        aliases.append(before if before != row else -1)
    return aliases
