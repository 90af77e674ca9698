"""Test saves and loads in torch modes that change new tensors, and loads into inference tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri, saved
from support.held import Held
from torch import nn

import holdfast


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


def train(state: dict[str, Any]) -> None:
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
    """A checkpoint, and the state in it."""
    state, uri = job(0.5), fresh_uri()
    train(state)
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
    train(state)
    train(into)
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
