"""Reads the telemetry of the checkpoints at and below a URI, for a report.

Scope: reading. What it shows is the subject of :mod:`.findings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.aio import at_most
from ...errors import TelemetryError
from ..format.save_telemetry import SaveTelemetry
from ..runtime.engine import run
from .listing import ListedCheckpoint, list_checkpoints
from .location import Place
from .reader import read_telemetry

__all__ = ["RecordedSave", "recorded_saves"]

_READ = 16
"""Objects that are read at a time."""


@dataclass(frozen=True, slots=True)
class RecordedSave:
    """A checkpoint, and what was recorded of its save. ``problem`` says why nothing is known."""

    checkpoint: ListedCheckpoint
    telemetry: SaveTelemetry | None
    problem: str | None = None


def recorded_saves(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> list[RecordedSave]:
    """All checkpoints at and below ``uri``, in the order of a listing. Raises UriError,
    StorageError; what cannot be read of one checkpoint is its ``problem``."""
    listed = list_checkpoints(uri, storage_options=storage_options)
    return run(_read_all(Place.of(uri, storage_options), listed))


async def _read_all(root: Place, listed: Sequence[ListedCheckpoint]) -> list[RecordedSave]:
    found: dict[str, RecordedSave] = {}

    async def read(checkpoint: ListedCheckpoint) -> None:
        found[checkpoint.path] = await _read(root, checkpoint)

    await at_most(_READ, map(read, listed))
    return [found[checkpoint.path] for checkpoint in listed]


async def _read(root: Place, checkpoint: ListedCheckpoint) -> RecordedSave:
    if checkpoint.problem is not None:
        return RecordedSave(checkpoint, None, checkpoint.problem)
    async with root.opened(checkpoint.path) as driver:
        try:
            telemetry = await read_telemetry(driver, checkpoint.attempt)
        except TelemetryError as error:
            return RecordedSave(checkpoint, None, str(error))
    if telemetry is None:
        return RecordedSave(checkpoint, None, "nothing was recorded of its save")
    return RecordedSave(checkpoint, telemetry)
