"""Tensors of veScale, as classes of their shape: what each rank is taken to hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.vescale_standin import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    distributed,
)

from holdfast.errors import StateError
from holdfast.storage.state.adapters.composite import is_made_of
from holdfast.storage.state.adapters.tensors import layout_of


def path() -> str:
    """How a tensor is called."""
    return 'state["w"]'


@st.composite
def laid_out(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    """The shapes of a tensor and of a mesh, and placements."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    shape = list(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    placements: list[Placement] = []
    in_sections: set[int] = set()
    for parts in mesh:
        kind = draw(st.sampled_from(["replicate", "shard", "interleaved"]))
        dim = draw(st.integers(0, len(shape) - 1))
        taken = {p.dim % len(shape) for p in placements if isinstance(p, Shard)}
        if kind == "interleaved" and dim not in taken:
            sections = draw(st.integers(1, 3))
            shape[dim] = sections * parts * draw(st.integers(1, 3))
            placements.append(InterleavedShard(dim, sections))
            in_sections.add(dim)
        elif kind == "shard" and dim not in in_sections:
            placements.append(Shard(dim - len(shape) if draw(st.booleans()) else dim))
        else:
            placements.append(Replicate())
    return tuple(shape), mesh, placements


@given(laid_out())
def test_a_rank_holds_what_splitting_gives_it(
    made: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    """Element by element: each is where the layout says, on every rank of the mesh, and ranks that
    hold the same know of each other."""
    shape, mesh_shape, placements = made
    whole = torch.arange(math.prod(shape)).reshape(shape)
    ranks = torch.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    held: dict[int, torch.Tensor] = {}
    holders: dict[int, Any] = {}
    for rank in range(ranks.numel()):
        tensor = distributed(whole, DeviceMesh(ranks, rank), placements)
        local, layout = layout_of(tensor, path)
        assert layout.shape == shape
        for piece in layout.pieces:
            begins, lengths = piece.box.offsets, piece.box.lengths
            window = tuple(slice(b, b + n) for b, n in zip(begins, lengths, strict=True))
            strides = local.contiguous().stride()
            found = torch.as_strided(local, lengths, strides, piece.local_start)
            assert torch.equal(found, whole[window])
        assert sum(piece.box.volume for piece in layout.pieces) == local.numel()
        held[rank] = local
        holders[rank] = layout.holders
    for rank, others in holders.items():
        assert rank in others
        assert all(torch.equal(held[other], held[rank]) for other in others)


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ([Partial(), Replicate()], "Partial"),
        ([InterleavedShard(0, 4), Replicate()], "InterleavedShard(0, 4)"),
        ([InterleavedShard(0, 3), Shard(0)], "split dimension 0 twice"),
    ],
    ids=["partial", "uneven sections", "twice"],
)
def test_what_is_not_known_is_refused_by_name(placements: list[Placement], text: str) -> None:
    """And by its path."""
    mesh = DeviceMesh([[0, 1], [2, 3]], rank=0)
    tensor = DTensor(torch.zeros(6, 4), mesh, placements, torch.Size((12, 4)))
    with pytest.raises(StateError) as error:
        layout_of(tensor, path)
    assert 'state["w"]' in str(error.value)
    assert text in str(error.value)


def test_a_part_of_another_shape_is_refused() -> None:
    """What a rank holds is not what its placements imply."""
    mesh = DeviceMesh([0, 1], rank=0)
    tensor = DTensor(torch.zeros(5, 4), mesh, [Shard(0)], torch.Size((12, 4)))
    with pytest.raises(StateError, match=r"imply \(6, 4\)"):
        layout_of(tensor, path)


def test_a_rank_beside_the_mesh_holds_nothing() -> None:
    """Whatever the placements are."""
    mesh = DeviceMesh([0, 1], rank=2)
    tensor = distributed(torch.zeros(12, 4), mesh, [Shard(0)])
    local, layout = layout_of(tensor, path)
    assert layout.is_empty
    assert local.numel() == 0
    assert not is_made_of(tensor)
