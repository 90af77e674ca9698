"""Runs the command of ``holdfast keeper`` that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["run"]


def run(command: str, **arguments: Any) -> int:
    """Run ``command`` with its ``arguments``; the exit status."""
    if command == "periods":
        from .periods import periods

        return periods(**arguments)
    from . import processes

    commands: dict[str, Callable[..., int]] = {
        "run": processes.run,
        "status": processes.status,
        "stop": processes.stop,
    }
    return commands[command](**arguments)
