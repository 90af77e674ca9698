"""Unsupported states are refused by path, before anything is written."""

from __future__ import annotations

import collections
import enum
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast


class Color(enum.IntEnum):
    """A kind of int that would come back as a plain one."""

    RED = 1


class Text(str):
    """A kind of str."""


class Odd(torch.Tensor):
    """A tensor whose elements are not in its own memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class HasNoDict:
    """An object whose state is no dict."""

    def state_dict(self) -> Any:
        return [1]

    def load_state_dict(self, state: Any) -> None:
        """Takes anything."""


Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def _nothing_is_written(tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaves a file."""
    yield
    assert list(tmp_path.iterdir()) == []


def cycle() -> list[Any]:
    """Return a list that contains itself, two levels down."""
    made: list[Any] = []
    made.append({"again": (made,)})
    return made


TENSORS: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse csr": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "subclass": lambda: torch.ones(2).as_subclass(Odd),
    "uninitialized parameter": lambda: torch.nn.LazyLinear(3).weight,
    "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)),
}

VALUES: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda x: x,
    "class": lambda: Color,
    "module of Python": lambda: collections,
    "set": lambda: {1, 2},
    "enum": lambda: Color.RED,
    "subclass of str": lambda: Text("x"),
    "path": lambda: Path("x"),
    "named tuple": lambda: Pair(1, 2),
    "state that is no dict": HasNoDict,
    "np.datetime64": lambda: np.datetime64("2024-01-01"),
    "memoryview": lambda: memoryview(b"x"),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    "object array": lambda: np.array([object()]),
    "text array": lambda: np.array(["a"]),
    "date array": lambda: np.array(["2024-01-01"], "datetime64[D]"),
    "record array": lambda: np.zeros(2, [("a", "i4")]),
    "foreign byte order": lambda: np.zeros(2, ">f4"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
}


@pytest.mark.filterwarnings(
    "ignore:.*quantize_per_tensor:UserWarning", "ignore:.*nested tensors:UserWarning"
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", [*TENSORS, *VALUES, *ARRAYS])
def test_what_cannot_be_saved_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    """A StateError names where it is; nothing is created, whatever else the state holds."""
    made = (TENSORS | VALUES | ARRAYS)[name]()
    state = {"good": torch.ones(3), "model": [{"layer.0": (1, made)}]}
    with pytest.raises(holdfast.StateError, match=re.escape('state["model"][0]["layer.0"][1]')):
        holdfast.save(tmp_path / "c", state)


KEYS = [(1, 2), b"x", frozenset(), Color.RED, Text("t"), np.int64(3), 1j, torch.float32]


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize(
    "item",
    [torch.ones(2), 1, [torch.ones(2)], np.ones(2)],
    ids=["tensor", "value", "list", "array"],
)
def test_a_key_that_is_no_text_number_or_none_is_refused(
    key: Any, item: Any, tmp_path: Path
) -> None:
    """Such a key would come back as another one."""
    with pytest.raises(holdfast.StateError, match=re.escape('state["model"]')):
        holdfast.save(tmp_path / "c", {"model": {key: item}})


def test_a_container_that_contains_itself_is_refused(tmp_path: Path) -> None:
    """This holds at any depth. The path says where the cycle begins."""
    with pytest.raises(
        holdfast.StateError, match=re.escape('state["x"][0]["again"][0] contains itself')
    ):
        holdfast.save(tmp_path / "c", {"x": cycle()})


def test_nesting_too_deep_is_refused(tmp_path: Path) -> None:
    """A state nested ten thousand deep is a StateError, not a crash of the interpreter's stack."""
    state: Any = {"t": torch.ones(1)}
    for _ in range(10_000):
        state = {"d": state}
    with pytest.raises(holdfast.StateError, match="nested"):
        holdfast.save(tmp_path / "c", state)


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, 'state["a"]["b"]', 'state["a.b"]'),
        ({"x": {1: torch.ones(1), "1": torch.zeros(1)}}, 'state["x"][1]', 'state["x"]["1"]'),
        ({"l": [torch.ones(1)], "l.0": torch.ones(1)}, 'state["l"][0]', 'state["l.0"]'),
        ({"": {"": torch.ones(1)}, ".": torch.ones(1)}, 'state[""][""]', 'state["."]'),
    ],
)
def test_two_tensors_of_one_name_are_refused(
    state: Any, first: str, second: str, tmp_path: Path
) -> None:
    """The error names both paths."""
    with pytest.raises(holdfast.StateError) as caught:
        holdfast.save(tmp_path / "c", state)
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize(
    "state",
    [torch.ones(2), 3, None, "text", {1, 2}, np.ones(2), torch.Generator(), Pair(1, 2)],
    ids=lambda s: type(s).__name__,
)
def test_a_state_that_is_no_container_is_refused(state: Any, tmp_path: Path) -> None:
    """A state is a dict, list or tuple, or an object with a state dict."""
    with pytest.raises(holdfast.StateError, match="the state"):
        holdfast.save(tmp_path / "c", state)


@pytest.mark.parametrize("step", ["5", 1.5, np.float32(1), True])
def test_a_step_that_is_no_whole_number_is_refused(step: Any, tmp_path: Path) -> None:
    """The error comes before any write."""
    with pytest.raises(holdfast.UsageError, match="step"):
        holdfast.save(tmp_path / "c", {}, step=step)


@pytest.mark.parametrize("budget", [0, -1, (32 << 20) - 1])
def test_a_budget_too_small_is_refused(budget: int, tmp_path: Path) -> None:
    """Every function with a budget refuses it."""
    for call in (holdfast.save, holdfast.async_save):
        with pytest.raises(holdfast.UsageError, match="budget"):
            call(tmp_path / "c", {}, budget_nbytes=budget)
    with pytest.raises(holdfast.UsageError, match="budget"):
        holdfast.load(tmp_path / "c", budget_nbytes=budget)


@pytest.mark.parametrize(
    "uri", ["", "s3:/bucket/x", "nosuch://x", "memory://x?a=1", "file://host/x", "memory://x#y"]
)
def test_a_uri_that_makes_no_sense_is_refused(uri: str) -> None:
    """Every function with a URI refuses it."""
    for call in (holdfast.load, holdfast.open, lambda uri: holdfast.save(uri, {})):
        with pytest.raises(holdfast.UriError):
            call(uri)
