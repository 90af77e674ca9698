"""Interface to the objects that a keeper serves to other hosts, by keys as in storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Catalog", "Content", "Item"]


@dataclass(frozen=True, slots=True)
class Item:
    """One object. ``key``: starts with the name of the run, as in
    ``<run>/step-00000500/manifest.safetensors``. ``modified_s``: seconds since the epoch."""

    key: str
    nbytes: int
    modified_s: float


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """The bytes of an object, not copied."""

    view: memoryview
    modified_s: float


class Catalog(Protocol):
    """Read-only objects in memory. All methods are called on the event loop of the server, and must
    not block."""

    def listing(self) -> Sequence[Item]:
        """Return all objects, in any order."""

    def open(self, key: str) -> AbstractContextManager[Content]:
        """Pin an object for the body. Raises NotFoundError, at the call or on entry."""

    def status(self) -> Mapping[str, object]:
        """Return the status of the keeper as a JSON object, without secrets."""

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""
