"""The epochs of a run: each start or resume with keepers begins one. The record is stored in the
run's folder, so that it outlives all keepers.

A keeper drops the steps that a resume discarded. But it may have missed the resume: it was stopped
or disconnected, or it received images later from a trainer that had been suspended. So steps in
memory are checked against this record before a run resumes from them.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from ...core.decoded_json import int_in, object_in, rows_in
from ...drivers.contract import Driver
from ...errors import CoordinationError, DamagedError, ExistsError, UnsupportedFormatError
from ..arenas.label import GenerationId

EPOCHS_FOLDER = "epochs"
"""Folder of the records, one for each of the newest epochs, named by its number."""
_KEPT = 2
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Epochs:
    """Epochs that still matter, ascending, each with the step it resumed from (-1: none).
    ``repeats``: number of epochs since one last resumed from a newer step than all earlier ones,
    including that one; ``span``: the lowest and the highest step that these resumed from."""

    begun: tuple[tuple[int, int], ...] = ()
    repeats: int = 0
    span: tuple[int, int] = (-1, -1)

    @property
    def newest(self) -> int:
        """The newest epoch, or -1."""
        return self.begun[-1][0] if self.begun else -1

    def with_next(
        self, epoch: int, chosen: int | None, *, again: bool = False, asked: bool = False
    ) -> Epochs:
        """Return the record after ``epoch`` begins at step ``chosen`` (None: from nothing).
        ``again``: the job has not started anew, but begins a second epoch. ``asked``: the user has
        asked for that step."""
        step = -1 if chosen is None else chosen
        begun = (*[one for one in self.begun if one[1] < step], (epoch, step))
        lowest, highest = self.span
        if again:
            return Epochs(begun, self.repeats, self.span)
        if asked or not self.repeats or step > highest:
            return Epochs(begun, 1, (step, step))
        return Epochs(begun, self.repeats + 1, (min(lowest, step), highest))

    def go_back_before(self, tries: int) -> int | None:
        """Return the step before which the next epoch should resume, since ``tries`` epochs, or a
        multiple, have brought no newer step; None if it should resume from the newest."""
        lowest, _ = self.span
        is_due = self.repeats > 0 and self.repeats % tries == 0
        return lowest if is_due and lowest >= 0 else None

    def has_left(self, generation: GenerationId) -> bool:
        """Return whether a later epoch resumed before this generation's step."""
        return any(
            epoch > generation.epoch and step < generation.step for epoch, step in self.begun
        )

    def encode(self, job: str) -> bytes:
        """Encode the record as JSON. ``job``: a unique name of the job that writes it."""
        repeats = [self.repeats, *self.span]
        record = {"version": _VERSION, "job": job, "begun": self.begun, "repeats": repeats}
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> Epochs:
        """Decode the record. Raises DamagedError, UnsupportedFormatError."""
        try:
            record = object_in(json.loads(data), "the record of epochs")
            version = int_in(record["version"], "its version")
            rows = rows_in(record["begun"], 2, "epochs")
            begun = tuple((int_in(a, "an epoch"), int_in(b, "a step")) for a, b in rows)
            found = rows_in([record.get("repeats", [0, -1, -1])], 3, "repeats")
            repeats, lowest, highest = (int_in(number, "repeats") for number in found[0])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(f"the record of epochs cannot be read: {error}") from error
        if version != _VERSION:
            raise UnsupportedFormatError(f"the record of epochs has version {version}")
        return cls(begun, repeats, (lowest, highest))


async def read_epochs(driver: Driver) -> Epochs:
    """Read the newest record of the run in this folder; empty if there is none."""
    keys = await _keys(driver)
    if not keys:
        return Epochs()
    try:
        return Epochs.decode(await driver.get(keys[-1]))
    except (DamagedError, UnsupportedFormatError) as error:
        error.uri = driver.uri
        error.key = keys[-1]
        raise


async def put_epochs(driver: Driver, epochs: Epochs) -> None:
    """Write the record of a new epoch durably. Of several jobs that begin one at the same time,
    one succeeds; the others raise CoordinationError. Also raises StorageError."""
    key = f"{EPOCHS_FOLDER}/{epochs.newest:08d}.json"
    data = epochs.encode(secrets.token_hex(8))
    try:
        await driver.put(key, data, exclusive=True)
        is_ours = True
    except ExistsError:
        is_ours = await driver.get(key) == data  # a repeated request finds its own result
    keys = await _keys(driver)
    if not is_ours or keys[-1] != key:
        raise CoordinationError(
            f"another job has begun epoch {epochs.newest} of this run at the same time",
            uri=driver.uri,
            key=key,
            advice="One job at a time can use the folder of a run. Stop one of the two.",
        )
    for old in keys[:-_KEPT]:
        await driver.delete(old)


async def _keys(driver: Driver) -> list[str]:
    return sorted([info.key async for info in driver.list(EPOCHS_FOLDER)])
