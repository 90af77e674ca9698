"""Optimizer states load bit for bit into their own parameters and groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri, saved
from torch import nn

import holdfast


class Rich(torch.optim.Optimizer):
    """An optimizer with nested state, other dtypes than its parameters' and plain values."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def fill(self) -> None:
        """Fill the state as a step would."""
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
    """Return a module of this dtype and its optimizer."""
    net = nn.Linear(5, 3, dtype=dtype)
    return net, make(net.parameters())


def by_name(net: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of each parameter by name."""
    return {name: optim.state[p] for name, p in net.named_parameters() if p in optim.state}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("stepped", [False, True])
def test_state_keeps_its_dtype(dtype: torch.dtype, stepped: bool) -> None:
    """A loaded state keeps its dtypes, for any dtype of the parameter, with or without old state."""
    net, optim = pair(dtype)
    optim.fill()
    uri = saved({"net": net, "optim": optim})
    other, into = pair(dtype)
    if stepped:
        into.fill()
    holdfast.load(uri, into={"net": other, "optim": into})
    assert difference(by_name(net, optim), by_name(other, into)) is None
    assert {type(entry["seen"]) for entry in into.state.values()} == {Counter}


def test_present_state_is_filled_in_place() -> None:
    """An optimizer that has stepped needs no second copy of its state."""
    net, optim = pair(torch.float32)
    optim.fill()
    uri = saved({"net": net, "optim": optim})
    entry = optim.state[net.weight]
    addresses = {key: entry[key].data_ptr() for key in ("fp32", "fp64", "row", "mask")}
    holdfast.load(uri, into={"net": net, "optim": optim})
    assert {key: optim.state[net.weight][key].data_ptr() for key in addresses} == addresses


class Recasting(Rich):
    """An optimizer that changes dtypes before and after torch's method."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Change dtypes around torch's method."""
        for entry in state_dict["state"].values():
            entry["half"] = entry["half"].float() + 1
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            entry["fp64"] = entry["fp64"].float()


class Apart(Rich):
    """An optimizer that loads its state in its own way."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Load without torch's method."""
        self.taken = state_dict


def test_own_load_state_dict_has_the_last_word() -> None:
    """An override of ``load_state_dict`` decides, around torch's method or instead of it."""
    net, optim = pair(torch.bfloat16, Recasting)
    optim.fill()
    uri = saved({"net": net, "optim": optim})
    other, into = pair(torch.bfloat16, Recasting)
    holdfast.load(uri, into={"net": other, "optim": into})
    stored, loaded = by_name(net, optim)["weight"], by_name(other, into)["weight"]
    assert difference(stored["half"].float() + 1, loaded["half"]) is None
    assert difference(stored["fp64"].float(), loaded["fp64"]) is None
    assert difference(stored["fp32"], loaded["fp32"]) is None
    other, apart = pair(torch.bfloat16, Apart)
    holdfast.load(uri, into={"net": other, "optim": apart})
    assert difference(stored["fp64"], apart.taken["state"][0]["fp64"]) is None


def test_hooks_have_the_last_word() -> None:
    """Hooks around the load see the stored state, and their changes stay."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = saved({"net": net, "optim": optim})
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


def test_fused_steps_are_float32() -> None:
    """Torch's fused kernels count in fp32, so a load into a fused optimizer converts steps."""
    net, optim = pair(torch.float32)
    optim.fill()
    for entry in optim.state.values():
        entry["step"] = torch.tensor(7.0, dtype=torch.float64)
    uri = saved({"net": net, "optim": optim})
    for fused, dtype in ((False, torch.float64), (True, torch.float32)):
        other, into = pair(torch.float32)
        into.register_load_state_dict_pre_hook(
            lambda o, state, on=fused: state["param_groups"][0].update(fused=on)
        )
        holdfast.load(uri, into={"net": other, "optim": into})
        assert {entry["step"].dtype for entry in into.state.values()} == {dtype}


class Wrapper(torch.optim.Optimizer):
    """An optimizer that delegates to another one, like wrappers of training frameworks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> Any:
        """Return the inner optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load into the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)


def test_wrapped_optimizer() -> None:
    """A wrapper has none of torch's hooks, but the wrapped optimizer has."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = saved({"net": net, "optim": Wrapper(optim)})
    other, into = pair(torch.bfloat16)
    holdfast.load(uri, into={"net": other, "optim": Wrapper(into)})
    assert difference(by_name(net, optim), by_name(other, into)) is None


class App:
    """A model and its optimizer as one object."""

    def __init__(self, net: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.net, self.optims = net, {"only": optim}

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of the module and the optimizer."""
        return {"net": self.net.state_dict(), "optim": self.optims["only"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both state dicts."""
        self.net.load_state_dict(state["net"])
        self.optims["only"].load_state_dict(state["optim"])


def test_optimizer_within_an_object() -> None:
    """An object passes the state to torch's method in its own way."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = saved({"app": App(net, optim)})
    other, into = pair(torch.bfloat16)
    holdfast.load(uri, into={"app": App(other, into)})
    assert difference(by_name(net, optim), by_name(other, into)) is None


@pytest.mark.parametrize("stored", [[torch.ones(3)], torch.ones(3), 3])
def test_state_of_another_form_is_refused(stored: object) -> None:
    """A state that is no mapping belongs to another kind of optimizer and is refused."""

    class Listed(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            """Return a state dict whose state is no mapping."""
            return {"state": stored, "param_groups": [{"lr": 0.5, "params": [0]}]}

    net = nn.Linear(3, 3)
    uri = saved({"optim": Listed([net.weight], lr=0.5)})
    into = torch.optim.SGD([net.weight], lr=0.1)
    with pytest.raises(holdfast.MismatchError, match="instead of the state of parameters"):
        holdfast.load(uri, into={"optim": into}, strict=False)
    assert into.param_groups[0]["lr"] == 0.1


def test_optimizer_as_the_whole_state() -> None:
    """An optimizer alone is saved and loaded, and its groups are checked."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = saved(optim)
    other, into = pair(torch.bfloat16)
    assert holdfast.load(uri, into=into) is into
    assert difference(by_name(net, optim), by_name(other, into)) is None
    with pytest.raises(
        holdfast.MismatchError, match=r"in groups of \[2\]; the optimizer's groups have \[1\]"
    ):
        holdfast.load(uri, into=Rich([other.weight]))


class Beside(torch.optim.SGD):
    """An optimizer with state of no parameter and with its own entries in the state dict."""

    def fill(self, n: int) -> None:
        """Fill the state as a step would."""
        self.state["global"] = {"n": n, "t": torch.full((3,), float(n)), 4: {"x": [n]}}  # type: ignore[index]
        self.state[1000] = {"factor": torch.full((2, 2), float(n))}  # type: ignore[index]
        self.state["count"] = n  # type: ignore[index]
        self.extra = {"history": [n], "t": torch.tensor([n])}
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum_buffer": torch.full_like(p, float(n))}

    def state_dict(self) -> Any:
        """Return torch's state dict with additional entries."""
        return super().state_dict() | {"extra": self.extra}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load torch's state dict and the additional entries."""
        self.extra = state_dict["extra"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "extra"})


@pytest.mark.parametrize("with_module", [True, False])
def test_state_beside_parameters(with_module: bool) -> None:
    """Entries that belong to no parameter come back under any key."""
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
def test_ambiguous_key_is_refused(key: Any, said: str) -> None:
    """A key that collides or has an unsupported type is an error that names the optimizer."""
    net = nn.Linear(3, 3)
    optim = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optim.step()
    optim.state[key] = {"n": 1}
    with pytest.raises(holdfast.StateError, match=said) as caught:
        holdfast.save(fresh_uri(), {"net": net, "optim": optim})
    assert 'state["optim"]' in str(caught.value)


def test_state_of_an_unknown_tensor_is_refused() -> None:
    """The error describes the tensor; torch's own would be a number."""
    net = nn.Linear(3, 3)
    optim = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optim.state[torch.ones(2)] = {"momentum_buffer": torch.ones(2)}
    with pytest.raises(
        holdfast.StateError, match=r'state\["optim"\] has a state for a tensor .* in none of its'
    ):
        holdfast.save(fresh_uri(), {"net": net, "optim": optim})
