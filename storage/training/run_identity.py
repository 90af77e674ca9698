"""The id of a run, stored in the run's folder. Memory held by keepers belongs to a run id, so a
folder that was emptied does not get its old steps back from memory."""

from __future__ import annotations

import json
import secrets

from ...core.decoded_json import int_in, object_in, str_in
from ...drivers.contract import Driver
from ...errors import DamagedError, ExistsError, NotFoundError, UnsupportedFormatError
from ..arenas.folder import RUN_PATTERN

RUN_KEY = "run.json"
_VERSION = 1


async def run_id(driver: Driver) -> str:
    """Return the id of the run in the folder that ``driver`` is bound to; create one if there is
    none. Concurrent callers all get the same id. Raises StorageError, DamagedError,
    UnsupportedFormatError."""
    known = await known_run_id(driver)
    if known is not None:
        return known
    run = secrets.token_hex(16)
    data = json.dumps({"version": _VERSION, "run": run}).encode()
    try:
        await driver.put(RUN_KEY, data, exclusive=driver.traits.exclusive_is_atomic)
    except ExistsError:  # another process was first
        return _decoded(await driver.get(RUN_KEY), driver)
    return run


async def known_run_id(driver: Driver) -> str | None:
    """Return the id of the run, or None if it has none yet. Raises as :func:`run_id`."""
    try:
        return _decoded(await driver.get(RUN_KEY), driver)
    except NotFoundError:
        return None


def _decoded(data: bytes, driver: Driver) -> str:
    try:
        record = object_in(json.loads(data), "the record of a run")
        version = int_in(record["version"], "its version")
        run = str_in(record["run"], "its id")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(
            "the record of the run cannot be read", uri=driver.uri, key=RUN_KEY
        ) from error
    if version != _VERSION:
        raise UnsupportedFormatError(
            f"the record of the run has version {version}", uri=driver.uri, key=RUN_KEY
        )
    if not RUN_PATTERN.fullmatch(run):
        raise DamagedError("the record of the run has no id", uri=driver.uri, key=RUN_KEY)
    return run
