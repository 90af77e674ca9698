"""Dispatches the commands of ``holdfast keeper``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ..commands import complain

__all__ = ["run"]


def run(command: str, **arguments: Any) -> int:
    """Run ``command`` with its ``arguments``, and return the exit status."""
    if command == "periods":
        from .periods import periods

        return periods(**arguments)
    if command == "demo":
        return _demo(**arguments)
    from . import processes

    commands: dict[str, Callable[..., int]] = {
        "run": processes.run,
        "status": processes.status,
        "stop": processes.stop,
    }
    return commands[command](**arguments)


def _demo(**arguments: Any) -> int:
    if not (find_spec("aiohttp") and find_spec("rich")):
        complain("the demo needs aiohttp and rich: pip install aiohttp rich")
        return 2
    from ..demo.keepers import main

    return main(**arguments)
