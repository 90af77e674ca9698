"""Asynchronous saves of a trainer, and the deletion of checkpoints that they replace."""

from __future__ import annotations

from collections.abc import Callable

from ..operations.saving.handle import SaveHandle

__all__ = ["PendingSaves"]


class PendingSaves:
    """The saves in flight on a rank, and actions to run once they have succeeded."""

    def __init__(self) -> None:
        self._saves: list[SaveHandle] = []
        self._afterwards: list[Callable[[], None]] = []

    def add(self, save: SaveHandle) -> None:
        """Add a save in flight."""
        self._saves.append(save)

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the saves in flight have succeeded: in the next wait(), or now if there
        are none.
        """
        self._afterwards.append(act)
        if not self._saves:
            self.wait()

    def wait(self) -> None:
        """Wait for the saves in flight, then run the actions.

        Raises the error of the first failed save; then no action runs.
        """
        saves = self._saves
        afterwards = self._afterwards
        self._saves = []
        self._afterwards = []
        for save in saves:
            save.wait()
        for act in afterwards:
            act()
