"""Storage of a save's telemetry, put after the commit, in parallel with settling the attempt.
Nothing depends on it. It lies in the attempt's folder, so it is deleted with the attempt; one that
arrives too late is collected like any file of a dead attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...drivers.contract import Driver
from ...errors import NotFoundError, TelemetryError
from ..format.save_telemetry import TELEMETRY_NBYTES_MAX, telemetry_key
from . import limits

_log = logging.getLogger(__name__)


async def put_telemetry(
    driver: Driver, attempt: str, make: Callable[[], Awaitable[bytes | None]]
) -> None:
    """Put the result of ``make``, if any, for a committed ``attempt``. Logs errors."""
    try:
        async with asyncio.timeout(limits.TELEMETRY_S):
            data = await make()
            if data is not None:
                await driver.put(telemetry_key(attempt), data)
    except Exception as error:
        _log.warning("the telemetry of a save to %s is not stored: %r", driver.uri, error)


async def get_telemetry(driver: Driver, attempt: str) -> bytes | None:
    """Return the telemetry of ``attempt``, or None. Raises TelemetryError and StorageError."""
    key = telemetry_key(attempt)
    try:
        nbytes = (await driver.stat(key)).nbytes
        if nbytes > TELEMETRY_NBYTES_MAX:
            raise TelemetryError(
                f"the telemetry of this save has {nbytes:,} bytes", uri=driver.uri, key=key
            )
        return await driver.get(key)
    except NotFoundError:
        return None
