"""Names of the checkpoint folders in a run's folder, derived from the step."""

from __future__ import annotations

import re

__all__ = ["checkpoint_name", "step_of"]

_NAME = re.compile(r"step-([0-9]{8,18})")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, relative to the run's folder."""
    return f"step-{step:08d}"


def step_of(path: str) -> int | None:
    """Return the step in a name made by :func:`checkpoint_name`; None for any other name."""
    match = _NAME.fullmatch(path)
    if match:
        return int(match[1])
    return None
