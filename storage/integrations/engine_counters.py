"""What an engine of DeepSpeed counts while it trains, for trainers that have engines.

DeepSpeed's own checkpoints keep these numbers too: its schedules of data, its monitors and its log
go by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["counters_of", "set_counters"]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def counters_of(engine: Any) -> dict[str, int]:
    """Its counters, by their names."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def set_counters(engine: Any, stored: Mapping[str, int]) -> None:
    """Go on counting from ``stored``. It is empty where the model was not DeepSpeed's: then the
    engine goes on from its own counters."""
    for name in _COUNTERS:
        if name in stored:
            setattr(engine, name, stored[name])
