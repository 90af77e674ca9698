"""Boxes and byte ranges of shards that no save writes are damage; partial ties are not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri
from support.drivers import storage_at
from support.forgery import Alter, Columns, Head, forge
from support.ranks import save_cut, save_flats

import holdfast
from holdfast.planner.box import Box
from holdfast.planner.layout import MeshLayout, Piece
from holdfast.storage.state.flat_state import FlatState
from holdfast.storage.state.flattening.flatten import flatten


def in_two_shards() -> str:
    """A checkpoint of a tensor of 4 x 3, of which two ranks have stored two rows each."""
    uri = fresh_uri()
    boxes = {"w": [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]}
    save_cut(storage_at(uri), {"w": np.arange(12.0).reshape(4, 3)}, boxes)
    return uri


def moved(row: int, by: int) -> Alter:
    """Move the box of one shard along the first dimension."""

    def alter(columns: Columns, head: Head) -> None:
        columns["shard.offsets"] = columns["shard.offsets"].astype(np.int64)
        columns["shard.offsets"][row, 0] += by
        columns["shard.offsets"] = columns["shard.offsets"].astype(np.uint64)

    return alter


def test_a_box_that_sticks_out_of_its_tensor_is_damage() -> None:
    """Though the shards have as many elements as the tensor: the manifest is not opened."""
    uri = in_two_shards()
    forge(uri, moved(1, 1))
    with pytest.raises(holdfast.DamagedError, match="contradicts itself: boxes"):
        holdfast.open(uri)


def test_shards_of_a_wanted_tensor_that_overlap_are_damage() -> None:
    """Overlapping shards with the right number of elements would leave a row unfilled."""
    uri = in_two_shards()
    forge(uri, moved(1, -1))
    into = {"w": torch.full((4, 3), -1.0, dtype=torch.float64)}
    for load in (lambda: holdfast.load(uri, into=into), lambda: holdfast.load(uri)):
        with pytest.raises(holdfast.DamagedError, match="shards of a tensor overlap"):
            load()
    assert (into["w"] == -1).all()
    with holdfast.open(uri) as checkpoint, pytest.raises(holdfast.DamagedError, match="overlap"):
        checkpoint.read("w")


def test_a_shard_that_begins_within_an_element_is_damage() -> None:
    """Where nothing else is wrong with it: its bytes are within the image, and no other shard's."""
    uri = fresh_uri()
    holdfast.save(uri, {"w": torch.arange(4.0), "x": torch.arange(4)})

    def shifted(columns: Columns, head: Head) -> None:
        # The shorter element comes last. It has one dimension: half as long, it leaves room to
        # move.
        row = int(np.argmax(columns["shard.start"]))
        columns["shard.start"] = columns["shard.start"].astype(np.uint64)
        columns["shard.start"][row] += 1
        columns["shard.lengths"][row, 0] = 3
        columns["tensor.shape"][_tensor_of(columns, row), 0] = 3

    forge(uri, shifted)
    with pytest.raises(holdfast.DamagedError, match="contradicts itself: alignment of shards"):
        holdfast.open(uri)


def _tensor_of(columns: Mapping[str, np.ndarray], row: int) -> int:
    return int(np.repeat(np.arange(len(columns["tensor.shards"])), columns["tensor.shards"])[row])


def replicated(state: dict[str, torch.Tensor]) -> FlatState:
    """A state of DTensors, each of which two ranks hold whole."""
    flat = flatten(state)
    for row, shape in enumerate(flat.shapes):
        origin = (0,) * len(shape)
        piece = Piece(Box(origin, shape), 0, shape)
        flat.layouts[row] = MeshLayout(shape, (piece,), shape, (0, 1), 2)
    flat.layout_id = None
    return flat


def test_what_is_tied_on_one_rank_and_stored_by_another_is_no_alias() -> None:
    """A tensor tied on one rank only is stored by the rank that has it separately."""
    uri = fresh_uri()
    a = torch.arange(3.0)
    p = torch.full((1,), 7.0)
    flats = [
        replicated({"a": a, "p": p, "q": p}),
        replicated({"a": a, "p": p.clone(), "q": p.clone()}),
    ]
    save_flats(storage_at(uri), flats)
    assert difference({"a": a, "p": p, "q": p}, holdfast.load(uri)) is None
    with holdfast.open(uri) as checkpoint:
        assert torch.equal(checkpoint.read("q"), p)
        assert checkpoint.verify().ok
