"""Runs whose checkpoints say which step and which branch they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import holdfast

__all__ = ["resumed", "run_of", "state", "there"]


def state(step: int, mark: float = 0.0) -> dict[str, Any]:
    """A state that says which step it is of; ``mark`` tells branches apart."""
    return {"x": torch.full((1000,), step + mark), "step": step}


def run_of(uri: str | Path, *steps: int, mark: float = 0.0, **options: Any) -> None:
    """Save these steps."""
    with holdfast.Checkpointer(uri, when_busy="wait", grace_s=None, **options) as ckpt:
        for step in steps:
            ckpt.save(step, state(step, mark))


def there(uri: str | Path) -> tuple[list[int | None], list[int | None]]:
    """The steps that lead to where training is, and those that are abandoned."""
    listed = holdfast.list_checkpoints(uri)
    return [c.step for c in listed if not c.abandoned], [c.step for c in listed if c.abandoned]


def resumed(uri: str | Path, **back: Any) -> tuple[int, float]:
    """What a new process goes on from, and the value that it finds there."""
    into = state(0)
    with holdfast.Checkpointer(uri, grace_s=None) as ckpt:
        step = ckpt.resume(into, **back)
    assert into["step"] == step
    return step, float(into["x"].unique())
