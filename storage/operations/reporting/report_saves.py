"""Reads the telemetry of the checkpoints at and below a URI, for a report. :mod:`.findings`
interprets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ....core.aio import at_most
from ....errors import TelemetryError
from ...format.save_telemetry import SaveTelemetry
from ...runtime.engine import run
from ..location import Place, UriLike
from ..maintenance.listing import ListedCheckpoint, list_checkpoints
from ..reading.reader import read_telemetry

_READ = 16
"""Objects read at the same time."""


@dataclass(frozen=True, slots=True)
class RecordedSave:
    """A checkpoint and the telemetry of its save. ``problem``: why there is none."""

    checkpoint: ListedCheckpoint
    telemetry: SaveTelemetry | None
    problem: str | None = None


def recorded_saves(
    uri: UriLike, *, storage_options: Mapping[str, object] | None = None
) -> list[RecordedSave]:
    """Return all checkpoints at and below ``uri``, in the order of a listing. Raises UriError and
    StorageError; an unreadable checkpoint gets a ``problem``."""
    listed = list_checkpoints(uri, storage_options=storage_options)
    read = partial(_read, Place.of(uri, storage_options))
    return run(at_most(_READ, map(read, listed)))


async def _read(root: Place, checkpoint: ListedCheckpoint) -> RecordedSave:
    if checkpoint.problem is not None:
        return RecordedSave(checkpoint, None, checkpoint.problem)
    async with root.opened(checkpoint.path) as driver:
        try:
            telemetry = await read_telemetry(driver, checkpoint.attempt)
        except TelemetryError as error:
            return RecordedSave(checkpoint, None, str(error))
    if telemetry is None:
        return RecordedSave(checkpoint, None, "its save recorded no telemetry")
    return RecordedSave(checkpoint, telemetry)
