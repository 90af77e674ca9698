"""What is there after something went wrong: one whole checkpoint; and after the next save nothing
else."""

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

__all__ = ["CLEAN", "check", "check_next_save", "files", "some"]

CLEAN = [
    "data",
    *(f"data/<attempt>{name}" for name in ("", "/0.safetensors", "/fate", "/telemetry.jsonl.gz")),
    "manifest.safetensors",
]
"""What a checkpoint of one rank consists of."""

T = TypeVar("T")


def some(points: Sequence[T], default: int, seed: int) -> list[T]:
    """So many of ``points``, the last among them, evenly spread, beginning where the seed says; all
    with HOLDFAST_TEST_CRASH_POINTS=all, which may also be a number."""
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
    """There is a whole checkpoint, of one of these steps; return which."""
    found = holdfast.load(uri)
    assert found["step"] in allowed
    assert difference(state_of_step(found["step"]), found) is None
    with holdfast.open(uri) as c:
        assert c.verify().ok
    return int(found["step"])


def files(uri: Path) -> list[str]:
    """Everything that is there, folders too; the attempt's name left out."""
    with holdfast.open(uri) as c:
        current = c.attempt
    return sorted(str(p.relative_to(uri)).replace(current, "<attempt>") for p in uri.rglob("*"))


def check_next_save(uri: Path, step: int) -> None:
    """A save goes well, and whatever was left is gone; also what was about to be committed, whose
    grace is over."""
    with pytest.MonkeyPatch.context() as patch:
        after_grace(patch)
        holdfast.save(uri, state_of_step(step))
    check(uri, {step})
    assert files(uri) == CLEAN
