"""DTensors: converts device meshes and placements to boxes.

This module knows torch; the planner does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from ....errors import StateError
from ....planner.layout import MeshLayout
from ....planner.placement import Placement, Replicated, Split, holders, local_pieces, local_shape
from ...ranks.process_group import acting_name, current_numbers

V = TypeVar("V")


@dataclass(slots=True)
class MeshLayouts:
    """The layouts of tensors on one mesh, each built once: layers repeat, so a model has few.

    Looking up placements takes torch longer than everything else about a tensor. So layouts are
    also cached by the identity of the placements tuple. A tensor keeps its tuple, also when
    detached, and the cache keeps it alive, so that no other tuple gets its id.
    """

    by_value: dict[Hashable, MeshLayout] = field(default_factory=dict)
    by_tuple: dict[Hashable, tuple[Hashable, MeshLayout]] = field(default_factory=dict)

    def of(self, tensor: DTensor, path: Callable[[], str]) -> MeshLayout:
        """Return this rank's layout of ``tensor``.

        Raises StateError for a placement that is not a layout (Partial), or is unknown.
        """
        placements = tensor.placements
        shape = tensor.shape
        known = self.by_tuple.get((id(placements), shape))
        if known is not None:
            return known[1]
        layout = self.by_value.get((placements, shape))
        if layout is None:
            _make_room(self.by_value)
            layout = mesh_layout(tensor.device_mesh, tuple(shape), placements, path)
            self.by_value[placements, shape] = layout
        _make_room(self.by_tuple)
        self.by_tuple[id(placements), shape] = (placements, layout)
        return layout


class DTensorAdapter:
    """Reads DTensors, see :class:`.tensors.TensorAdapter`."""

    def __init__(self) -> None:
        self._layouts: dict[int, MeshLayouts] = {}  # by mesh id

    def local(self, tensor: DTensor) -> torch.Tensor:
        """Return this rank's local tensor, without a node in the autograd graph."""
        return local_part(tensor)

    def layout(self, tensor: DTensor, local: torch.Tensor, path: Callable[[], str]) -> MeshLayout:
        """Return the layout of ``local`` in the whole tensor.

        Raises StateError for a placement that is not a layout (Partial), and for a local tensor
        that does not match its placements.
        """
        mesh = tensor.device_mesh
        layouts = self._layouts.get(id(mesh))
        if layouts is None:
            layouts = self._layouts[id(mesh)] = layouts_on(mesh)
        layout = layouts.of(tensor, path)
        if local.shape != layout.local_shape and (layout.pieces or local.numel()):
            raise StateError(
                f"{path()} holds a local tensor of shape {tuple(local.shape)}, but "
                f"{tensor.placements} of shape {tuple(tensor.shape)} imply {layout.local_shape}",
                advice=(
                    "This release does not support the layout of this tensor. Redistribute it "
                    "evenly."
                ),
            )
        check_layout(tensor, local, layout, path)
        return layout


def recorded_placements(tensor: DTensor) -> tuple[str, ...]:
    """Return the layout as recorded in a manifest, for a load that has to create the tensor.

    One text per dimension of the mesh: ``R`` for Replicate, ``S0`` for Shard(0).
    """
    return tuple(
        "R" if isinstance(placement, Replicate) else f"S{getattr(placement, 'dim', 0)}"
        for placement in tensor.placements
    )


def local_part(tensor: DTensor) -> torch.Tensor:
    """Return ``tensor.to_local()`` without a node in the autograd graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_part(tensor)
    local = tensor.to_local()
    if hasattr(local, "wait"):
        return local.wait()  # type: ignore[no-any-return]
    return seen_through(local)


def seen_through(local: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the detached ``local``; ``local`` itself if it wraps none.

    A *transparent* wrapper is a tensor around one tensor with the same shape and dtype, such as a
    weight that FSDP2 gathers in eight bits, as torchao trains with them. The inner tensor is all of
    the data, and is stored under the wrapper's name, so it moves to and from unwrapped weights.
    Everything else in the wrapper is derived from it, and the wrapper drops that when detached.
    """
    around: Any = local
    if not hasattr(around, "__tensor_flatten__"):
        return local
    names, _ = around.__tensor_flatten__()
    if len(names) != 1:
        return local
    inner = getattr(around, names[0])
    if (inner.shape, inner.dtype) != (local.shape, local.dtype):
        return local
    return seen_through(inner)


def _make_room(known: dict[Hashable, V]) -> None:
    if len(known) >= _LAYOUTS_MAX:
        known.clear()


def hooked(tensor: torch.Tensor, local: torch.Tensor | None = None) -> bool:
    """Return whether ``tensor``, or its local tensor ``local``, reports its layout by hooks of its
    own, so that the placements of a DTensor may be wrong.

    The hooks are the methods of the protocol in ``torch.distributed._checkpointable``.
    """
    # Every DTensor has these methods, which ask the local tensor. Only overrides count.
    if type(tensor) is DTensor:
        own = _CHUNKS in tensor.__dict__ or _WRITES in tensor.__dict__
    elif isinstance(tensor, DTensor):
        own = any(
            getattr(type(tensor), name) is not getattr(DTensor, name) for name in (_CHUNKS, _WRITES)
        )
    else:
        own = hasattr(tensor, _CHUNKS) or hasattr(tensor, _WRITES)
    return own or (local is not None and (hasattr(local, _CHUNKS) or hasattr(local, _WRITES)))


_CHUNKS = "__create_chunk_list__"
_WRITES = "__create_write_items__"


def check_layout(
    tensor: DTensor, local: torch.Tensor, layout: MeshLayout, path: Callable[[], str]
) -> None:
    """Raise StateError if hooks of ``tensor`` or its part ``local`` contradict ``layout``."""
    if not hooked(tensor, local):
        return
    implied = sorted((tuple(p.box.offsets), tuple(p.box.lengths)) for p in layout.pieces)
    reported = _reported_boxes(tensor, local)
    if reported != implied:
        said = "do not say where it lies"
        if reported is not None:
            said = f"say that it holds {_text(reported)}"
        raise StateError(
            f"{path()} is a DTensor whose hooks {said}, but {tensor.placements} of shape "
            f"{tuple(tensor.shape)} imply "
            f"{_text(implied)}: it has a layout that this release does not support, such as "
            f"Megatron-FSDP's",
            advice="Redistribute it to Shard or Replicate, or shard with fully_shard (FSDP2).",
        )


def _reported_boxes(tensor: DTensor, local: torch.Tensor) -> list[Box] | None:
    """Return the non-empty boxes (offsets, lengths) reported by hooks; None if no hook reports
    any."""
    source: torch.Tensor = tensor
    if hasattr(local, _CHUNKS):
        source = local
    elif hasattr(local, _WRITES):
        return None
    chunks = getattr(source, _CHUNKS)()
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return sorted(box for box in boxes if 0 not in box[1])


def _text(boxes: list[Box]) -> str:
    return (
        ", ".join(f"{list(lengths)} at {list(offsets)}" for offsets, lengths in boxes[:4])
        or "nothing"
    )


Box = tuple[tuple[int, ...], tuple[int, ...]]
_LAYOUTS_MAX = 4096
_layouts: WeakKeyDictionary[DeviceMesh, dict[Hashable, MeshLayouts]] = WeakKeyDictionary()


def layouts_on(mesh: DeviceMesh) -> MeshLayouts:
    """Return the cached layouts of tensors on ``mesh``, for the current set of participating ranks.

    They are cached because listing the ranks of a large mesh takes long.
    """
    place = (_coordinate(mesh), acting_name())
    return _layouts.setdefault(mesh, {}).setdefault(place, MeshLayouts())


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Return this rank's coordinate on ``mesh``; None if it is not on it.

    Some releases of torch return a list.
    """
    at = mesh.get_coordinate()
    if at is None:
        return None
    return tuple(at)


def mesh_layout(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    placements: Sequence[TorchPlacement],
    path: Callable[[], str],
) -> MeshLayout:
    """Return this rank's layout of a tensor of ``shape`` on ``mesh``.

    Raises StateError for a placement that is not a layout.
    """
    coordinate = _coordinate(mesh)
    ranks = mesh.mesh.numpy()
    if coordinate is None:  # no placement to translate
        return MeshLayout(shape, (), (0,) * len(shape), (), ranks.size)
    splits = [_placement(placement, path) for placement in placements]
    return MeshLayout(
        shape,
        tuple(local_pieces(shape, ranks.shape, coordinate, splits)),
        local_shape(shape, ranks.shape, coordinate, splits),
        _taking_part(holders(ranks, coordinate, splits)),
        ranks.size,
    )


def _taking_part(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return the call's numbers of the ``holders`` (ranks of the job) that take part in it."""
    numbers = current_numbers()
    if numbers is None:
        return holders
    return tuple(sorted(numbers[rank] for rank in holders if rank in numbers))


def _placement(placement: object, path: Callable[[], str]) -> Placement:
    if isinstance(placement, Replicate):
        return Replicated()
    stride = getattr(
        placement, "split_factor", None
    )  # _StridedShard: FSDP2 on top of tensor parallelism
    if stride is not None:
        return Split(int(placement.dim), int(stride))  # type: ignore[attr-defined]
    if isinstance(placement, Shard):
        return Split(int(placement.dim))
    raise StateError(
        f"{path()} has the placement {placement}, which is not a layout",
        advice="Redistribute it to Shard or Replicate before saving.",
    )
