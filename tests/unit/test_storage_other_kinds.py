"""Test a checkpoint that has something else in the place of an object: an error with the path."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import fresh_uri
from support.held import Held
from torch import nn

import holdfast


def stepped() -> torch.optim.Optimizer:
    """An optimizer with a state, of a parameter of its own."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def scheduler() -> Any:
    """A scheduler of torch, which takes whatever dict it is given."""
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 3)


OBJECTS: dict[str, Callable[[], Any]] = {
    "optimizer": stepped,
    "scheduler": scheduler,
    "object": lambda: Held(1.0),
    "torch.Generator": torch.Generator,
    "np.random.Generator": np.random.default_rng,
    "np.random.RandomState": np.random.RandomState,
    "random.Random": random.Random,
    "RNGState": holdfast.RNGState,
    "PerRank": lambda: holdfast.PerRank(torch.Generator()),
    "PerRank of an object": lambda: holdfast.PerRank(Held(1.0)),
}
STORED: dict[str, Any] = {
    "number": 3,
    "text": "text",
    "None": None,
    "floats": torch.ones(3),
    "bytes": torch.ones(3, dtype=torch.uint8),
    "array": np.ones(3),
    "list": [1, 2],
    "tensors": [torch.ones(3)],
    "tuple": (1, 2),
}
DICTS: dict[str, Any] = {
    "empty": {},
    "numbers": {"a": 1},
    "weights": {"weight": torch.ones(2)},
    "no groups": {"state": {0: {"step": torch.ones(())}}},
    "groups of another kind": {"state": {}, "param_groups": 3},
    "world": {"world": "two", "of": {"a": 1}},
}
OF_ANY_DICT = {"scheduler", "object", "PerRank of an object"}
"""Their own code decides which dicts they take."""


@pytest.mark.parametrize("stored", STORED | DICTS)
def test_another_kind_in_the_place_of_an_object_is_named(stored: str) -> None:
    """The error names the path in every mode; nothing is filled, in the object or beside it."""
    uri = fresh_uri()
    holdfast.save(uri, {"parts": {"one": (STORED | DICTS)[stored]}, "beside": torch.ones(2)})
    for name, make in OBJECTS.items():
        if stored in DICTS and name in OF_ANY_DICT:
            continue
        for strict in (True, False):
            beside = torch.zeros(2)
            state = {"parts": {"one": make()}, "beside": beside}
            with pytest.raises(holdfast.MismatchError, match=r'state\["parts"\]\["one"\]'):
                holdfast.load(uri, into=state, strict=strict)
            assert beside.tolist() == [0.0, 0.0], name


def test_an_entry_of_another_kind_in_an_optimizer_is_named() -> None:
    """A number in place of the state of a parameter would fail in the next step."""
    stored = stepped().state_dict()
    stored["state"][0] = 3
    uri = fresh_uri()
    holdfast.save(uri, {"optim": stored})
    into = stepped()
    with pytest.raises(holdfast.MismatchError, match=r'state\["optim"\]'):
        holdfast.load(uri, into={"optim": into})


@pytest.mark.parametrize("name", OBJECTS)
def test_the_state_of_an_object_of_the_same_kind_is_taken(name: str) -> None:
    """Whatever is refused, this is not."""
    uri = fresh_uri()
    holdfast.save(uri, {"parts": {"one": OBJECTS[name]()}})
    holdfast.load(uri, into={"parts": {"one": OBJECTS[name]()}})
