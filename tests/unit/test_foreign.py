"""States of other frameworks are recognised by attributes, and refused before any I/O.

The error names the path and the framework.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize(
    ("state", "path", "said"),
    [
        (lambda: {"nets": [{"a": zero3()}]}, 'state["nets"][0]["a"]["0.weight"]', "ZeRO-3"),
        (zero3, 'the state["0.weight"]', "ZeRO-3"),
        (lambda: {"w": [next(zero3().parameters())]}, 'state["w"][0]', "ZeRO-3"),
        (
            lambda: {"o": torch.optim.SGD(zero3().parameters(), lr=0.1)},
            'group 0 in state["o"]',
            "ZeRO-3",
        ),
        (lambda: {"o": ZeroOptimizer()}, 'state["o"]', "optimizer of DeepSpeed"),
        (lambda: {"o": Wrapper(ZeroOptimizer())}, 'state["o"]', "optimizer of DeepSpeed"),
        (
            lambda: {"data": holdfast.PerRank(ZeroOptimizer())},
            "a PerRank",
            "optimizer of DeepSpeed",
        ),
    ],
)
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


@pytest.mark.parametrize(
    ("state", "path", "said"),
    [
        (lambda: {"model": zero3()}, 'state["model"]["0.weight"]', "ZeRO-3"),
        (lambda: {"model": zero3(gathered=True)}, 'state["model"]["0.weight"]', "ZeRO-3"),
        (
            lambda: {"model": nn.Sequential(nn.Linear(2, 2), zero1())},
            'state["model"]["1.weight"]',
            "master copy",
        ),
        (
            lambda: {"model": zero1().state_dict(keep_vars=True)},
            'state["model"]["weight"]',
            "master copy",
        ),
        (
            lambda: {"o": torch.optim.SGD(zero1().parameters(), lr=0.1)},
            'group 0 in state["o"]',
            "master copy",
        ),
        (lambda: {"model": Engine()}, 'state["model"]', "master copy"),
        (lambda: {"o": Wrapper(ZeroOptimizer())}, 'state["o"]', "optimizer of DeepSpeed"),
        (megatron, 'the state["weight"]', "optimizer of Megatron"),
        (
            lambda: {"model": megatron(sharded=True), "o": MegatronOptimizer()},
            'state["model"]["weight"]',
            "of Megatron",
        ),
    ],
)
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
