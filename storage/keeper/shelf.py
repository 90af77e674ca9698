"""What a keeper shows to other hosts: objects in memory, by keys like those of a storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Content", "Item", "Shelf"]


@dataclass(frozen=True, slots=True)
class Item:
    """One object. ``key``: as below a run's folder, after the run's name:
    ``<run>/step-00000500/manifest.safetensors``. ``modified_s``: since the epoch."""

    key: str
    nbytes: int
    modified_s: float


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """The bytes of an object, where they lie."""

    view: memoryview
    modified_s: float


class Shelf(Protocol):
    """For reading only. All methods are called on the event loop of the server, so none of them
    waits for anything."""

    def listing(self) -> Sequence[Item]:
        """Every object, in any order."""

    def open(self, key: str) -> AbstractContextManager[Content]:
        """An object. Until the end of the body its memory is not used for anything else. Raises
        NotFoundError on entry, or at the call."""

    def status(self) -> Mapping[str, object]:
        """What the keeper does, as JSON has it. Without secrets."""

    def metrics(self) -> str:
        """Figures, in Prometheus' text format."""
