"""Placements: what ranks hold, compared with torch's own splitting of an arange tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.planner.box import Box
from holdfast.planner.layout import Piece
from holdfast.planner.placement import (
    Placement,
    Replicated,
    Split,
    holders,
    local_pieces,
    local_shape,
)

Shape = tuple[int, ...]
MESHES = [(1,), (3,), (7,), (2, 3), (4, 2), (2, 2, 2)]
SHAPES = [(0,), (1,), (5,), (8,), (9,), (27,), (6, 4), (7, 5), (1, 9), (3, 0), (4, 3, 5)]


def of_torch(placement: Placement) -> Replicate | Shard | _StridedShard:
    """Return the torch placement that ours mirrors."""
    if isinstance(placement, Replicated):
        return Replicate()
    if placement.stride > 1:
        return _StridedShard(placement.dim, split_factor=placement.stride)
    return Shard(placement.dim)


def split_by_torch(
    tensor: torch.Tensor, mesh_shape: Shape, coordinate: Shape, placements: Sequence[Placement]
) -> torch.Tensor:
    """Return the local tensor at ``coordinate``, cut from left to right by torch's own code."""
    for size, at, placement in zip(mesh_shape, coordinate, map(of_torch, placements), strict=True):
        if not isinstance(placement, Replicate):
            shards, _ = placement._split_tensor(tensor, size, with_padding=False, contiguous=True)
            tensor = shards[at]
    return tensor


def assert_like_torch(shape: Shape, mesh_shape: Shape, placements: Sequence[Placement]) -> None:
    """Check that every rank of the mesh holds what torch gives it, where torch puts it."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        expected = split_by_torch(whole, mesh_shape, coordinate, placements)
        actual = torch.full(local_shape(shape, mesh_shape, coordinate, placements), -1)
        for piece in local_pieces(shape, mesh_shape, coordinate, placements):
            offsets = np.unravel_index(piece.local_start, piece.local_shape)
            here = Box(tuple(map(int, offsets)), piece.box.lengths)
            actual[slices(here)] = whole[slices(piece.box)]
        assert actual.tolist() == expected.tolist()
        assert actual.shape == expected.shape


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index."""
    return tuple(slice(*pair) for pair in zip(box.offsets, box.stops, strict=True))


def choices(ndim: int, mesh_shape: Shape) -> Iterator[tuple[Placement, ...]]:
    """Return all combinations of plain placements for a mesh."""
    return itertools.product([Replicated(), *map(Split, range(ndim))], repeat=len(mesh_shape))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_plain_splits_agree_with_torch(mesh_shape: Shape) -> None:
    """Shard and Replicate, even or not, give each rank the elements that torch gives it."""
    for shape in SHAPES:
        for placements in choices(len(shape), mesh_shape):
            assert_like_torch(shape, mesh_shape, placements)


@pytest.mark.parametrize(("dp", "tp"), [(1, 3), (2, 2), (3, 4), (4, 1)])
def test_fsdp_over_tensor_parallel_agrees_with_torch(dp: int, tp: int) -> None:
    """The strided shards of FSDP2 over tensor parallelism hold torch's elements in its order."""
    for nrows in [*range(20), 27, 38]:
        assert_like_torch((nrows, 2), (dp, tp), [Split(0, stride=tp), Split(0)])


def test_even_strided_shards_are_one_box() -> None:
    """FSDP2 over tensor parallelism with even sizes needs one box per rank."""
    pieces = local_pieces((8, 8), (2, 2), (0, 1), [Split(0, stride=2), Split(0)])
    assert pieces == [Piece(Box((4, 0), (2, 8)), 0, (2, 8))]


def test_holders_hold_the_same_pieces() -> None:
    """Exactly the ranks named as holders have equal pieces, when every part has elements."""
    mesh = np.arange(12).reshape(2, 3, 2)
    placements: list[Placement] = [Replicated(), Split(0), Replicated()]
    coordinates = list(itertools.product(range(2), range(3), range(2)))
    held = {at: local_pieces((9, 2), mesh.shape, at, placements) for at in coordinates}
    for mine in coordinates:
        same = [int(mesh[at]) for at in coordinates if held[at] == held[mine]]
        assert holders(mesh, mine, placements) == tuple(same)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "coordinate", "placements"),
    [
        ((4,), (2,), (0,), [Split(1)]),
        ((4,), (2,), (2,), [Split(0)]),
        ((4,), (2, 2), (0, 0), [Split(0)]),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    shape: Shape, mesh_shape: Shape, coordinate: Shape, placements: Sequence[Placement]
) -> None:
    """A missing tensor dimension, mesh coordinate or placement raises ValueError."""
    with pytest.raises(ValueError, match=r"placement|Split|coordinate"):
        local_pieces(shape, mesh_shape, coordinate, placements)
