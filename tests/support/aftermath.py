"""Check that a failure leaves one whole checkpoint, and that the next save cleans up."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

import holdfast

from .bits import difference
from .inside import after_grace
from .victims import state_of_step

CLEAN = [
    "data",
    *(f"data/<attempt>{name}" for name in ("", "/0.safetensors", "/fate", "/telemetry.jsonl.gz")),
    "manifest.safetensors",
]
"""Files of a one-rank checkpoint."""

T = TypeVar("T")


def some(points: Sequence[T], default: int, seed: int) -> list[T]:
    """Return a given number of ``points``, evenly spread, from a start that depends on the seed.
    The last point is always included. HOLDFAST_TEST_CRASH_POINTS sets the number, or "all"."""
    given = os.environ.get("HOLDFAST_TEST_CRASH_POINTS", str(default))
    most = len(points) if given == "all" else int(given)
    if most >= len(points):
        return list(points)
    step = len(points) / most
    return [
        *(points[int(i * step + seed % 1009 / 1009 * step)] for i in range(most - 1)),
        points[-1],
    ]


def check(uri: Path, allowed: Collection[int]) -> int:
    """Check that there is an intact checkpoint of one of these steps; return its step."""
    found = holdfast.load(uri)
    assert found["step"] in allowed
    assert difference(state_of_step(found["step"]), found) is None
    with holdfast.open(uri) as c:
        assert c.verify().ok
    return int(found["step"])


def files(uri: Path) -> list[str]:
    """List all files and folders, with the attempt's name replaced."""
    with holdfast.open(uri) as c:
        current = c.attempt
    return sorted(str(p.relative_to(uri)).replace(current, "<attempt>") for p in uri.rglob("*"))


def check_next_save(uri: Path, step: int) -> None:
    """Check that a save works and removes all leftovers. That includes uncommitted files whose
    grace period is over."""
    with pytest.MonkeyPatch.context() as patch:
        after_grace(patch)
        holdfast.save(uri, state_of_step(step))
    check(uri, {step})
    assert files(uri) == CLEAN
