"""What a run's checkpoints are called: folders below the run's, by their steps."""

from __future__ import annotations

import re

__all__ = ["checkpoint_name", "step_of"]

_NAME = re.compile(r"step-([0-9]{8,18})")


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint, below the run's."""
    return f"step-{step:08d}"


def step_of(path: str) -> int | None:
    """The step of a checkpoint's folder; None for what was not named by :func:`checkpoint_name`."""
    match = _NAME.fullmatch(path)
    if match:
        return int(match[1])
    return None
