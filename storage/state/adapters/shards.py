"""Parts of tensors declared by the caller, for frameworks without an adapter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from ....errors import UsageError
from ....planner.box import Box
from ....planner.layout import FlatLayout, MeshLayout, box_layout
from .dtensor import DTensorAdapter, local_part

# A state is recognized by the identity of its layouts. There are as many of these as parts.
_box_layout = functools.lru_cache(maxsize=1 << 16)(box_layout)
_flat_layout = functools.lru_cache(maxsize=1 << 16)(FlatLayout)


class Shard:
    """The part of a larger tensor that this rank holds, used in a state in place of a tensor.

    ``tensor`` holds the part, and a load fills it in place. ``shape`` is that of the whole tensor.
    The position of the part is given by one of:

    ``offset``   the part is a box with the shape of ``tensor`` that begins at this index of the
                 whole tensor. ``tensor`` may be a DTensor, whose mesh divides the box further: the
                 local experts of expert parallelism, sharded by FSDP2
    ``flat``     ``tensor`` has one dimension, and holds elements (start, stop) of the whole tensor
                 in row-major order: what ZeRO, FSDP1 and Megatron's optimizers hold

    The parts of all ranks make up the whole tensor: each element is in one of them. Ranks that hold
    the same part are replicas, and it is stored once. A part may be empty. A checkpoint saved in
    parts loads into any other layout, and vice versa.

    Raises UsageError if the part does not fit into a tensor of that shape.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        shape: Sequence[int],
        offset: Sequence[int] | None = None,
        flat: tuple[int, int] | None = None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a Shard of a {type(tensor).__name__}", advice="Pass a torch tensor.")
        if (offset is None) == (flat is None):
            raise UsageError(
                "a Shard is a box or a flat range", advice="Give either offset= or flat=."
            )
        whole = tuple(map(int, shape))
        if any(length < 0 for length in whole):
            raise UsageError(f"a Shard of a tensor of shape {list(whole)}")
        self.tensor = local_part(tensor) if isinstance(tensor, DTensor) else tensor
        self.layout: MeshLayout | FlatLayout
        if flat is not None and isinstance(tensor, DTensor):
            raise UsageError(
                "a flat range of a DTensor, which is divided by its own mesh",
                advice="Give offset=, or pass its to_local().",
            )
        if flat is not None:
            self.layout = _checked_range(tensor, whole, flat)
        elif offset is not None:
            self.layout = _checked_box(tensor, whole, tuple(map(int, offset)))
        if isinstance(tensor, DTensor):
            self.layout = _within(tensor, self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.layout.shape

    def __repr__(self) -> str:
        return f"Shard({self.layout.region} of {list(self.shape)}, {self.tensor.dtype})"


_MARK = "holdfast_part"


def mark_part(
    parameter: torch.nn.Parameter, *, shape: Sequence[int], offset: Sequence[int]
) -> None:
    """Declare that a module's parameter is a box of a larger tensor, as in :class:`Shard`.

    Modules in a state then have that part, and so does the state of their optimizers. Mark a
    parameter after the module has its final memory and has been sharded, before it is saved or
    loaded. Raises UsageError if the part does not fit into a tensor of that shape.
    """
    box = Shard(parameter, shape=shape, offset=offset)
    parameter.__dict__[_MARK] = (box.shape, tuple(map(int, offset)))


def mark_of(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape of the whole parameter and the offset in it, if it is marked."""
    mark: tuple[tuple[int, ...], tuple[int, ...]] | None = parameter.__dict__.get(_MARK)
    return mark


def _checked_range(
    tensor: torch.Tensor, shape: tuple[int, ...], flat: tuple[int, int]
) -> FlatLayout:
    start, stop = map(int, flat)
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise UsageError(
            f"flat=({start}, {stop}) is not a range of the {numel} elements of a tensor of shape "
            f"{list(shape)}",
            advice="Give the first element and the one past the last, of the whole tensor.",
        )
    if tensor.ndim != 1:
        raise UsageError(
            f"a flat range needs a tensor of one dimension, and this one has shape "
            f"{list(tensor.shape)}",
            advice="Pass tensor.view(-1).",
        )
    if tensor.numel() != stop - start:
        raise UsageError(
            f"flat=({start}, {stop}) is {stop - start} elements, and the tensor has "
            f"{tensor.numel()}",
            advice="Pass only the part, without the padding of its buffer: buffer[:n].",
        )
    return _flat_layout(shape, start, stop)


def _checked_box(
    tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]
) -> MeshLayout:
    lengths = tuple(tensor.shape)
    if not len(lengths) == len(offset) == len(shape):
        raise UsageError(
            f"a part of shape {list(lengths)} at {list(offset)} of a tensor of shape "
            f"{list(shape)}: their numbers of dimensions differ",
            advice="Use flat=(start, stop) for a part of a flattened tensor.",
        )
    if any(
        at < 0 or at + length > size
        for at, length, size in zip(offset, lengths, shape, strict=True)
    ):
        raise UsageError(
            f"a part of shape {list(lengths)} at {list(offset)} sticks out of a tensor of shape "
            f"{list(shape)}"
        )
    return _box_layout(shape, Box(offset, lengths))


def _within(tensor: DTensor, box: MeshLayout | FlatLayout) -> MeshLayout:
    """Return the layout of this rank's part of ``tensor``, which fills ``box`` of a larger one."""
    local = DTensorAdapter().layout(tensor, local_part(tensor), lambda: "a DTensor in a Shard")
    start = box.pieces[0].box.offsets if box.pieces else (0,) * len(box.shape)
    pieces = tuple(replace(piece, box=piece.box.shifted(start)) for piece in local.pieces)
    return MeshLayout(box.shape, pieces, local.local_shape, local.holders, local.ranks)


class ShardAdapter:
    """Reads Shards, see :class:`.tensors.TensorAdapter`."""

    def local(self, tensor: Shard) -> torch.Tensor:
        """Return the part."""
        return tensor.tensor

    def layout(
        self, tensor: Shard, local: torch.Tensor, path: Callable[[], str]
    ) -> MeshLayout | FlatLayout:
        """Return the layout that the caller declared."""
        return tensor.layout
