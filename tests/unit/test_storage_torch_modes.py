"""Saves and loads within modes of torch that change what tensors are made, and into tensors that
were made in them."""

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
    """New tensors have no data."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    """New tensors are of another dtype."""
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
    """A state of every kind of object."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for t in net.state_dict().values():
        t.fill_(value)
    optim = torch.optim.AdamW(net.parameters(), lr=torch.tensor(value))
    return {
        "net": net, "optim": optim, "held": Held(value), "strided": torch.full((2, 3), value).t(), "rng": holdfast.RNGState(),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0), "g": torch.Generator(), "n": 3,
    }  # fmt: skip


def train(state: dict[str, Any]) -> None:
    """One step."""
    generator = torch.Generator().manual_seed(1)
    state["net"](torch.rand(3, 4, generator=generator)).square().sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def seen(state: dict[str, Any]) -> dict[str, Any]:
    """What there is to compare."""
    return {
        "net": dict(state["net"].state_dict()), "optim": state["optim"].state_dict(), "strided": state["strided"],
        "held": state["held"].state_dict(),
    }  # fmt: skip


@pytest.fixture
def stored() -> tuple[str, dict[str, Any]]:
    """A checkpoint, and the state that is in it."""
    state, uri = job(0.5), fresh_uri()
    train(state)
    holdfast.save(uri, state)
    return uri, state


@pytest.mark.parametrize("mode", MODES)
def test_a_load_within_a_mode_gives_what_was_saved(
    mode: str, stored: tuple[str, dict[str, Any]]
) -> None:
    """And training goes on afterwards, as if the load had been outside."""
    uri, state = stored
    into = job(7.0)
    with MODES[mode]():
        holdfast.load(uri, into=into)
    assert difference(seen(state), seen(into)) is None
    train(state)
    train(into)
    assert difference(seen(state), seen(into)) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_built_state_and_a_slice_have_data_in_every_mode(
    mode: str, stored: tuple[str, dict[str, Any]]
) -> None:
    """On the CPU, whatever the default device is."""
    uri, state = stored
    with MODES[mode]():
        built = holdfast.load(uri)
        with holdfast.open(uri) as checkpoint:
            rows = checkpoint.read("net.0.weight", rows=slice(1, 3))
            assert checkpoint.verify().ok
    assert difference(dict(state["net"].state_dict()), built["net"]) is None
    assert difference(state["net"][0].weight[1:3], rows) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_save_within_a_mode_stores_what_is_there(
    mode: str, stored: tuple[str, dict[str, Any]]
) -> None:
    """At once, or while training goes on."""
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
    """In place or cast, whole or strided, in modules, objects and by themselves; and they can be
    saved."""
    uri, state = stored
    with torch.inference_mode():
        into = {
            "net": job(7.0)["net"].to(dtype),
            "strided": torch.zeros(2, 3, dtype=dtype).t(),
            "held": Held(7.0),
        }
    with torch.inference_mode(within):
        holdfast.load(uri, into=into, strict="state", cast=True)
    assert torch.equal(into["net"][0].weight, state["net"][0].weight.to(dtype))
    assert torch.equal(into["strided"], state["strided"].to(dtype))
    assert difference(state["held"].state_dict(), into["held"].state_dict()) is None
    again = saved(into)
    holdfast.async_save(again, into, lazy=True).wait()
    assert difference(dict(into["net"].state_dict()), holdfast.load(again)["net"]) is None


def test_inference_tensors_that_share_memory_are_filled() -> None:
    """From tensors that are stored apart."""
    uri = saved({"a": torch.ones(3), "b": torch.ones(3)})
    with torch.inference_mode():
        shared = torch.zeros(3)
    holdfast.load(uri, into={"a": shared, "b": shared})
    assert shared.tolist() == [1.0] * 3
