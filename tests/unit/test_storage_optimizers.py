"""Optimizer states load bit for bit into their own parameters and groups."""

from __future__ import annotations

import copy
import logging
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
        for entry in state_dict["state"].values():
            entry["half"] = entry["half"].float() + 1
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            entry["fp64"] = entry["fp64"].float()


def test_own_load_state_dict_has_the_last_word() -> None:
    """An override of ``load_state_dict`` decides."""
    net, optim = pair(torch.bfloat16, Recasting)
    optim.fill()
    uri = saved({"net": net, "optim": optim})
    other, into = pair(torch.bfloat16, Recasting)
    holdfast.load(uri, into={"net": other, "optim": into})
    stored, loaded = by_name(net, optim)["weight"], by_name(other, into)["weight"]
    assert difference(stored["half"].float() + 1, loaded["half"]) is None
    assert difference(stored["fp64"].float(), loaded["fp64"]) is None
    assert difference(stored["fp32"], loaded["fp32"]) is None


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
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class App:
    """A model and its optimizer as one object."""

    def __init__(self, net: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.net, self.optims = net, {"only": optim}

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optim": self.optims["only"].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optims["only"].load_state_dict(state["optim"])


@pytest.mark.parametrize("stored", [[torch.ones(3)], 3])
def test_state_of_another_form_is_refused(stored: object) -> None:
    """A state that is no mapping belongs to another kind of optimizer and is refused."""

    class Listed(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"state": stored, "param_groups": [{"lr": 0.5, "params": [0]}]}

    net = nn.Linear(3, 3)
    uri = saved({"optim": Listed([net.weight], lr=0.5)})
    into = torch.optim.SGD([net.weight], lr=0.1)
    with pytest.raises(holdfast.MismatchError, match="instead of the state of parameters"):
        holdfast.load(uri, into={"optim": into}, strict=False)
    assert into.param_groups[0]["lr"] == 0.1


STATES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a wrapper, without torch's hooks": lambda net, optim: {"net": net, "optim": Wrapper(optim)},
    "an object that passes the state on": lambda net, optim: {"app": App(net, optim)},
    "the whole state": lambda net, optim: optim,
}


@pytest.mark.parametrize("name", STATES)
def test_optimizer_within(name: str) -> None:
    """An optimizer gets its state back from wherever it is."""
    net, optim = pair(torch.bfloat16)
    optim.fill()
    uri = saved(STATES[name](net, optim))
    other, into = pair(torch.bfloat16)
    state = STATES[name](other, into)
    assert holdfast.load(uri, into=state) is state
    assert difference(by_name(net, optim), by_name(other, into)) is None
    if state is into:
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
        return super().state_dict() | {"extra": self.extra}

    def load_state_dict(self, state_dict: Any) -> None:
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
    [
        (1, "number of a parameter"),
        (("a", 2), "key of type tuple"),
        ("weight", "'weight'"),
        (torch.ones(2), "has a state for a tensor .* in none of its"),
    ],
)
def test_ambiguous_key_is_refused(key: Any, said: str) -> None:
    """A key that collides or has an unsupported type is an error that names the optimizer."""
    net = nn.Linear(3, 3)
    optim = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(1, 3)).sum().backward()
    optim.step()
    optim.state[key] = {"n": 1}
    with pytest.raises(holdfast.StateError, match=rf'state\["optim"\].*{said}'):
        holdfast.save(fresh_uri(), {"net": net, "optim": optim})


# Loads with cast=True, orphans, and moments that do not fit

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "Adam fused": lambda params: torch.optim.Adam(params, fused=True),
    "Adam foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "LBFGS": torch.optim.LBFGS,
    "NAdam": torch.optim.NAdam,
}
ADAMW = torch.optim.AdamW


def net_of(dtype: torch.dtype) -> nn.Sequential:
    """Return a module with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


def step(net: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Take one step of training."""
    dtype = next(net.parameters()).dtype

    def loss() -> torch.Tensor:
        optim.zero_grad()
        value = net(torch.ones(2, 4, dtype=dtype)).square().sum()
        value.backward()
        return value

    loss()
    optim.step(loss)


def moments(optim: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    """Return the dtypes of all states with dimensions."""
    found = {}
    for number, entry in optim.state_dict()["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found[f"{number}.{name}"] = value.dtype
    return found


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_follow_their_parameters(kind: str, stepped: bool) -> None:
    """A cast gives moments the dtype that torch's own load gives them, and the next step works."""
    wanted = torch.float64 if kind == "Adagrad" else torch.bfloat16
    make = OPTIMIZERS[kind]
    net = net_of(torch.float32)
    optim = make(net.parameters())
    step(net, optim)
    uri = saved({"net": net, "optim": optim})
    other = net_of(wanted)
    into = make(other.parameters())
    if stepped:
        step(other, into)
    holdfast.load(uri, into={"net": other, "optim": into}, cast=True)
    torchs = make(other.parameters())
    torchs.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert moments(into) == moments(torchs)
    steps = [entry["step"].dtype for entry in into.state.values() if "step" in entry]
    assert set(steps) <= {torch.float32}
    step(other, into)


def test_wide_moments_stay_wide() -> None:
    """An optimizer that keeps fp32 moments of bf16 weights gets them back bit for bit: a cast
    concerns what differs."""
    net = net_of(torch.bfloat16)
    optim = ADAMW(net.parameters())
    for p in net.parameters():
        exact = torch.rand(p.shape)
        optim.state[p] = {"step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact**2}
    uri = saved({"net": net.state_dict(), "optim": optim})
    other = net_of(torch.bfloat16)
    into = ADAMW(other.parameters())
    holdfast.load(uri, into={"net": other.state_dict(), "optim": into}, cast=True)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(optim.state[p]["exp_avg"], into.state[q]["exp_avg"])


def test_present_state_keeps_its_dtype() -> None:
    """A target optimizer with fp32 moments of bf16 weights keeps them in fp32, and one with bytes
    gets bytes."""
    net = net_of(torch.float32)
    optim = ADAMW(net.parameters())
    step(net, optim)
    for entry in optim.state.values():
        entry["bytes"] = torch.arange(3, dtype=torch.uint8)
    uri = saved({"net": net, "optim": optim})
    other = net_of(torch.bfloat16)
    into = ADAMW(other.parameters())
    for p in other.parameters():
        into.state[p] = {"exp_avg": torch.zeros(p.shape), "exp_avg_sq": torch.zeros_like(p)}
    holdfast.load(uri, into={"net": other, "optim": into}, cast=True)
    entry = into.state[other[0].weight]
    assert entry["exp_avg"].dtype == torch.float32
    assert torch.equal(entry["exp_avg"], optim.state[net[0].weight]["exp_avg"])
    assert entry["exp_avg_sq"].dtype == torch.bfloat16
    assert torch.equal(entry["bytes"], torch.arange(3, dtype=torch.uint8))


def with_orphans() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a module; one of its layers was replaced after its optimizer was made."""
    net = net_of(torch.float32)
    optim = ADAMW([{"params": net[1].parameters()}, {"params": net[0].parameters()}])
    step(net, optim)
    net[1] = nn.Linear(4, 4)
    return net, optim


def test_orphans_are_named_in_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All others are stored by name. The warning comes once, and says where the orphans are. A job
    that has them too gets their state."""
    net, optim = with_orphans()
    uri = fresh_uri()
    with caplog.at_level(logging.WARNING):
        holdfast.save(uri, {"net": net, "optim": optim})
        holdfast.save(fresh_uri(), {"net": net, "optim": optim, "step": 2})
    (record,) = caplog.records
    assert "AdamW: parameter 0 of group 0 (shape [4, 4])" in record.message
    with holdfast.open(uri) as checkpoint:
        names = {name for name in checkpoint.tensors if name.endswith("exp_avg")}
    assert names == {f"optim.state.{key}.exp_avg" for key in ("0", "1", "0.weight", "0.bias")}
    other, into = with_orphans()
    into.state.clear()
    holdfast.load(uri, into={"net": other, "optim": into})
    assert str(into.state_dict()) == str(optim.state_dict())


def test_repaired_job_loads_named_parameters() -> None:
    """A strict load names the new parameters; with strict=False they begin without a state."""
    net, optim = with_orphans()
    uri = saved({"net": net, "optim": optim})
    repaired = net_of(torch.float32)
    into = ADAMW(repaired.parameters())
    with pytest.raises(holdfast.MismatchError, match=r"'1\.weight', '1\.bias'"):
        holdfast.load(uri, into={"net": repaired, "optim": into})
    holdfast.load(uri, into={"net": repaired, "optim": into}, strict=False)
    assert torch.equal(
        into.state[repaired[0].weight]["exp_avg"], optim.state[net[0].weight]["exp_avg"]
    )
    assert repaired[1].weight not in into.state
    step(repaired, into)


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("kind", ["AdamW amsgrad", "SGD momentum", "Adagrad"])
def test_moments_of_another_shape_are_refused(kind: str, stepped: bool) -> None:
    """Swapped parameters are noticed by shape, which numbers do not reveal."""
    make = OPTIMIZERS[kind]
    net = nn.Linear(4, 3)
    optim = make([net.weight, net.bias])
    net(torch.ones(1, 4)).sum().backward()
    optim.step()
    uri = saved({"optim": optim})
    other = nn.Linear(4, 3)
    into = make([other.bias, other.weight])
    if stepped:
        other(torch.ones(1, 4)).sum().backward()
        into.step()
    before = copy.deepcopy(into.state_dict())
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(uri, into={"optim": into})
    assert r"optim.state.0." in str(caught.value)
    assert "shape [3, 4] in the checkpoint, of a parameter of shape [3]" in str(caught.value)
    assert str(into.state_dict()) == str(before)


@pytest.mark.parametrize("cast", [False, True])
def test_autograd_notices_a_load(cast: bool) -> None:
    """A backward through values that a load has replaced is an error, as it is after any other
    write in place. Inference tensors have no version, and are filled all the same."""
    with torch.inference_mode():
        inference = torch.ones(2)
    dtype = torch.float64 if cast else torch.float32
    state = {"w": torch.full((3,), 2.0), "i": inference}
    uri = saved(state)
    whole = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    loss = (whole * whole).sum()
    view = whole.detach()[1]
    with torch.inference_mode():
        inference.zero_()
    holdfast.load(uri, into={"w": view, "i": inference}, cast=cast)
    assert whole[1].tolist() == [2.0, 2.0, 2.0]
    assert inference.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
