"""The soak: it does the same with the same seed, and tells when something leaks, or is not what was
saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.soak.curves import Curve
from support.soak.world import OPERATIONS, Ground, World, content, number_of

import holdfast
from holdfast.drivers.uri import Uri

FAULTS = "error:0.01,unsure:0.01,short:0.01"


def world_in(folder: Path) -> World:
    """A folder with two places for checkpoints; no process is killed."""
    ground = Ground("file", Uri("file", str(folder), {}), FAULTS, shared=True)
    operations = {name: how for name, how in OPERATIONS.items() if name != "kill -9"}
    return World([ground], 2, seed=5, operations=operations)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """The world that most tests use."""
    return world_in(tmp_path)


def go(world: World, count: int) -> list[str]:
    """The first so many operations."""
    return [world.perform(number)[0] for number in range(1, count)]


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([100.0] * 40, True),
        ([float(n) for n in range(40)], False),
        ([100.0, 900.0] * 20, True),
        ([100.0] * 20 + [5000.0] + [100.0] * 19, True),
        ([0.0] * 8 + [100.0] * 32, True),
        ([100.0] * 20 + [111.0] * 20, False),
    ],
    ids=["flat", "rising", "restless", "one peak", "warm-up", "a step up"],
)
def test_a_curve_is_flat_unless_it_rises(values: list[float], flat: bool) -> None:
    """What a warm-up takes, or one moment, is no leak; what is more for good is one."""
    assert Curve("c", "MiB", 2, 0.1, values).target().met == flat


@pytest.mark.nightly(6)
def test_the_seed_decides_what_is_done(world: World, tmp_path: Path) -> None:
    """Another world with the same seed goes the same way, to the same end."""
    other = world_in(tmp_path / "other")
    went = go(world, 40)
    assert go(other, 40) == went
    assert len(set(went)) > 5


@pytest.mark.parametrize("name", ["save", "copy", "prune"])
def test_what_does_nothing_and_says_it_did_is_found_out(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save or copy that stores nothing, a prune that deletes nothing of what it names."""
    if name == "prune":
        real = holdfast.prune
        monkeypatch.setattr(
            "holdfast.prune", lambda *args, **given: real(*args, **given, dry_run=True)
        )
    else:
        monkeypatch.setattr(f"holdfast.{name}", lambda *args, **given: None)
    with pytest.raises(AssertionError, match=r"not|left"):
        go(world, 120)


def test_a_wrong_bit_is_found_out() -> None:
    """What is loaded is held against what was saved under that number, bit for bit."""

    def load() -> dict[str, Any]:
        state = content.__wrapped__(3)
        state["model"]["t0"].view(-1)[0] += 1
        return state

    assert number_of(lambda: content(3)) == 3
    with pytest.raises(AssertionError, match="not what was saved as 3"):
        number_of(load)
