"""The epochs of a run: each start or resume with keepers begins one. The record is stored in the
run's folder, so that it outlives all keepers.

A keeper drops the steps that a resume discarded. But it may have missed the resume: it was stopped
or disconnected, or it received images later from a trainer that had been suspended. So steps in
memory are checked against this record before a run resumes from them.
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
    """Epochs that still matter, ascending, each with the step it resumed from (-1: none)."""

    begun: tuple[tuple[int, int], ...] = ()

    @property
    def newest(self) -> int:
        """The newest epoch, or -1."""
        return self.begun[-1][0] if self.begun else -1

    def with_next(self, epoch: int, chosen: int | None) -> Epochs:
        """Return the record after ``epoch`` begins at step ``chosen`` (None: from nothing)."""
        step = -1 if chosen is None else chosen
        return Epochs((*[one for one in self.begun if one[1] < step], (epoch, step)))

    def has_left(self, generation: GenerationId) -> bool:
        """Return whether a later epoch resumed before this generation's step."""
        return any(
            epoch > generation.epoch and step < generation.step for epoch, step in self.begun
        )

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return json.dumps({"version": _VERSION, "begun": self.begun}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Epochs:
        """Decode the record. Raises DamagedError, UnsupportedFormatError."""
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
    """Read the record of the run in this folder; empty if there is none."""
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
    """Write the record durably. Raises StorageError."""
    await driver.put(EPOCHS_KEY, epochs.encode())
