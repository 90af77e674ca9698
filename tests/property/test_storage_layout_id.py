"""A state that is saved again is recognised; any difference in its layout is noticed."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.storage.state.adapters.dtensor import layouts_on
from holdfast.storage.state.fingerprint import fingerprint
from holdfast.storage.state.flat_state import FlatState
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import Agreed, plan_save

MESHES = [
    DeviceMesh("cpu", torch.arange(4).reshape(shape), _init_backend=False, _rank=1)
    for shape in ((2, 2), (4, 1))
]
BASE = torch.arange(64.0)


class Thing:
    """An object with a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def on_mesh(mesh: DeviceMesh, first: Any, second: Any, local: tuple[int, int]) -> DTensor:
    """A DTensor of 4 x 4 whose local part has the shape ``local``."""
    return DTensor.from_local(
        torch.zeros(local),
        mesh,
        [first, second],
        run_check=False,
        shape=torch.Size((4, 4)),
        stride=(4, 1),
    )


TENSORS = [
    BASE[:4],
    BASE[:4].reshape(2, 2),
    BASE[:4].reshape(2, 2).T,
    BASE[4:8],
    BASE[:4].view(torch.int32),
    torch.zeros(4),
    torch.zeros(0),
    torch.zeros(4, dtype=torch.complex64),
    torch.zeros(4, dtype=torch.complex64).conj(),
    torch.nn.Parameter(torch.zeros(4)),
    np.zeros(4, np.float32),
    on_mesh(MESHES[0], Shard(0), Replicate(), (2, 4)),
    on_mesh(MESHES[0], Replicate(), Shard(0), (2, 4)),
    on_mesh(MESHES[0], Replicate(), Shard(1), (4, 2)),
    on_mesh(MESHES[1], Replicate(), Shard(1), (4, 4)),
    on_mesh(MESHES[1], Replicate(), Replicate(), (4, 4)),
]
leaves = st.sampled_from(TENSORS) | st.sampled_from(
    [None, 1, 1.0, True, "x", b"x", torch.Size([1]), torch.float32]
)
keys = st.sampled_from(["a", "b", "1", 1, True, 0, False, 0.0, -0.0, None])


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers, and an object with a state."""
    entries = st.dictionaries(keys, inner, max_size=3)
    items = st.lists(inner, max_size=3)
    return entries | entries.map(OrderedDict) | items | items.map(tuple) | entries.map(Thing)


states = st.dictionaries(keys, st.recursive(leaves, branches, max_leaves=10), max_size=4)


@st.composite
def changed(draw: st.DrawFn, node: Any) -> Any:
    """Generate a copy of the state, equal or with a single change."""
    if (
        draw(st.integers(0, 5)) == 0
        or not isinstance(node, dict | list | tuple)
        or isinstance(node, torch.Size)
    ):
        return draw(st.one_of(leaves, st.just(node)))
    if isinstance(node, dict):
        items = list(node.items())
        how = draw(st.sampled_from(["turned", "without one", "another key", "inside"]))
        if how == "turned":
            items.reverse()
        if how == "without one":
            del items[-1:]
        if how == "another key" and items:
            items[0] = (draw(keys), items[0][1])
        if how == "inside" and items:
            at = draw(st.integers(0, len(items) - 1))
            items[at] = (items[at][0], draw(changed(items[at][1])))
        return type(node)(items)
    made = [*node]
    if made:
        at = draw(st.integers(0, len(made) - 1))
        made[at] = draw(changed(made[at]))
    return draw(st.sampled_from([list, tuple]))(made)


def described(flat: FlatState) -> str:
    """Describe everything in a flat state but its contents."""
    columns = (flat.names, flat.containers, flat.shapes, flat.dtypes, flat.layouts, flat.alias)
    tree = flat.tree.to_json()
    values = [(value.container, repr(value.key)) for value in flat.tree.values]
    return repr((columns, values, {name: part for name, part in tree.items() if name != "values"}))


def flattened(state: Any) -> FlatState | None:
    """Flatten a state; None if it is refused."""
    try:
        return flatten(state)
    except holdfast.StateError:
        return None


@examples(150)
@given(st.data())
def test_one_state_is_not_taken_for_another(data: st.DataObject) -> None:
    """Two states share a layout exactly if they differ in nothing but contents."""
    state = data.draw(states)
    first, again, other = map(flattened, (state, state, data.draw(changed(state))))
    if first is None or again is None or other is None:
        return
    assert first.layout_id is again.layout_id
    assert (first.layout_id is other.layout_id) == (described(first) == described(other))


@examples(50)
@given(states)
def test_what_is_planned_once_is_planned_alike(state: Any) -> None:
    """A cached plan has the first plan's layout and uses the new tensors."""
    first, again = flattened(state), flattened(state)
    if first is None or again is None:
        return
    agreed = Agreed({row: () for row, part in enumerate(first.layouts) if part.holders is None}, {})
    plans = [plan_save(flat, 1, agreed) for flat in (first, again)]
    assert plans[0].layout is plans[1].layout
    assert plans[0].source is not plans[1].source
    assert plans[0].layout.header == plans[1].layout.header


def test_no_two_leaves_are_taken_for_each_other() -> None:
    """No pair of leaves shares a layout with another, even next to tied tensors."""
    pool = [*TENSORS, BASE[:4], torch.zeros(2, 2), 1, 1.0, [1], (1,), {"a": 1}, Thing({"a": 1})]
    for y in (BASE[:4], 1):
        flats = [
            flatten({"s": BASE[:4], "t": BASE[:4].reshape(2, 2), "x": x, "y": y}) for x in pool
        ]
        for first, other in itertools.combinations(flats, 2):
            same = described(first) == described(other)
            assert (first.layout_id is other.layout_id) == same


def test_placements_are_told_apart_though_they_come_and_go() -> None:
    """New placements at the addresses of old ones have other signatures."""
    splits = [
        (Shard(0), Replicate(), (2, 4)),
        (Replicate(), Shard(0), (2, 4)),
        (Replicate(), Shard(1), (4, 2)),
    ]
    expected = [
        [piece.box for piece in flatten({"x": on_mesh(MESHES[0], *split)}).layouts[0].pieces]
        for split in splits
    ]
    assert expected[0] != expected[1] != expected[2]
    places, order = set(), [i * i % 7 % 3 for i in range(200)]
    for i in order:
        tensor = on_mesh(MESHES[0], *splits[i])
        places.add(id(tensor.placements))
        for seen in (tensor, tensor.detach()):
            assert [piece.box for piece in flatten({"x": seen}).layouts[0].pieces] == expected[i]
        layouts_on(MESHES[0]).by_tuple.clear() if len(places) % 5 == 0 else None
        del tensor, seen
    assert len(places) < len(order)  # some were at the place of one before


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1: BASE}, {True: BASE}),
        ({1: 0}, {True: 0}),
        ({1: {"x": 0}}, {"1": {"x": 0}}),
        ({"x": BASE}, {"x": BASE.numpy()}),
        ({"x": BASE, "y": 1, "z": BASE}, {"x": BASE, "z": BASE, "y": 1}),
        ({"x": {"y": 1}}, {"x": OrderedDict(y=1)}),
    ],
    ids=["keys of tensors", "keys of values", "keys of dicts", "array", "order", "kind of dict"],
)
def test_a_layout_shows_the_difference(a: Any, b: Any) -> None:
    """States that differ in one detail have different layouts."""
    first, again, other = (flatten(state).layout_id for state in (a, a, b))
    assert first is again
    assert first is not other


def test_fingerprints_tell_of_dtype_and_shape() -> None:
    """Tensors with equal bytes but another dtype or shape have other fingerprints."""
    zeros = torch.zeros(8)
    tensors = [zeros, zeros.view(2, 4), zeros.view(torch.int32)]
    digests = {fingerprint(flatten({"x": tensor}), 0) for tensor in tensors}
    assert len(digests) == len(tensors)


def test_a_state_of_a_training_loop_is_planned_once() -> None:
    """A training loop's state keeps its layout, despite changing values and addresses."""
    layouts = []
    for step in range(3):
        state = {
            "model": torch.nn.Linear(2, 2),
            "step": step,
            "rng": torch.get_rng_state(),
            "seen": [step, float(step)],
        }
        layouts.append(flatten(state).layout_id)
    assert layouts[0] is layouts[1] is layouts[2]
