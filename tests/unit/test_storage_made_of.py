"""Tensors that are made of other tensors: stored as those, and filled where they are."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import holdfast


class Rounding(enum.Enum):
    """How a number was rounded."""

    NEAREST = "nearest"
    DOWN = "down"


@dataclasses.dataclass(frozen=True)
class Block:
    """How many columns share a scale."""

    columns: int


class Scaled(torch.Tensor):
    """A matrix in small integers, with a scale for each row."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> Scaled:
        """An empty shell of that shape."""
        shape = codes.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any) -> None:
        self.codes = codes
        self.scale = scale
        self.context = context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The inner tensors by name, and the context."""
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        """Made anew; no load does that."""
        raise AssertionError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a module and an optimizer need of it."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (of,) = args
            return cls(of.codes.detach(), of.scale.detach(), of.context)
        if func is torch.ops.aten.copy_.default:
            into, source, *_ = args
            into.codes.copy_(source.codes)
            into.scale.copy_(source.scale)
            return into
        if func is torch.ops.aten._to_copy.default:
            return args[0]
        raise NotImplementedError(func)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Owner:
    """An object whose state has one."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        """It."""
        return {"inner": [self.tensor], "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What it is given."""
        (self.given,) = state["inner"]


CONTEXT = {"block": Block(2), "rounding": Rounding.NEAREST, "sizes": [1, 2.5, None]}


def scaled(value: int, context: Any = None) -> Scaled:
    """A matrix of one value."""
    codes = torch.full((3, 4), value, dtype=torch.int8)
    return Scaled(codes, torch.full((3, 1), value / 2), CONTEXT if context is None else context)


def values(tensor: Any) -> tuple[float, float]:
    """One number of each inner tensor."""
    return tensor.codes[2, 3].item(), tensor.scale[2, 0].item()


def module(value: int, context: Any = None) -> nn.Module:
    """A module with such a parameter, such a buffer, and a plain one."""
    net = nn.Linear(4, 3)
    net.weight = nn.Parameter(scaled(value, context), requires_grad=False)
    net.register_buffer("table", scaled(value + 1, context))
    nn.init.constant_(net.bias, value)
    return net


def test_inner_tensors_are_stored_by_name() -> None:
    """A load without a target gives dicts; so does a load into dicts."""
    uri = fresh_uri()
    holdfast.save(uri, {"m": module(3), "w": [scaled(5)]})
    with holdfast.open(uri) as checkpoint:
        assert set(checkpoint.tensors) == {
            *("m.weight.codes", "m.weight.scale", "m.table.codes", "m.table.scale"),
            *("m.bias", "w.0.codes", "w.0.scale"),
        }
    loaded = holdfast.load(uri)["w"][0]
    assert loaded["codes"].tolist() == scaled(5).codes.tolist()
    assert '"Rounding.NEAREST"' in loaded["__tensor_flatten__"]
    into = {"w": [{"codes": torch.zeros(3, 4, dtype=torch.int8), "scale": torch.zeros(3, 1)}]}
    holdfast.load(uri, into=into, strict="state")
    assert torch.equal(into["w"][0]["scale"], loaded["scale"])


@pytest.mark.parametrize("lazy", [False, True])
def test_a_tensor_that_is_there_is_filled(lazy: bool) -> None:
    """In a module and in a list, in place; nothing is made anew."""
    uri = fresh_uri()
    state = {"m": module(3), "w": [scaled(5)]}
    for _ in range(2):
        holdfast.async_save(uri, state, lazy=lazy).wait()
    into: Any = {"m": module(1), "w": [scaled(1)]}
    held = [into["m"].weight, into["m"].table, into["w"][0]]
    memory = [(each.codes.data_ptr(), each.scale.data_ptr()) for each in held]
    holdfast.load(uri, into=into)
    now = [into["m"].weight, into["m"].table, into["w"][0]]
    assert [id(each) for each in now] == [id(each) for each in held]
    assert memory == [(each.codes.data_ptr(), each.scale.data_ptr()) for each in held]
    assert [values(each) for each in held] == [(3, 1.5), (4, 2.0), (5, 2.5)]
    assert into["m"].bias.tolist() == [3.0] * 3


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [{"block": Block(4)}, {"rounding": Rounding.DOWN}])
@pytest.mark.parametrize("where", ["module", "list", "object"])
def test_a_tensor_of_another_kind_is_not_filled(
    where: str, other: dict[str, Any], strict: bool
) -> None:
    """Its inner tensors would mean something else. The error says both, and nothing is loaded."""
    uri = fresh_uri()
    tensor = scaled(1, CONTEXT | other)
    stored: dict[str, Any] = {
        "module": module(3),
        "list": [scaled(3)],
        "object": Owner(scaled(3)),
    }
    into: dict[str, Any] = {
        "module": module(1, CONTEXT | other),
        "list": [tensor],
        "object": Owner(tensor),
    }
    holdfast.save(uri, {"a": stored[where]})
    same = Owner(scaled(1))
    if where == "object":
        holdfast.load(uri, into={"a": same})
        assert same.given is same.tensor
        assert values(same.given) == (3, 1.5)
    with pytest.raises(holdfast.MismatchError, match=r"Block.*the checkpoint.*Block.*the state"):
        holdfast.load(uri, into={"a": into[where]}, strict=strict)
    assert values(tensor) == (1, 0.5)
    assert values(into["module"].weight) == (1, 0.5)


def test_tensors_within_tensors() -> None:
    """At any depth, also of classes that torch has."""
    uri = fresh_uri()

    def nested(value: float) -> TwoTensor:
        inner = TwoTensor(torch.full((2,), value), torch.full((2,), value + 1))
        return TwoTensor(inner, torch.full((2,), value + 2))

    holdfast.save(uri, {"w": nested(1.0)})
    assert set(holdfast.load(uri)["w"]["a"]) == {"a", "b", "__tensor_flatten__"}
    into = nested(0.0)
    holdfast.load(uri, into={"w": into})
    assert (into.a.a[0].item(), into.a.b[0].item(), into.b[0].item()) == (1.0, 2.0, 3.0)


def test_a_plain_tensor_is_not_loaded_into_one_that_is_made_of_tensors() -> None:
    """Nor the other way round: the names differ."""
    uri = fresh_uri()
    into = scaled(1)
    holdfast.save(uri, {"w": torch.ones(3, 4)})
    with pytest.raises(holdfast.MismatchError, match=r'state\["w"\]\["\w+"\]: no tensor'):
        holdfast.load(uri, into={"w": into})
    holdfast.save(uri, {"w": into})
    with pytest.raises(holdfast.MismatchError, match="no tensor 'w'"):
        holdfast.load(uri, into={"w": torch.ones(3, 4)})


def test_a_context_without_a_description_is_refused_by_path() -> None:
    """Such as a function."""
    state = {"a": [scaled(1, {"round": max})]}
    for call in (lambda: holdfast.save(fresh_uri(), state), lambda: holdfast.load("/x", state)):
        with pytest.raises(holdfast.StateError, match=r'state\["a"\]\[0\].*context'):
            call()


class Coarse(torch.optim.SGD):
    """Keeps a moment that is made of tensors, from its first step on."""

    def step(self, closure: Any = None) -> None:
        """As if it did something."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = scaled(int(group["lr"]))


@pytest.mark.parametrize("named", [True, False])
def test_an_optimizer_that_has_stepped_gets_its_moments_back(named: bool) -> None:
    """One that has not has no such tensor, and none is made."""
    uri = fresh_uri()
    nets = [nn.Linear(4, 3, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    optims = [
        Coarse(net.parameters(), lr=lr) for net, lr in zip(nets, (3.0, 1.0, 1.0), strict=True)
    ]
    states = [
        {"net": net, "optim": optim} if named else {"optim": optim}
        for net, optim in zip(nets, optims, strict=True)
    ]
    optims[0].step()
    optims[1].step()
    holdfast.save(uri, states[0])
    moment = optims[1].state[nets[1].weight]["moment"]
    holdfast.load(uri, into=states[1])
    assert optims[1].state[nets[1].weight]["moment"] is moment
    assert values(moment) == (3, 1.5)
    with pytest.raises(holdfast.MismatchError, match=r"moment: a tensor made.*first step"):
        holdfast.load(uri, into=states[2])


def test_a_plain_moment_is_not_loaded_into_a_coarse_one() -> None:
    """An optimizer of another kind wrote the checkpoint."""
    net = nn.Linear(4, 3, bias=False)
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    plain.state[net.weight]["moment"] = torch.ones(3, 4)
    uri = fresh_uri()
    holdfast.save(uri, {"optim": plain})
    coarse = Coarse(net.parameters(), lr=1.0)
    coarse.step()
    with pytest.raises(holdfast.MismatchError, match="moment: something other than a Scaled in"):
        holdfast.load(uri, into={"optim": coarse})
