"""Optimizers after ``cast=True``, with orphans, and with moments that do not fit: the next step works,
or the load says what is wrong."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import fresh_uri, saved
from torch import nn

import holdfast

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
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


def step(net: nn.Module, optim: torch.optim.Optimizer) -> None:
    """One step of training."""
    dtype = next(net.parameters()).dtype

    def loss() -> torch.Tensor:
        optim.zero_grad()
        value = net(torch.ones(2, 4, dtype=dtype)).square().sum()
        value.backward()
        return value

    loss()
    optim.step(loss)


def moments(optim: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    """The dtypes of everything with dimensions."""
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


@pytest.mark.parametrize("module", [True, False], ids=["module", "state dict"])
def test_wide_moments_stay_wide(module: bool) -> None:
    """An optimizer that keeps fp32 moments of bf16 weights gets them back bit for bit: a cast
    concerns what differs."""
    net = net_of(torch.bfloat16)
    optim = ADAMW(net.parameters())
    for p in net.parameters():
        exact = torch.rand(p.shape)
        optim.state[p] = {"step": torch.tensor(1.0), "exp_avg": exact, "exp_avg_sq": exact**2}
    uri = saved({"net": net if module else net.state_dict(), "optim": optim})
    other = net_of(torch.bfloat16)
    into = ADAMW(other.parameters())
    target = other if module else other.state_dict()
    holdfast.load(uri, into={"net": target, "optim": into}, cast=True)
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


class Wrapper:
    """An optimizer in an object of the user's own."""

    def __init__(self, net: nn.Module) -> None:
        self.inner = ADAMW(net.parameters())

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_wrapped_optimizer_steps_after_a_cast(stepped: bool) -> None:
    """The same holds for an optimizer within another object."""
    net = net_of(torch.float32)
    optim = Wrapper(net)
    step(net, optim.inner)
    uri = saved({"net": net, "optim": optim})
    other = net_of(torch.bfloat16)
    into = Wrapper(other)
    if stepped:
        step(other, into.inner)
    holdfast.load(uri, into={"net": other, "optim": into}, cast=True)
    assert set(moments(into.inner).values()) == {torch.bfloat16}
    step(other, into.inner)


def with_orphans() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A module one of whose layers was replaced after its optimizer was made."""
    net = net_of(torch.float32)
    optim = ADAMW([{"params": net[1].parameters()}, {"params": net[0].parameters()}])
    step(net, optim)
    net[1] = nn.Linear(4, 4)
    return net, optim


def test_orphans_are_named_in_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All others are stored by name. The warning comes once, and says where the orphans are."""
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


def test_job_with_orphans_loads_its_own_checkpoint() -> None:
    """Orphans get their state by number, in a job that has them too."""
    net, optim = with_orphans()
    uri = saved({"net": net, "optim": optim})
    other, into = with_orphans()
    into.state.clear()
    holdfast.load(uri, into={"net": other, "optim": into})
    assert str(into.state_dict()) == str(optim.state_dict())


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
