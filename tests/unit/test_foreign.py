"""States of other frameworks are recognised by attributes, and refused before any I/O.

The error names the path and the framework.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri
from support.ranks import load_as_ranks, saved_as_ranks
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.nested import nested_tensor

import holdfast


def partitioned(parameter: nn.Parameter, *, gathered: bool) -> None:
    """Mark a parameter as DeepSpeed ZeRO-3 does; unless it is gathered, its elements go elsewhere."""
    parameter.ds_id = 7  # type: ignore[attr-defined]
    parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
    parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
    parameter.ds_tensor = parameter.detach().clone().flatten()  # type: ignore[attr-defined]
    if not gathered:
        parameter.data = torch.empty(0)


def zero3(*, gathered: bool = False) -> nn.Module:
    """Return a module under DeepSpeed ZeRO-3."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for parameter in model.parameters():
        partitioned(parameter, gathered=gathered)
    return model


def zero1() -> nn.Module:
    """Return a module under DeepSpeed ZeRO-1: whole parameters with master copies."""
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter._hp_mapping = SimpleNamespace(hp_fragment=parameter.detach().float())  # type: ignore[attr-defined]
    return model


def of_deepspeed(name: str, *bases: type, **members: Any) -> type:
    """Return a class whose module name is DeepSpeed's."""
    return type(name, bases, {"__module__": "deepspeed.runtime.engine", **members})


class Wrapper(torch.optim.SGD):
    """An optimizer around another, as Accelerate's is."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([nn.Parameter(torch.ones(2))], lr=0.1)
        self.optimizer = optimizer


def megatron(*, sharded: bool = False) -> nn.Module:
    """Return a module whose parameters have fp32 master copies, as with Megatron's optimizer."""
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.main_param = parameter.detach().float()  # type: ignore[attr-defined]
        parameter.main_param_sharded = sharded  # type: ignore[attr-defined]
    return model


STATE = {"state_dict": lambda self: {"x": 1}, "load_state_dict": lambda self, state: None}
ZeroOptimizer = of_deepspeed("DeepSpeedZeroOptimizer", param_groups=[], **STATE)


MegatronOptimizer = type(
    "Float16Optimizer", (), {"__module__": "megatron.core.optimizer.optimizer", **STATE}
)


class Engine(of_deepspeed("DeepSpeedEngine", nn.Module)):  # type: ignore[misc]
    """An engine whose optimizer leaves no mark on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.optimizer = ZeroOptimizer()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of torch."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


ZERO3, ZERO, MASTER = "ZeRO-3", "optimizer of DeepSpeed", "master copy"
NOT_SAVED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: {"nets": [{"a": zero3()}]}, 'state["nets"][0]["a"]["0.weight"]', ZERO3),
    (zero3, 'the state["0.weight"]', ZERO3),
    (lambda: {"w": [next(zero3().parameters())]}, 'state["w"][0]', ZERO3),
    (lambda: {"o": sgd(zero3())}, 'group 0 in state["o"]', ZERO3),
    (lambda: {"o": ZeroOptimizer()}, 'state["o"]', ZERO),
    (lambda: {"o": Wrapper(ZeroOptimizer())}, 'state["o"]', ZERO),
    (lambda: {"data": holdfast.PerRank(ZeroOptimizer())}, "a PerRank", ZERO),
]


@pytest.mark.parametrize(("state", "path", "said"), NOT_SAVED)
def test_what_deepspeed_has_partitioned_is_not_saved(
    state: Any, path: str, said: str, tmp_path: Path
) -> None:
    """A save refuses DeepSpeed's placeholders and optimizers, and advises what to do instead."""
    with pytest.raises(holdfast.StateError) as caught:
        holdfast.save(tmp_path / "c", state())
    assert path in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.advice is not None
    assert "engine.save_checkpoint" in caught.value.advice
    with pytest.raises(holdfast.StateError, match=said):
        holdfast.async_save(tmp_path / "c", state(), lazy=True)
    assert list(tmp_path.iterdir()) == []


NOT_LOADED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: {"m": zero3()}, 'state["m"]["0.weight"]', ZERO3),
    (lambda: {"m": zero3(gathered=True)}, 'state["m"]["0.weight"]', ZERO3),
    (lambda: {"m": nn.Sequential(nn.Linear(2, 2), zero1())}, 'state["m"]["1.weight"]', MASTER),
    (lambda: {"m": zero1().state_dict(keep_vars=True)}, 'state["m"]["weight"]', MASTER),
    (lambda: {"o": sgd(zero1())}, 'group 0 in state["o"]', MASTER),
    (lambda: {"m": Engine()}, 'state["m"]', MASTER),
    (lambda: {"o": Wrapper(ZeroOptimizer())}, 'state["o"]', ZERO),
    (megatron, 'the state["weight"]', "optimizer of Megatron"),
    (
        lambda: {"m": megatron(sharded=True), "o": MegatronOptimizer()},
        'state["m"]["weight"]',
        "of Megatron",
    ),
]


@pytest.mark.parametrize(("state", "path", "said"), NOT_LOADED)
def test_what_the_next_step_would_overwrite_is_not_loaded_into(
    state: Any, path: str, said: str, tmp_path: Path
) -> None:
    """A load refuses a target that the next step would overwrite, before it reads anything."""
    with pytest.raises(holdfast.StateError) as caught:
        holdfast.load(tmp_path / "none", into=state())
    assert path in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.advice is not None


def test_parameters_that_are_whole_are_saved(tmp_path: Path) -> None:
    """Whole parameters of ZeRO and Megatron are saved, and loaded where masters follow."""
    whole = zero3(gathered=True)
    holdfast.save(tmp_path / "3", {"model": whole})
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    holdfast.load(tmp_path / "3", into={"model": plain})
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), plain.parameters(), strict=True)
    )
    copied = zero1()
    holdfast.save(tmp_path / "1", {"model": copied})
    fresh = zero1()
    holdfast.load(tmp_path / "1", into={"model": fresh.state_dict()})
    assert torch.equal(copied.weight, fresh.weight)
    owned = megatron()
    state = {"model": owned, "o": MegatronOptimizer()}
    holdfast.save(tmp_path / "m", state)
    holdfast.load(tmp_path / "m", into=state)
    sharded = megatron(sharded=True)
    holdfast.load(tmp_path / "m", into={"model": sharded.state_dict()}, strict="state")
    assert torch.equal(sharded.weight, owned.weight)


def test_a_mark_that_comes_after_a_save_is_seen(tmp_path: Path) -> None:
    """A mark that appears after a save is noticed, although the state's layout is cached."""
    model = nn.Linear(3, 4)
    state = {"model": model, "leaf": [model.weight]}
    holdfast.save(tmp_path / "a", state)
    partitioned(model.weight, gathered=True)
    holdfast.save(tmp_path / "b", state)
    for name in ("model", "leaf"):
        model.weight.ds_shape = (12,)  # type: ignore[attr-defined]
        with pytest.raises(holdfast.StateError, match="ZeRO-3"):
            holdfast.save(tmp_path / "c", {name: state[name]})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        (lambda: AsyncCollectiveTensor(torch.ones(3)), "tensor.wait()"),
        (
            lambda: nested_tensor([torch.ones(3)], layout=torch.jagged),
            "Pass its inner tensors",
        ),
        (lambda: LocalShardsWrapper([torch.ones(2, 2)], [(0, 0)]), "DTensor"),
    ],
    ids=["collective", "nested", "shards"],
)
def test_tensors_around_other_tensors_are_refused_with_a_way_out(
    made: Any, advice: str, tmp_path: Path
) -> None:
    """Saves and loads refuse wrapper tensors, and the error suggests a way out."""
    state = {"w": made()}
    for call in (
        lambda: holdfast.save(tmp_path / "c", state),
        lambda: holdfast.load(tmp_path / "c", into=state),
    ):
        with pytest.raises(holdfast.StateError, match=r'state\["w"\]') as caught:
            call()
        assert advice in str(caught.value.advice)
    assert list(tmp_path.iterdir()) == []


def without_weights() -> nn.Module:
    """Return a module of placeholders without any mark."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    return model


def with_moments() -> Any:
    """Return a parameter without elements, and an optimizer with moments for it."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.empty(0))
    model.other = nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optim.state[model.scale]["momentum_buffer"] = torch.ones(5)
    return {"model": model, "optim": optim}


HOLLOW = {
    "no element at all": (
        lambda: {"w": torch.empty(0), "v": torch.zeros(3, 0), "step": 3},
        "the state stores nothing: none of its tensors (2)",
    ),
    "array": (lambda: {"w": np.empty((0, 2))}, "the state stores nothing: none of its tensors (1)"),
    "module and others": (
        lambda: {"model": without_weights(), "x": torch.ones(1)},
        'state["model"] has 2 weights',
    ),
    "state dict": (
        lambda: {"m": [without_weights().state_dict()], "rng": holdfast.RNGState()},
        'state["m"][0] has 2',
    ),
    "optimizer": (
        with_moments,
        'state["model"]["scale"] has no elements, but state["optim"]["state"]["scale"]',
    ),
    "alone": (without_weights, "the state stores nothing: none of its tensors (4)"),
}


@pytest.mark.parametrize("name", HOLLOW)
def test_a_state_that_holds_less_than_it_seems_is_refused(name: str, tmp_path: Path) -> None:
    """Every way to save refuses a hollow state by path, before any I/O, without ``allow_empty``."""
    made, said = HOLLOW[name]
    calls = [
        lambda **options: holdfast.save(tmp_path / "c", made(), **options),
        lambda **options: holdfast.async_save(tmp_path / "c", made(), **options).wait(),
        lambda **options: holdfast.async_save(tmp_path / "c", made(), lazy=True, **options).wait(),
    ]
    for call in calls:
        with pytest.raises(holdfast.StateError) as caught:
            call()
        assert str(caught.value).startswith(said)
        assert "allow_empty=True" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    for call in calls:
        call(allow_empty=True)
    assert (tmp_path / "c" / "manifest.safetensors").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"step": 3, "losses": [1.5]},
        {"queues": {"a": torch.empty(0), "b": torch.empty(0, 3)}, "w": torch.ones(1)},
        {"model": {"0.weight": torch.ones(2, 2), "1.weight": torch.empty(3, 0)}},
        {"class": {"weight": torch.empty(0)}, "w": torch.ones(1)},
        {"model": {"x": torch.empty(0), "y": torch.ones(1)}, "other": {"x": {"y": torch.ones(3)}}},
    ],
)
def test_what_is_empty_in_earnest_is_saved(state: Any, tmp_path: Path) -> None:
    """A state with only values, some empty tensors or layers without inputs is saved."""
    holdfast.save(tmp_path / "c", state)
    assert (tmp_path / "c" / "manifest.safetensors").exists()


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
    """Return one of the layers, which are stored as one tensor with a dimension for them."""
    if data is None:
        data = LAYERS[number].clone()
    return ShardedTensor(key, data, (4, 3, 2), (number, 0, 0), prepend_axis_num=1)


def test_parts_have_the_names_that_are_their_keys() -> None:
    """Layers of all pipeline stages form one tensor, which loads into any other stages."""
    stages = [{"model": {f"{i}.w": layer(first + i) for i in (0, 1)}, "n": 1} for first in (0, 2)]
    driver = saved_as_ranks(stages)
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
    whole = LAYERS.clone()
    first = {"w": ShardedTensor("w", whole, (4, 3, 2), (0, 0, 0))}
    first["v"] = ShardedTensor("v", whole, (4, 3, 2), (0, 0, 0))
    second = {"w": ShardedTensor("w", LAYERS.clone(), (4, 3, 2), (0, 0, 0))}
    driver = saved_as_ranks([first, second])
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


def test_transposed_experts_are_filled_in_place() -> None:
    """A factory may permute its tensor and make that contiguous, unless it needs the copy."""

    def turned(key: str, data: torch.Tensor) -> dict[str, object]:
        halves = enumerate(data.view(2, 3, 4).transpose(-1, -2).chunk(2, -2))
        return {
            "data": [
                ShardedTensor(key, half.contiguous(), (2, 4, 3), (0, 2 * number, 0))
                for number, half in halves
            ],
            "transposed": LocalNonpersistentObject(True),
        }

    def flat(key: str, data: torch.Tensor) -> ShardedTensor:
        return ShardedTensor(key, data.T.contiguous().view(-1), (24,), (0,))

    uri = fresh_uri()
    weight = torch.arange(24.0).reshape(6, 4)
    holdfast.save(uri, {"fc1": ShardedTensorFactory("fc1.w", weight, turned)})
    assert torch.equal(holdfast.load(uri)["fc1.w"], weight.view(2, 3, 4).transpose(-1, -2))
    filled = torch.zeros(6, 4)
    holdfast.load(uri, into={"fc1": ShardedTensorFactory("fc1.w", filled, turned)})
    assert torch.equal(filled, weight)
    holdfast.save(uri, {"fc1": ShardedTensorFactory("fc1.w", weight, flat)})
    assert torch.equal(holdfast.load(uri)["fc1.w"], weight.T.reshape(-1))
    with pytest.raises(holdfast.StateError, match="makes copies"):
        holdfast.load(uri, into={"fc1": ShardedTensorFactory("fc1.w", filled, flat)})


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
    """This holds for a single optimizer, and for one of several."""
    members = {"state_dict": lambda self: {"x": 1}, "load_state_dict": lambda self, state: None}
    kind = type("Optimizer", (), {"__module__": "megatron.core.optimizer.optimizer", **members})
    distributed = kind()
    distributed.gbuf_ranges = []
    chained = kind()
    chained.chained_optimizers = [kind(), distributed]
    for optimizer in (distributed, chained):
        with pytest.raises(holdfast.StateError, match=r'state\["o"\].*optimizer_state'):
            holdfast.save(fresh_uri(), {"o": optimizer})
