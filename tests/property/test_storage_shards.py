"""Flat ranges, boxes and whole tensors are saved and loaded as any other parts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import fresh_uri, random_bits, raw
from support.drivers import storage_at
from support.effort import examples
from support.ranks import load_as_ranks, save_as_ranks

import holdfast
from holdfast import Shard
from holdfast.planner.box import Box

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex128]
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 7]), max_size=4).map(tuple)
Region = tuple[int, int] | Box | None
"""A flat range, a box, or the whole."""


@st.composite
def flat_parts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[list[Region]]:
    """Draw a range for each rank, or for each replica of fewer parts. Some are empty."""
    numel = math.prod(shape)
    n = draw(st.integers(1, world))
    cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=n - 1, max_size=n - 1)))
    ranges = draw(st.permutations(list(itertools.pairwise([0, *cuts, numel]))))
    return [[ranges[rank % n]] for rank in range(world)]


@st.composite
def box_parts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[list[Region]]:
    """Draw boxes, at most one for each rank, cut off from each other."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, world - 1))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, length in enumerate(box.lengths) if length > 1]
        if not dims:
            boxes.append(box)
            break
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.lengths[dim] - 1))
        boxes += [_cut(box, dim, 0, at), _cut(box, dim, at, box.lengths[dim])]
    held: list[list[Region]] = [[box] for box in boxes]
    held += [[] for _ in range(world - len(boxes))]
    return draw(st.permutations(held))


def _cut(box: Box, dim: int, start: int, stop: int) -> Box:
    offsets = list(box.offsets)
    lengths = list(box.lengths)
    offsets[dim] += start
    lengths[dim] = stop - start
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[list[Region]]:
    """Draw the parts of one tensor that each rank of a job holds."""
    whole: list[list[Region]] = [[None]] * world
    return draw(flat_parts(shape, world) | box_parts(shape, world) | st.just(whole))


def held(whole: torch.Tensor, region: Region, step: int) -> Any:
    """Return a part of a tensor in its own memory, with elements ``step`` apart."""
    if region is None:
        return _spread(whole, step)
    if isinstance(region, Box):
        box = whole[tuple(map(slice, region.offsets, region.stops))]
        return Shard(_spread(box, step), shape=whole.shape, offset=region.offsets)
    part = whole.reshape(-1)[region[0] : region[1]]
    return Shard(_spread(part, step), shape=whole.shape, flat=region)


def _spread(tensor: torch.Tensor, step: int) -> torch.Tensor:
    memory = torch.zeros((*tensor.shape, step), dtype=tensor.dtype)
    memory[..., 0] = tensor
    return memory[..., 0]


def local(item: Any) -> torch.Tensor:
    """Return the tensor of a leaf."""
    return item.tensor if isinstance(item, Shard) else item


@st.composite
def jobs(draw: st.DrawFn) -> Any:
    """Draw tensors, and the parts that the ranks of two jobs hold of them."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    tensors = {
        f"t{number}": random_bits(rng, draw(st.sampled_from(DTYPES)), shape)
        for number, shape in enumerate(shapes)
    }
    step = draw(st.sampled_from([1, 1, 2]))
    return tensors, *(_held_by(draw, tensors, draw(st.integers(1, 4)), step) for _ in "ab")


def _held_by(
    draw: st.DrawFn, tensors: dict[str, torch.Tensor], world: int, step: int
) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for name, whole in tensors.items():
        for state, regions in zip(states, draw(parts(tuple(whole.shape), world)), strict=True):
            state.update((name, held(whole, region, step)) for region in regions)
    return states


@examples(80)
@given(jobs(), st.data())
def test_parts_are_loaded_into_any_other_parts(case: Any, data: st.DataObject) -> None:
    """Parts come back bit for bit to ranks that hold other parts; readers slice the whole tensors."""
    tensors, saved, loaded = case
    uri = fresh_uri()
    driver = storage_at(uri)
    save_as_ranks(driver, saved)
    with holdfast.open(uri) as checkpoint:
        for name, whole in tensors.items():
            ends = [
                sorted(data.draw(st.integers(0, length)) for _ in "ab") for length in whole.shape
            ]
            index = tuple(slice(*pair) for pair in ends)
            assert raw(whole[index]) == raw(checkpoint.read(name, index))
    expected = [{name: raw(local(item)) for name, item in state.items()} for state in loaded]
    for state in loaded:
        for item in state.values():
            local(item).zero_()
    load_as_ranks(driver, loaded, strict="state")
    found = [{name: raw(local(item)) for name, item in state.items()} for state in loaded]
    assert found == expected
