"""Optimizers: what is stored comes back to the last bit, and to the parameters and groups that it
belongs to."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri
from torch import nn

import holdfast


class Rich(torch.optim.Optimizer):
    """An optimizer with a state of every kind: of other dtypes than its parameters, nested, and no
    tensor at all."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def fill(self) -> None:
        """As if it had stepped."""
        generator = torch.Generator().manual_seed(3)
        for group in self.param_groups:
            for p in group["params"]:
                exact = torch.rand(p.shape, generator=generator, dtype=torch.float64)
                self.state[p] = {
                    "step": torch.tensor(7.0),
                    "fp32": exact.float(),
                    "fp64": exact,
                    "half": exact.half(),
                    "quantized": (exact * 255).to(torch.uint8),
                    "mask": exact > 0.5,
                    "row": exact.float().sum(-1),
                    "nested": {
                        "fp32": exact.float() / 3,
                        "deep": [exact.float() / 7, (exact / 9,)],
                    },
                    "kind": "factored",
                    "raw": b"\x00\xff",
                    "counts": np.arange(5),
                    "n": 3,
                    "nothing": None,
                    "seen": Counter({"a": 2}),
                }


def pair(dtype: torch.dtype, make: Callable[..., Any] = Rich) -> tuple[nn.Module, Any]:
    """A module of that dtype, and its optimizer."""
    net = nn.Linear(5, 3, dtype=dtype)
    return net, make(net.parameters())


def by_name(net: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of each parameter, by its name."""
    return {name: optim.state[p] for name, p in net.named_parameters() if p in optim.state}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_state_comes_back_in_its_own_dtype(dtype: torch.dtype, stepped: bool) -> None:
    """Whatever the dtype of the parameter is, and whether the optimizer has a state already."""
    net, optim = pair(dtype)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"net": net, "optim": optim})
    other, into = pair(dtype)
    if stepped:
        into.fill()
    holdfast.load(uri, into={"net": other, "optim": into})
    assert difference(by_name(net, optim), by_name(other, into)) is None
    assert {type(entry["seen"]) for entry in into.state.values()} == {Counter}


def test_a_state_that_is_there_is_filled_in_place() -> None:
    """An optimizer that has stepped needs no second copy of its state."""
    net, optim = pair(torch.float32)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"net": net, "optim": optim})
    entry = optim.state[net.weight]
    addresses = {key: entry[key].data_ptr() for key in ("fp32", "fp64", "row", "mask")}
    holdfast.load(uri, into={"net": net, "optim": optim})
    assert {key: optim.state[net.weight][key].data_ptr() for key in addresses} == addresses


def test_a_state_without_a_module_comes_back_in_its_own_dtype() -> None:
    """By number too."""
    weights, others = (
        [nn.Parameter(torch.ones(4).bfloat16())],
        [nn.Parameter(torch.ones(4).bfloat16())],
    )
    optim, into = Rich(weights), Rich(others)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, [optim])
    holdfast.load(uri, into=[into])
    assert difference(optim.state[weights[0]], into.state[others[0]]) is None


class Recasting(Rich):
    """Has ideas of its own about what it is given."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Before and after torch's method."""
        for entry in state_dict["state"].values():
            entry["half"] = entry["half"].float() + 1
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            entry["fp64"] = entry["fp64"].float()


class Apart(Rich):
    """Takes its state in a way of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Without torch's method."""
        self.taken = state_dict


def test_what_an_optimizer_makes_of_its_state_itself_holds() -> None:
    """A ``load_state_dict`` of its own, before and after torch's, or instead of it, has the last
    word."""
    net, optim = pair(torch.bfloat16, Recasting)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"net": net, "optim": optim})
    other, into = pair(torch.bfloat16, Recasting)
    holdfast.load(uri, into={"net": other, "optim": into})
    stored, loaded = by_name(net, optim)["weight"], by_name(other, into)["weight"]
    assert difference(stored["half"].float() + 1, loaded["half"]) is None
    assert difference(stored["fp64"].float(), loaded["fp64"]) is None
    assert difference(stored["fp32"], loaded["fp32"]) is None
    other, apart = pair(torch.bfloat16, Apart)
    holdfast.load(uri, into={"net": other, "optim": apart})
    assert difference(stored["fp64"], apart.taken["state"][0]["fp64"]) is None


def test_what_hooks_make_of_a_state_holds() -> None:
    """Hooks before and after the load see what is stored, and what they change stays changed."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"net": net, "optim": optim})
    other, into = pair(torch.bfloat16)
    seen: list[torch.dtype] = []

    def before(_: Any, state_dict: Any) -> Any:
        for entry in state_dict["state"].values():
            seen.append(entry["fp32"].dtype)
            entry["fp32"] = entry["fp32"].bfloat16()
        return state_dict

    def after(optimizer: Any) -> None:
        for entry in optimizer.state.values():
            seen.append(entry["fp64"].dtype)

    into.register_load_state_dict_pre_hook(before)
    into.register_load_state_dict_post_hook(after)
    holdfast.load(uri, into={"net": other, "optim": into})
    assert seen == [torch.float32, torch.float32, torch.float64, torch.float64]
    loaded = by_name(other, into)["weight"]
    assert loaded["fp32"].dtype == torch.bfloat16
    assert loaded["half"].dtype == torch.float16
    assert (
        len(into._optimizer_load_state_dict_pre_hooks),
        len(into._optimizer_load_state_dict_post_hooks),
    ) == (1, 1)


def test_steps_are_what_the_kernels_want_that_count_them() -> None:
    """Torch's fused optimizers count in fp32: an optimizer that becomes one by a hook gets such
    steps."""
    net, optim = pair(torch.float32)
    optim.fill()
    for entry in optim.state.values():
        entry["step"] = torch.tensor(7.0, dtype=torch.float64)
    uri = fresh_uri()
    holdfast.save(uri, {"net": net, "optim": optim})
    for fused, dtype in ((False, torch.float64), (True, torch.float32)):
        other, into = pair(torch.float32)
        into.register_load_state_dict_pre_hook(
            lambda o, state, on=fused: state["param_groups"][0].update(fused=on)
        )
        holdfast.load(uri, into={"net": other, "optim": into})
        assert {entry["step"].dtype for entry in into.state.values()} == {dtype}


class Wrapper(torch.optim.Optimizer):
    """Hands everything on to another optimizer, as wrappers of training frameworks do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> Any:
        """That of the other one."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """To the other one."""
        self.optimizer.load_state_dict(state_dict)


def test_a_wrapped_optimizer_gets_its_state_to_the_last_bit() -> None:
    """A wrapper has no hooks of torch's; what it wraps has."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"net": net, "optim": Wrapper(optim)})
    other, into = pair(torch.bfloat16)
    holdfast.load(uri, into={"net": other, "optim": Wrapper(into)})
    assert difference(by_name(net, optim), by_name(other, into)) is None


class App:
    """Model and optimizer as one object."""

    def __init__(self, net: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.net, self.optims = net, {"only": optim}

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {"net": self.net.state_dict(), "optim": self.optims["only"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To both."""
        self.net.load_state_dict(state["net"])
        self.optims["only"].load_state_dict(state["optim"])


def test_an_optimizer_within_an_object_gets_its_state_to_the_last_bit() -> None:
    """The object hands it to torch's method as it likes."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"app": App(net, optim)})
    other, into = pair(torch.bfloat16)
    holdfast.load(uri, into={"app": App(other, into)})
    assert difference(by_name(net, optim), by_name(other, into)) is None


class Frozen(App):
    """Gives its optimizer entries that cannot be assigned to."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it is, but for the types of mappings."""
        optim = state["optim"]
        entries = {key: MappingProxyType({"own": entry}) for key, entry in optim["state"].items()}
        super().load_state_dict({**state, "optim": {**optim, "state": entries}})


def test_an_entry_that_cannot_be_assigned_to_is_loaded_as_a_dict() -> None:
    """To the last bit, as any other."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, {"app": App(net, optim)})
    other, into = pair(torch.bfloat16)
    holdfast.load(uri, into={"app": Frozen(other, into)})
    entries = dict(zip(other.parameters(), net.parameters(), strict=True))
    for parameter, source in entries.items():
        assert difference({"own": optim.state[source]}, into.state[parameter]) is None


@pytest.mark.parametrize("stored", [[torch.ones(3)], torch.ones(3), 3])
def test_a_stored_state_that_is_no_mapping_does_not_fit(stored: object) -> None:
    """It is of an optimizer that keeps it in another form; nothing is loaded."""

    class Listed(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            """Of a form of its own."""
            return {"state": stored, "param_groups": [{"lr": 0.5, "params": [0]}]}

    net = nn.Linear(3, 3)
    uri = fresh_uri()
    holdfast.save(uri, {"optim": Listed([net.weight], lr=0.5)})
    into = torch.optim.SGD([net.weight], lr=0.1)
    with pytest.raises(holdfast.MismatchError, match="instead of the state of parameters"):
        holdfast.load(uri, into={"optim": into}, strict=False)
    assert into.param_groups[0]["lr"] == 0.1


def test_an_optimizer_may_be_the_state() -> None:
    """One that is new, too; its groups are checked like those of any other."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = fresh_uri()
    holdfast.save(uri, optim)
    other, into = pair(torch.bfloat16)
    assert holdfast.load(uri, into=into) is into
    assert difference(by_name(net, optim), by_name(other, into)) is None
    with pytest.raises(
        holdfast.MismatchError, match=r"in groups of \[2\]; the optimizer's groups have \[1\]"
    ):
        holdfast.load(uri, into=Rich([other.weight]))


class Beside(torch.optim.SGD):
    """Keeps a state that belongs to no parameter, and entries of its own in its state dict."""

    def fill(self, n: int) -> None:
        """As if it had stepped."""
        self.state["global"] = {"n": n, "t": torch.full((3,), float(n)), 4: {"x": [n]}}  # type: ignore[index]
        self.state[1000] = {"factor": torch.full((2, 2), float(n))}  # type: ignore[index]
        self.state["count"] = n  # type: ignore[index]
        self.extra = {"history": [n], "t": torch.tensor([n])}
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum_buffer": torch.full_like(p, float(n))}

    def state_dict(self) -> Any:
        """Torch's, and more."""
        return super().state_dict() | {"extra": self.extra}

    def load_state_dict(self, state_dict: Any) -> None:
        """Both."""
        self.extra = state_dict["extra"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "extra"})


@pytest.mark.parametrize("with_module", [True, False])
def test_a_state_beside_that_of_parameters_comes_back(with_module: bool) -> None:
    """Under any key that a state may have, and beside the state too."""
    nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optim, into = [Beside(net.parameters(), 0.1, momentum=0.9) for net in nets]
    optim.fill(5)
    into.fill(6)
    uri = fresh_uri()
    states = [{"net": net} if with_module else {} for net in nets]
    holdfast.save(uri, states[0] | {"optim": optim})
    holdfast.load(uri, into=states[1] | {"optim": into})
    assert difference(dict(optim.state_dict()), dict(into.state_dict())) is None
    assert into.extra == {"history": [5], "t": torch.tensor([5])}


@pytest.mark.parametrize(
    ("key", "said"),
    [(1, "number of a parameter"), (("a", 2), "key of type tuple"), ("weight", "'weight'")],
)
def test_a_state_that_has_no_name_is_refused(key: Any, said: str) -> None:
    """A key that is another's, or of a type that no key may have, is an error that names the
    optimizer."""
    net = nn.Linear(3, 3)
    optim = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optim.step()
    optim.state[key] = {"n": 1}
    with pytest.raises(holdfast.StateError, match=said) as caught:
        holdfast.save(fresh_uri(), {"net": net, "optim": optim})
    assert 'state["optim"]' in str(caught.value)


def test_the_state_of_a_parameter_that_no_group_has_is_refused() -> None:
    """Torch's own message would be a number."""
    net = nn.Linear(3, 3)
    optim = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optim.state[torch.ones(2)] = {"momentum_buffer": torch.ones(2)}
    with pytest.raises(
        holdfast.StateError, match=r'state\["optim"\] has a state for a tensor .* in none of its'
    ):
        holdfast.save(fresh_uri(), {"net": net, "optim": optim})


def test_state_values_of_unknown_types_are_refused() -> None:
    """A deque in an optimizer's state has no codec, and is named."""
    net = nn.Linear(2, 2)
    optim = torch.optim.SGD(net.parameters(), 0.1)
    optim.state[net.weight]["history"] = deque([1])
    with pytest.raises(
        holdfast.StateError,
        match=r'state\["optim"\]\["state"\]\["weight"\]\["history"\] is a .*deque',
    ):
        holdfast.save(fresh_uri(), {"net": net, "optim": optim})
