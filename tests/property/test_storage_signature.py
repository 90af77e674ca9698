"""A state that is saved again is recognised; any difference in how it is laid out is noticed."""

from __future__ import annotations

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
from holdfast.storage.state.flattening.flatten import KnownStates, flatten
from holdfast.storage.state.flattening.signature import SignatureScan
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
    """Return a DTensor of 4 x 4 whose local part has the shape ``local``."""
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
    """Return a strategy for containers, and for an object with a state."""
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


def described(flat: FlatState) -> list[Any]:
    """Return all of a flat state, for comparison."""
    tensors = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj()) for t in flat.locals]
    origins = [id(origin) if isinstance(origin, DTensor) else 0 for origin in flat.origins]
    subtrees = [(s.parent, repr(s.key), id(s.owner), repr(s.state)) for s in flat.subtrees]
    columns = (flat.names, flat.containers, flat.shapes, flat.dtypes, flat.layouts, flat.alias)
    return [
        *columns,
        repr(flat.tree.to_json()),
        tensors,
        origins,
        subtrees,
        [type(node) for node in flat.nodes],
    ]


def outcome(state: Any, known_states: KnownStates) -> Any:
    """Flatten a state; return its description or the text of the error."""
    try:
        return described(flatten(state, known_states=known_states))
    except holdfast.StateError as error:
        return str(error)


def anew(state: Any) -> Any:
    """Flatten without known states."""
    return outcome(state, KnownStates(1))


@examples(100)
@given(st.data())
def test_what_is_known_of_one_state_is_not_taken_for_another(data: st.DataObject) -> None:
    """A state that differs in anything is flattened as if no other were known."""
    first = data.draw(states)
    second = data.draw(changed(first))
    expected = [anew(first), anew(first), anew(second)]
    known_states = KnownStates(8)
    assert [outcome(state, known_states) for state in (first, first, second)] == expected


@examples(50)
@given(states)
def test_what_is_planned_once_is_planned_alike(state: Any) -> None:
    """A cached plan has the first plan's layout and uses the new tensors."""
    known_states = KnownStates(8)
    try:
        flats = [flatten(state, known_states=known_states) for _ in range(2)]
    except holdfast.StateError:
        return
    agreed = Agreed(
        {row: () for row, part in enumerate(flats[0].layouts) if part.holders is None}, {}
    )
    plans = [plan_save(flat, 1, agreed) for flat in flats]
    assert flats[0].layout_id is None or plans[0].layout is plans[1].layout
    assert plans[0].source is not plans[1].source
    assert plans[0].layout.header == plans[1].layout.header


def test_no_two_leaves_are_taken_for_each_other() -> None:
    """No pair of leaves shares a signature with another, even next to tied tensors."""
    pool = [*TENSORS, BASE[:4], torch.zeros(2, 2), 1, 1.0, [1], (1,), {"a": 1}, Thing({"a": 1})]
    states = [
        {"s": BASE[:4], "t": BASE[:4].reshape(2, 2), "x": x, "y": y} for x in pool for y in pool
    ]
    expected = [anew(state) for state in states]
    known_states = KnownStates(len(states))
    for state in states:
        flatten(state, known_states=known_states)
    assert [outcome(state, known_states) for state in states] == expected


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
    assert len(places) < len(order)  # some were at the address of an earlier one


class OtherThing(Thing):
    """An object of another type with the same state."""


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1: BASE}, {True: BASE}),
        ({"x": BASE}, {"x": torch._neg_view(BASE)}),
        ({"x": BASE}, {"x": torch.empty(64, device="meta")}),
        ({"x": Thing({})}, {"x": OtherThing({})}),
    ],
    ids=["types of keys", "lazy negation", "device", "type of an object"],
)
def test_a_signature_shows_the_difference(a: Any, b: Any) -> None:
    """States that differ in one detail have different signatures."""
    first, again, other = (SignatureScan(lambda: []).signature_of(state) for state in (a, a, b))
    assert first == again
    assert first != other


def test_fingerprints_tell_of_dtype_and_shape() -> None:
    """Tensors with equal bytes but another dtype or shape have other fingerprints."""
    zeros = torch.zeros(8)
    tensors = [zeros, zeros.view(2, 4), zeros.view(torch.int32)]
    digests = {fingerprint(flatten({"x": tensor}), 0) for tensor in tensors}
    assert len(digests) == len(tensors)


def test_a_state_of_a_training_loop_is_walked_once() -> None:
    """A training loop's state is walked once, despite changing values and addresses."""
    known_states = KnownStates(8)
    layouts = []
    for step in range(3):
        model = torch.nn.Linear(2, 2)
        state = {
            "model": model,
            "step": step,
            "rng": torch.get_rng_state(),
            "seen": [step, float(step)],
        }
        flat = flatten(state, known_states=known_states)
        assert flat.names == ["model.weight", "model.bias", "rng"]
        assert flat.locals[0].data_ptr() == model.weight.data_ptr()
        assert [v.by_rank for v in flat.tree.values] == [
            [([0], step)],
            [([0], step)],
            [([0], float(step))],
        ]
        layouts.append(flat.layout_id)
    assert layouts[0] is not None
    assert layouts[0] is layouts[1] is layouts[2]
