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
    """Of a run."""

    WARM_UP = "warm-up"
    DECAY = "decay"


@dataclasses.dataclass
class Progress:
    """What a trainer keeps."""

    phase: Phase
    seen: set[int]
    curve: torch.Tensor


Point = collections.namedtuple("Point", "x y")


def plain(value: Any) -> Any:
    """As a caller would write it."""
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
    """One of each, nested."""
    progress = Progress(Phase.DECAY, {3, 1}, torch.arange(3.0))
    return {"at": [progress, Point(1, {"p": Path("a/b")})], "model": nn.Linear(2, 2), "n": 3}


STORED = [{"phase": "DECAY", "seen": [1, 3], "curve": [0.0, 1.0, 2.0]}, {"x": 1, "y": {"p": "a/b"}}]


def listed(at: Any) -> Any:
    """A state with lists in place of tensors."""
    at[0]["curve"] = at[0]["curve"].tolist()
    return at


@pytest.mark.parametrize("lazy", [False, True])
def test_what_the_function_returns_is_stored(lazy: bool) -> None:
    """Of values within what it has returned, too. A load gives that."""
    uri = fresh_uri()
    for _ in range(2):
        holdfast.async_save(uri, state(), lazy=lazy, default=plain).wait()
    assert listed(holdfast.load(uri)["at"]) == STORED
    into: dict[str, Any] = {
        "at": [{"phase": "", "seen": [0, 0], "curve": torch.zeros(3)}, {"x": 0, "y": {"p": ""}}],
        "model": nn.Linear(2, 2),
        "n": 0,
    }
    holdfast.load(uri, into=into)
    assert listed(into["at"]) == STORED


def test_a_checkpointer_takes_the_function(tmp_path: Path) -> None:
    """For all of its saves."""
    with holdfast.Checkpointer(tmp_path, every=1, default=plain) as checkpointer:
        checkpointer.step(1, state())
    assert listed(holdfast.load(tmp_path / "step-00000001")["at"]) == STORED


def test_the_state_of_an_object_is_converted_too() -> None:
    """The object is given what the function has returned."""

    class Schedule:
        phase: object = Phase.WARM_UP

        def state_dict(self) -> dict[str, object]:
            """Has an enum."""
            return {"phase": self.phase}

        def load_state_dict(self, state: dict[str, object]) -> None:
            """The object's own code knows what that is."""
            self.phase = Phase[str(state["phase"])]

    uri = fresh_uri()
    holdfast.save(uri, {"s": Schedule()}, default=plain)
    into = Schedule()
    into.phase = Phase.DECAY
    holdfast.load(uri, into={"s": into})
    assert into.phase is Phase.WARM_UP


def test_what_can_be_stored_is_not_asked_for() -> None:
    """The function sees what needs it, and each once."""
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
        (None, "is a builtins.function"),
    ],
    ids=["type error", "itself", "another", "none"],
)
def test_what_it_does_not_convert_is_refused_by_path(default: Any, said: str) -> None:
    """Before any I/O."""
    for within in ([test_the_state_of_an_object_is_converted_too], (Point, max)):
        with pytest.raises(holdfast.StateError, match=r'state\["a"\]\[\d\]') as caught:
            holdfast.save("memory://", {"a": within}, default=default)
        if isinstance(within, list):
            assert caught.match(said)


def test_other_errors_of_the_function_are_its_own() -> None:
    """They are not hidden."""

    def broken(value: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        holdfast.save("memory://", {"a": {1}}, default=broken)


def test_it_may_not_lead_in_circles() -> None:
    """A value that holds itself is an error, as a container is."""

    class Loop:
        """Holds itself."""

    with pytest.raises(holdfast.StateError, match="seem to be circular"):
        holdfast.save("memory://", {"a": Loop()}, default=lambda value: [value])


def test_a_load_replaces_a_value_of_any_kind() -> None:
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
