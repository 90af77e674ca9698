"""Loads into modules on the meta device, and saves and loads in other modes of torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, flip, fresh_uri, image_in, saved
from support.held import Held
from torch import nn

import holdfast


class Net(nn.Module):
    """Two layers that are tied, a buffer, and one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(self.first(x)))
        return x + self.table.to(x.device)


def on_meta() -> Net:
    """Return the model without memory."""
    with torch.device("meta"):
        return Net()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train; return the losses."""
    found = []
    for _ in range(steps):
        loss = net(torch.arange(12.0).reshape(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """Return a module and its optimizer after some steps."""
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    train(net, optimizer, 2)
    return net, optimizer


@pytest.mark.parametrize("before", [True, False])
def test_a_module_is_given_memory_by_a_load(before: bool) -> None:
    """Parameters stay the same objects, whether the optimizer is made before or after the load."""
    net, optimizer = trained()
    uri = saved({"net": net, "optim": optimizer})
    into = on_meta()
    weight = into.first.weight
    weight.mark = "kept"
    into.norm.weight.requires_grad_(False)
    made = torch.optim.AdamW(into.parameters(), lr=0.1)
    if before:
        holdfast.load(uri, into={"net": into, "optim": made})
    else:
        holdfast.load(uri, into=into, only="net")
        made = torch.optim.AdamW(into.parameters(), lr=0.1)
        holdfast.load(uri, into={"net": into, "optim": made})
    assert into.first.weight is into.second.weight is weight
    assert weight.mark == "kept"
    assert not into.norm.weight.requires_grad
    assert difference(dict(net.state_dict()), dict(into.state_dict())) is None
    into.norm.weight.requires_grad_(True)
    into.table = torch.arange(3.0)
    assert train(into, made, 3) == train(net, optimizer, 3)


def test_a_module_may_be_on_meta_in_part(caplog: pytest.LogCaptureFixture) -> None:
    """A load fills parameters in memory in place; parameters that are not stored stay on meta."""
    net, _ = trained()
    uri = saved({"net": net})
    into = on_meta()
    into.norm.to_empty(device="cpu")
    into.more = nn.Linear(2, 2, device="meta")
    address = into.norm.running_mean.data_ptr()
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.load(uri, into={"net": into}, strict=False)
    assert into.norm.running_mean.data_ptr() == address
    assert into.more.weight.is_meta
    assert into.table.is_meta
    assert "table" in caplog.text
    stored = net.state_dict()
    assert difference(dict(stored), {name: into.state_dict()[name] for name in stored}) is None


def test_after_a_load_that_fails_it_is_on_meta_as_before(tmp_path: Path) -> None:
    """A failed load leaves the module on meta, after a mismatch as after a damaged byte."""
    net, _ = trained()
    holdfast.save(tmp_path / "c", {"net": net, "more": torch.ones(3)})
    into = on_meta()
    with pytest.raises(holdfast.MismatchError):
        holdfast.load(tmp_path / "c", into={"net": into})
    image = image_in(tmp_path / "c")
    flip(image, image.read_bytes().index(net.first.bias.detach().numpy().tobytes()))
    with pytest.raises(holdfast.DamagedError):
        holdfast.load(tmp_path / "c", into={"net": into, "more": torch.zeros(3)})
    assert all(parameter.is_meta for parameter in into.parameters())


@pytest.mark.parametrize("strict", [True, False])
def test_tied_parameters_that_are_stored_apart_are_told(strict: bool) -> None:
    """Tied parameters that were stored separately are reported on meta as they are in memory."""
    net, _ = trained()
    net.second.weight = nn.Parameter(torch.zeros(3, 3))
    uri = saved({"net": net})
    into = on_meta()
    if strict:
        with pytest.raises(holdfast.MismatchError, match="share memory in the state"):
            holdfast.load(uri, into={"net": into})
    else:
        holdfast.load(uri, into={"net": into}, strict=False)
        assert torch.equal(into.first.weight, net.second.weight)


class Hooked(nn.Linear):
    """Gives its weight another name in its state dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._register_state_dict_hook(self._renamed)

    @staticmethod
    def _renamed(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2),
        lambda: dict(nn.Linear(2, 2, device="meta").state_dict()),
        lambda: Hooked(2, 2, device="meta"),
    ],
    ids=["tensor", "state dict", "another name"],
)
def test_what_is_no_parameter_of_a_module_is_refused(make: Any) -> None:
    """There is nothing that could be given the memory. The error speaks of loading."""
    with torch.device("meta"):
        state = {"m": make()}
    with pytest.raises(holdfast.StateError, match=r"cannot be filled.*module.*to_empty") as caught:
        holdfast.load(fresh_uri(), into=state)
    assert 'state["m"]' in str(caught.value)
    assert "saved" not in str(caught.value)
    with pytest.raises(holdfast.StateError, match="cannot be saved"):
        holdfast.save(fresh_uri(), state)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    """Make new tensors without data."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    """Make new tensors of another dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
}


def job(value: float) -> dict[str, Any]:
    """Return a state with every kind of object."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for t in net.state_dict().values():
        t.fill_(value)
    optim = torch.optim.AdamW(net.parameters(), lr=torch.tensor(value))
    return {
        "net": net,
        "optim": optim,
        "held": Held(value),
        "strided": torch.full((2, 3), value).t(),
        "rng": holdfast.RNGState(),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0),
        "g": torch.Generator(),
        "n": 3,
    }


def train_job(state: dict[str, Any]) -> None:
    """Take one step."""
    generator = torch.Generator().manual_seed(1)
    state["net"](torch.rand(3, 4, generator=generator)).square().sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def seen(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values to compare."""
    objects = {name: state[name].state_dict() for name in ("optim", "held")}
    return {"net": dict(state["net"].state_dict()), "strided": state["strided"], **objects}


@pytest.fixture
def stored() -> tuple[str, dict[str, Any]]:
    """Save a checkpoint; return it and its state."""
    state, uri = job(0.5), fresh_uri()
    train_job(state)
    holdfast.save(uri, state)
    return uri, state


@pytest.mark.parametrize("mode", MODES)
def test_load_in_a_mode(mode: str, stored: tuple[str, dict[str, Any]]) -> None:
    """A load fills and builds the same tensors as outside of the mode, and training continues."""
    uri, state = stored
    into = job(7.0)
    with MODES[mode]():
        holdfast.load(uri, into=into)
        built = holdfast.load(uri)
        with holdfast.open(uri) as checkpoint:
            rows = checkpoint.read("net.0.weight", rows=slice(1, 3))
            assert checkpoint.verify().ok
    assert difference(seen(state), seen(into)) is None
    assert difference(dict(state["net"].state_dict()), built["net"]) is None
    assert difference(state["net"][0].weight[1:3], rows) is None
    train_job(state)
    train_job(into)
    assert difference(seen(state), seen(into)) is None


@pytest.mark.parametrize("mode", MODES)
def test_save_in_a_mode(mode: str, stored: tuple[str, dict[str, Any]]) -> None:
    """Any kind of save stores the same state as outside of the mode."""
    _, state = stored
    uris = [fresh_uri() for _ in range(4)]
    with MODES[mode]():
        holdfast.save(uris[0], state)
        for uri, lazy in zip(uris[1:], (False, True, "prove"), strict=True):
            holdfast.async_save(uri, state, lazy=lazy).wait()  # type: ignore[arg-type]
    for uri in uris:
        into = job(7.0)
        holdfast.load(uri, into=into)
        assert difference(seen(state), seen(into)) is None


@pytest.mark.parametrize("within", [True, False], ids=["within", "from outside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_tensors_are_filled(
    within: bool, dtype: torch.dtype, stored: tuple[str, dict[str, Any]]
) -> None:
    """Inference tensors are filled in place or cast, whole or strided, and can be saved."""
    uri, state = stored
    with torch.inference_mode():
        shared = torch.zeros(2, 3, dtype=dtype).t()
        into = {"net": job(7.0)["net"].to(dtype), "strided": shared, "held": Held(7.0)}
    with torch.inference_mode(within):
        holdfast.load(uri, into=into, strict="state", cast=True)
    assert torch.equal(into["net"][0].weight, state["net"][0].weight.to(dtype))
    assert torch.equal(into["strided"], state["strided"].to(dtype))
    assert difference(state["held"].state_dict(), into["held"].state_dict()) is None
    again = saved(into)
    holdfast.async_save(again, into, lazy=True).wait()
    assert difference(dict(into["net"].state_dict()), holdfast.load(again)["net"]) is None


def test_inference_tensors_that_share_memory_are_filled() -> None:
    """Two names of one inference tensor are filled from tensors that are stored apart."""
    uri = saved({"a": torch.ones(3), "b": torch.ones(3)})
    with torch.inference_mode():
        shared = torch.zeros(3)
    holdfast.load(uri, into={"a": shared, "b": shared})
    assert shared.tolist() == [1.0] * 3
