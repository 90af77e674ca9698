"""The epochs of a run: each time training begins or goes on with keepers, and from which step. The
record of it is in the run's folder, so that it outlives all keepers.

A keeper drops what a resume did not go on from. But it may not have been there: it was stopped, or
cut off, or has got images from a trainer that slept through it. So what is in memory is held
against this record before a run goes on from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ...core.decoded_json import int_in, object_in, rows_in
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError, UnsupportedFormatError
from ..arenas.label import GenerationId

__all__ = ["EPOCHS_KEY", "Epochs", "put_epochs", "read_epochs"]

EPOCHS_KEY = "epochs.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Epochs:
    """``begun``: epochs, each with the step that it went on from, -1 for none; ascending. An
    epoch counts for nothing, and is left out, once a later one has gone back as far."""

    begun: tuple[tuple[int, int], ...] = ()

    @property
    def newest(self) -> int:
        """-1 where there is none."""
        return self.begun[-1][0] if self.begun else -1

    def with_next(self, epoch: int, chosen: int | None) -> Epochs:
        """This record, when ``epoch`` has begun at step ``chosen``."""
        step = -1 if chosen is None else chosen
        return Epochs((*[one for one in self.begun if one[1] < step], (epoch, step)))

    def has_left(self, generation: GenerationId) -> bool:
        """Whether a later epoch went on from before that generation: it is on a line that was
        left."""
        return any(
            epoch > generation.epoch and step < generation.step for epoch, step in self.begun
        )

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps({"version": _VERSION, "begun": self.begun}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Epochs:
        """The inverse. Raises DamagedError, UnsupportedFormatError."""
        try:
            record = object_in(json.loads(data), "the record of epochs")
            version = int_in(record["version"], "its version")
            rows = rows_in(record["begun"], 2, "epochs")
            begun = tuple((int_in(a, "an epoch"), int_in(b, "a step")) for a, b in rows)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(f"the record of epochs cannot be read: {error}") from error
        if version != _VERSION:
            raise UnsupportedFormatError(f"the record of epochs has version {version}")
        return cls(begun)


async def read_epochs(driver: Driver) -> Epochs:
    """The record of the run whose folder ``driver`` is bound to. Raises StorageError, DamagedError,
    UnsupportedFormatError."""
    try:
        data = await driver.get(EPOCHS_KEY)
    except NotFoundError:
        return Epochs()
    try:
        return Epochs.decode(data)
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri = driver.uri
        error.key = EPOCHS_KEY
        raise


async def put_epochs(driver: Driver, epochs: Epochs) -> None:
    """Record it, durably. Raises StorageError."""
    await driver.put(EPOCHS_KEY, epochs.encode())
