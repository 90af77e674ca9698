"""Runs the command of ``holdfast keeper`` that was asked for."""

from __future__ import annotations

from typing import Any

__all__ = ["run"]


def run(command: str, **arguments: Any) -> int:
    """Run ``command`` with its ``arguments``; the exit status."""
    from .periods import periods

    return {"periods": periods}[command](**arguments)
