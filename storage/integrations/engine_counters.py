"""The training counters of a DeepSpeed engine, for trainers that use engines.

DeepSpeed's own checkpoints include them too: its data schedules, monitors and log depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["counters_of", "set_counters"]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def counters_of(engine: Any) -> dict[str, int]:
    """Return the counters by name."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def set_counters(engine: Any, stored: Mapping[str, int]) -> None:
    """Set the counters from ``stored``.

    It is empty if the model was not DeepSpeed's; the engine then keeps its own counters.
    """
    for name in _COUNTERS:
        if name in stored:
            setattr(engine, name, stored[name])
