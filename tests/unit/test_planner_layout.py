"""Layouts of tensors in this rank's memory, and the adapters that find them."""

from __future__ import annotations

import pytest
import torch
from support.layouts import Halves

from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece, local_layout
from holdfast.storage.state.adapters import tensors
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import plan_image


def test_a_plain_tensor_is_one_piece() -> None:
    """It is held whole, by ranks that its layout does not know."""
    layout = local_layout(torch.Size((2, 3)))
    assert layout.pieces == (Piece(Box((0, 0), (2, 3)), 0, (2, 3)),)
    assert type(layout.shape) is tuple
    assert (layout.holders, layout.ranks) == (None, 1)


def test_a_tensor_without_elements_has_no_pieces() -> None:
    """There is nothing of it to be stored."""
    assert local_layout((2, 0)).pieces == ()


def test_layouts_of_other_tensors_differ() -> None:
    """Two tensors of one piece each are not laid out alike where the whole is larger in one case."""
    piece = Piece(Box((0,), (2,)), 0, (2,))
    small, large = (MeshLayout(shape, (piece,), (2,), (0,), 2) for shape in ((2,), (4,)))
    assert small != large
    assert local_layout((2,)) == local_layout((2,))


def test_an_adapter_is_all_that_a_type_of_tensor_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a type that nothing else knows is saved box by box, once its adapter is
    registered."""
    monkeypatch.setitem(tensors.ADAPTERS, Halves, Halves.Adapter)
    flat = flatten({"w": Halves(torch.arange(6.0).reshape(2, 3), rows=4, at=2)})
    assert flat.shapes == [(4, 3)]
    plan = plan_image(flat, 0, None)
    assert (plan.held.offsets.tolist(), plan.held.lengths.tolist()) == ([[2, 0]], [[2, 3]])
