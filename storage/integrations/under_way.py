"""Asynchronous saves of a trainer that goes on, and deletes what later checkpoints replace."""

from __future__ import annotations

from collections.abc import Callable

from ..operations.handle import SaveHandle

__all__ = ["SavesUnderWay"]


class SavesUnderWay:
    """Saves of a rank that have begun, and what is to be done once they have succeeded."""

    def __init__(self) -> None:
        self._saves: list[SaveHandle] = []
        self._afterwards: list[Callable[[], None]] = []

    def add(self, save: SaveHandle) -> None:
        """Another save has begun."""
        self._saves.append(save)

    def afterwards(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the saves under way have succeeded: at the next wait for them, or at
        once where there are none."""
        self._afterwards.append(act)
        if not self._saves:
            self.wait()

    def wait(self) -> None:
        """Return when the saves have ended, and what was to be done afterwards is done. Raises what
        the first save that failed raised; then nothing is done."""
        saves = self._saves
        afterwards = self._afterwards
        self._saves = []
        self._afterwards = []
        for save in saves:
            save.wait()
        for act in afterwards:
            act()
