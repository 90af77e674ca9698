"""Leases: a version that is being read is not deleted."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from ...drivers.contract import Driver
from ...errors import StorageError
from .channel import LEASE_S, encoded_lease, lease_key, newest_after, read_head


class Lease:
    """The lease of one subscriber, on one version at a time. ``sequence``: of that version, 0 for
    none."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._key = lease_key(secrets.token_hex(8))
        self.sequence = 0

    async def take(self, sequence: int) -> int:
        """Put the lease of a version; return it, or a newer one if it is not offered any more."""
        while True:
            await self._driver.put(self._key, encoded_lease(sequence))
            self.sequence = sequence
            head = await read_head(self._driver)
            if sequence >= head.offered:
                return sequence
            sequence = await newest_after(self._driver, head.sequence)

    async def renew(self) -> None:
        """Renew the lease until cancelled."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            with suppress(StorageError):
                await self._driver.put(self._key, encoded_lease(self.sequence))

    async def release(self) -> None:
        """Delete the lease. A lease that cannot be deleted expires."""
        self.sequence = 0
        with suppress(StorageError):
            await self._driver.delete(self._key)
