"""The soak finds out checkpoints that are wrong, and quantities that rise."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.soak import World, content, number_of, rise

import holdfast
from holdfast.bench.states import State
from holdfast.drivers.uri import Uri


@pytest.mark.parametrize(
    ("values", "leaks"),
    [
        ([float(n) for n in range(40)], True),
        ([100.0] * 20 + [111.0] * 20, True),
        ([100.0, 900.0] * 20, False),
        ([100.0] * 20 + [5000.0] + [100.0] * 19, False),
        ([0.0] * 8 + [100.0] * 32, False),
    ],
    ids=["rising", "a step up", "restless", "one peak", "warm-up"],
)
def test_a_warm_up_or_a_peak_is_no_leak(values: list[float], leaks: bool) -> None:
    """A leak rises for good."""
    assert (rise(values) > 10) == leaks


@pytest.mark.parametrize("name", ["save", "copy", "prune"])
def test_an_operation_without_effect_is_found_out(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save or copy that stores nothing, and a prune that deletes nothing, break a promise."""
    real = holdfast.prune
    broken = {"prune": lambda *given, **options: real(*given, **options, dry_run=True)}
    monkeypatch.setattr(holdfast, name, broken.get(name, lambda *given, **options: None))
    world = World([Uri("file", str(tmp_path), {})], seed=5)

    with pytest.raises(AssertionError, match="not"):
        list(map(world.perform, range(1, 120)))


def test_a_wrong_bit_is_found_out() -> None:
    """A loaded state is compared with the saved one, bit for bit."""

    def load() -> State:
        state = content(3)
        state["model"]["t0"].view(-1)[0] += 1
        return state

    assert number_of(lambda: content(3)) == 3
    with pytest.raises(AssertionError, match="not what was saved as 3"):
        number_of(load)
