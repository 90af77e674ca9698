"""Test ``default``: the caller's function for values that cannot be stored as they are."""

from __future__ import annotations

import collections
import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from torch import nn

import holdfast


class Phase(enum.Enum):
    """An enum in a state."""

    WARM_UP = "warm-up"
    DECAY = "decay"


@dataclasses.dataclass
class Progress:
    """A dataclass in a state."""

    phase: Phase
    seen: set[int]
    curve: torch.Tensor


Point = collections.namedtuple("Point", "x y")


def plain(value: Any) -> Any:
    """Convert values as a caller would."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return vars(value)
    if isinstance(value, tuple):
        return value._asdict()
    raise TypeError("unknown kind")


def state() -> dict[str, Any]:
    """Return a nested state with a value of each kind."""
    progress = Progress(Phase.DECAY, {3, 1}, torch.arange(3.0))
    return {"at": [progress, Point(1, {"p": Path("a/b")})], "model": nn.Linear(2, 2), "n": 3}


def check(at: Any) -> None:
    """Fail unless the values are those that ``plain`` returns."""
    at[0]["curve"] = at[0]["curve"].tolist()
    progress = {"phase": "DECAY", "seen": [1, 3], "curve": [0.0, 1.0, 2.0]}
    assert at == [progress, {"x": 1, "y": {"p": "a/b"}}]


@pytest.mark.parametrize("lazy", [False, True])
def test_returned_values_are_stored(lazy: bool, tmp_path: Path) -> None:
    """Values are converted at any depth, also within what the function has returned."""
    uri = fresh_uri()
    for _ in range(2):
        holdfast.async_save(uri, state(), lazy=lazy, default=plain).wait()
    check(holdfast.load(uri)["at"])
    into: dict[str, Any] = {
        "at": [{"phase": "", "seen": [0, 0], "curve": torch.zeros(3)}, {"x": 0, "y": {"p": ""}}],
        "model": nn.Linear(2, 2),
        "n": 0,
    }
    holdfast.load(uri, into=into)
    check(into["at"])
    with holdfast.Checkpointer(tmp_path, every=1, default=plain, lazy=lazy) as checkpointer:
        checkpointer.step(1, state())
    check(holdfast.load(tmp_path / "step-00000001")["at"])


def test_state_of_an_object_is_converted() -> None:
    """A load passes the converted values to the object's load_state_dict."""

    class Schedule:
        phase: object = Phase.WARM_UP

        def state_dict(self) -> dict[str, object]:
            return {"phase": self.phase}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.phase = Phase[str(state["phase"])]

    uri = fresh_uri()
    holdfast.save(uri, {"s": Schedule()}, default=plain)
    into = Schedule()
    into.phase = Phase.DECAY
    holdfast.load(uri, into={"s": into})
    assert into.phase is Phase.WARM_UP


def test_storable_values_are_not_converted() -> None:
    """The function is called once for each value that needs it."""
    asked = []

    def recorded(value: Any) -> Any:
        asked.append(value)
        return 0

    given = {"a": [1, None, 2.5, "x", b"y", torch.ones(1), nn.Linear(1, 1)], "b": {7}, "c": (1,)}
    holdfast.save(fresh_uri(), given, default=recorded)
    assert asked == [{7}]


@pytest.mark.parametrize(
    ("default", "said"),
    [
        (plain, "is a function, which can neither be saved nor.*unknown kind"),
        (lambda value: value, "function, which default.* has converted to a function"),
        (lambda value: {1}, "has converted to a set"),
        (lambda value: [value], "seem to be circular"),
        (None, "is a builtins.function"),
    ],
    ids=["type error", "itself", "another", "circular", "none"],
)
def test_unconverted_values_are_refused(default: Any, said: str) -> None:
    """A value that the function does not convert is refused by path, before any I/O."""
    with pytest.raises(holdfast.StateError, match=said) as caught:
        holdfast.save("memory://", {"a": [plain]}, default=default)
    assert caught.match(r'state\["a"\]\[0\]')


def test_other_errors_of_the_function_are_raised() -> None:
    """Errors of the function are not hidden."""

    def broken(value: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        holdfast.save("memory://", {"a": {1}}, default=broken)


def test_load_replaces_values_of_any_kind() -> None:
    """Stored replacements are loaded; a value that was not stored is a mismatch."""
    uri = fresh_uri()
    holdfast.save(uri, {"phase": Phase.DECAY}, default=plain)
    into: dict[str, Any] = {"phase": Phase.WARM_UP}
    holdfast.load(uri, into=into)
    assert into == {"phase": "DECAY"}
    into = {"phase": "", "seen": {1}}
    with pytest.raises(holdfast.MismatchError, match=r'state\["seen"\]: no such value'):
        holdfast.load(uri, into=into)
    holdfast.load(uri, into=into, strict=False)
    assert into == {"phase": "DECAY", "seen": {1}}
