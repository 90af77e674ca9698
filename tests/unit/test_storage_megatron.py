"""Test Megatron-core's ``sharded_state_dict()`` with stand-ins for its classes.

The engine recognizes the classes by name. ``tests/frameworks/test_megatron.py`` uses Megatron
itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.drivers import storage_at
from support.ranks import load_as_ranks, save_as_ranks
from torch import nn

import holdfast
from holdfast.drivers.memory import MemoryDriver


@dataclass
class ShardedTensor:
    """A box of a tensor; with leading dimensions, which the local tensor has not."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass
class ShardedTensorFactory:
    """Makes parts of a tensor."""

    key: str
    data: torch.Tensor
    build_fn: Callable[[str, torch.Tensor], Any]

    def build(self) -> Any:
        return self.build_fn(self.key, self.data)


@dataclass
class ShardedObject:
    """A value of its own at a place among many."""

    unique_key: str
    data: Any


@dataclass
class LocalNonpersistentObject:
    """Object that is not stored."""

    obj: Any


@dataclass
class ShardedNovelty:
    """Class that a later release may add."""


for _kind in (
    ShardedTensor,
    ShardedTensorFactory,
    ShardedObject,
    LocalNonpersistentObject,
    ShardedNovelty,
):
    _kind.__module__ = "megatron.core.dist_checkpointing.mapping"

LAYERS = torch.arange(24.0).reshape(4, 3, 2)


def layer(number: int, data: torch.Tensor | None = None, key: str = "layers.w") -> ShardedTensor:
    """One of the layers, which are one tensor with a dimension for them."""
    if data is None:
        data = LAYERS[number].clone()
    return ShardedTensor(key, data, (4, 3, 2), (number, 0, 0), prepend_axis_num=1)


def job_driver() -> MemoryDriver:
    """A store in memory for the ranks of one process."""
    return storage_at(fresh_uri())


def test_parts_have_the_names_that_are_their_keys() -> None:
    """Layers of all pipeline stages form one tensor, which loads into any other stages."""
    driver = job_driver()
    stages = [{"model": {f"{i}.w": layer(first + i) for i in (0, 1)}, "n": 1} for first in (0, 2)]
    save_as_ranks(driver, stages)
    zeros = torch.zeros(3, 2)
    others = [
        {"model": {"0.w": layer(0, zeros.clone())}, "n": 0},
        {"model": {str(n): layer(n, zeros.clone()) for n in (3, 2, 1)}, "n": 0},
    ]
    load_as_ranks(driver, others)
    for state in others:
        assert state["n"] == 1
        for part in state["model"].values():
            assert torch.equal(part.data, LAYERS[part.global_offset[0]])
    (whole,) = load_as_ranks(driver, [{"layers.w": torch.zeros(4, 3, 2), "n": 0}])
    assert torch.equal(whole["layers.w"], LAYERS)


def test_memory_that_is_shared_with_other_tensors_ties_nothing() -> None:
    """Tensors that share memory on one rank are not tied: other ranks' shards need not share it."""
    driver = job_driver()
    whole = LAYERS.clone()
    first = {"w": ShardedTensor("w", whole, (4, 3, 2), (0, 0, 0))}
    first["v"] = ShardedTensor("v", whole, (4, 3, 2), (0, 0, 0))
    second = {"w": ShardedTensor("w", LAYERS.clone(), (4, 3, 2), (0, 0, 0))}
    save_as_ranks(driver, [first, second])
    (loaded,) = load_as_ranks(driver, [{"v": torch.zeros(4, 3, 2), "w": torch.zeros(4, 3, 2)}])
    assert torch.equal(loaded["v"], LAYERS)
    assert torch.equal(loaded["w"], LAYERS)


def test_what_a_factory_makes_is_stored_and_filled() -> None:
    """The two halves of a gated layer, each a part of the same tensor."""

    def halves(key: str, data: torch.Tensor) -> list[ShardedTensor]:
        parts = enumerate(data.chunk(2))
        return [ShardedTensor(key, part, (4, 2), (2 * half, 0)) for half, part in parts]

    uri = fresh_uri()
    whole = torch.arange(8.0).reshape(4, 2)
    holdfast.save(uri, {"fc1": ShardedTensorFactory("fc1.w", whole, halves)})
    assert torch.equal(holdfast.load(uri)["fc1.w"], whole)
    filled = torch.zeros(4, 2)
    holdfast.load(uri, into={"fc1": ShardedTensorFactory("fc1.w", filled, halves)})
    assert torch.equal(filled, whole)
    copies = ShardedTensorFactory("fc1.w", filled, lambda k, d: halves(k, d.clone()))
    with pytest.raises(holdfast.StateError, match=r'state\["fc1"\].*makes copies'):
        holdfast.load(uri, into={"fc1": copies})


def test_values_of_objects_come_back_into_them() -> None:
    """Objects load their values by key, anywhere in the state; local objects stay unchanged."""
    uri = fresh_uri()
    rng = {"seed": 3, "state": torch.arange(3), "numbers": (1, [2, None])}
    kept = LocalNonpersistentObject(object())
    holdfast.save(
        uri, {"a": ShardedObject("rng/shard_0_1", rng), "b": kept, "c": ShardedObject("x/0", None)}
    )
    fresh = {"seed": 0, "state": torch.zeros(3, dtype=torch.int64), "numbers": (0, [0, None])}
    state = {"z": [ShardedObject("x/0", None), ShardedObject("rng/shard_0_1", fresh)], "b": kept}
    holdfast.load(uri, into=state)
    assert difference(state["z"][1].data, rng) is None
    assert state["b"] is kept
    number = {"n": ShardedObject("n/0", 5)}
    holdfast.save(uri, number)
    number["n"].data = 0
    holdfast.load(uri, into=number)
    assert number["n"].data == 5


@pytest.mark.parametrize("rows", [3, 5])
def test_a_padded_tensor_is_filled_as_far_as_the_stored_one_goes(rows: int) -> None:
    """A padded tensor is filled up to the end of the stored one; others need its shape."""
    uri = fresh_uri()
    stored = torch.arange(8.0).reshape(4, 2)
    holdfast.save(uri, {"w": ShardedTensor("w", stored, (4, 2), (0, 0))})
    top = ShardedTensor("w", -torch.ones(3, 2), (rows, 2), (0, 0), allow_shape_mismatch=True)
    holdfast.load(uri, into={"w": top})
    assert torch.equal(top.data, stored[:3])
    if rows == 5:
        end = ShardedTensor("w", -torch.ones(2, 2), (5, 2), (3, 0), allow_shape_mismatch=True)
        beyond = ShardedTensor("w", -torch.ones(1, 2), (5, 2), (4, 0), allow_shape_mismatch=True)
        holdfast.load(uri, into={"w": end})
        assert end.data.tolist() == [[6, 7], [-1, -1]]
        holdfast.load(uri, into={"w": beyond})
        assert beyond.data.tolist() == [[-1, -1]]
    with pytest.raises(holdfast.MismatchError, match="shape"):
        holdfast.load(uri, into={"w": ShardedTensor("w", top.data, (rows, 2), (0, 0))})


class WithState:
    """An object whose state holds a part."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": layer(0)}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda: {"a": layer(0), "b": layer(0)}, r'state\["b"\] and another item are the same'),
        (
            lambda: {"a": layer(0), "b": layer(1, torch.ones(3, 2).double())},
            "and another item is Shard",
        ),
        (lambda: {"layers.w": torch.ones(1), "b": layer(0)}, "have the same name"),
        (lambda: {"a": WithState()}, r'state\["a"\]\["w"\].*its own name'),
        (lambda: {"a": ShardedNovelty()}, r'state\["a"\] is a ShardedNovelty of Megatron'),
        (lambda: {"a": ShardedTensor("a", None, (1,), (0,))}, r'state\["a"\].* around a NoneType'),
        (
            lambda: {"a": ShardedTensor("a", torch.ones(2), (4,), (0,), 0, False, slice(0, 2))},
            "flattened_range.*optimizer_state",
        ),
        (lambda: {"a": [ShardedObject("x/0", io.BytesIO())]}, r'\["x/0"\]\["data"\] is a _io'),
    ],
)
def test_what_has_no_place_is_refused_by_name(state: Callable[[], Any], said: str) -> None:
    """An entry that cannot be placed is refused by name before any I/O."""
    uri = fresh_uri()
    with pytest.raises(holdfast.StateError, match=said):
        holdfast.save(uri, state())
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.open(uri)


def test_a_part_with_a_master_copy_is_loaded_with_it_alone() -> None:
    """The next step would overwrite it from there."""
    uri = fresh_uri()
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    master = torch.full((4,), 2.0)
    weight.main_param = master  # type: ignore[attr-defined]
    state = {
        "w": ShardedTensor("w", weight, (4,), (0,)),
        "master": ShardedTensor("optimizer.w", master, (4,), (0,)),
    }
    holdfast.save(uri, state)
    master.zero_()
    with pytest.raises(holdfast.StateError, match=r'state\["w"\].*optimizer_state'):
        holdfast.load(uri, into={"w": state["w"]}, strict="state")
    holdfast.load(uri, into=state)
    assert master.tolist() == [2.0] * 4


def test_an_optimizer_that_leaves_out_its_moments_is_refused() -> None:
    """Alone, and as one of several."""
    members = {"state_dict": lambda self: {"x": 1}, "load_state_dict": lambda self, state: None}
    kind = type("Optimizer", (), {"__module__": "megatron.core.optimizer.optimizer", **members})
    distributed = kind()
    distributed.gbuf_ranges = []
    chained = kind()
    chained.chained_optimizers = [kind(), distributed]
    for optimizer in (distributed, chained):
        with pytest.raises(holdfast.StateError, match=r'state\["o"\].*optimizer_state'):
            holdfast.save(fresh_uri(), {"o": optimizer})
