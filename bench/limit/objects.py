"""The limit of an object store: obstore alone, with one object in parts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...drivers.objects.options import Requests
from ...drivers.uri import Uri
from .client import bare_driver, ranges

PARTS_NBYTES = (16 << 20, 8 << 20)
CONCURRENCIES = (8, 16, 4)


@dataclass(frozen=True)
class Bare:
    """One object in parts of random bytes, without a format. Connected as our driver is, so both
    send and sign alike."""

    uri: Uri
    nbytes: int
    part_nbytes: int = 16 << 20
    concurrency: int = 16

    @property
    def name(self) -> str:
        """Name, such as "obstore, 16 MiB × 8"."""
        return f"obstore, {self.part_nbytes >> 20} MiB × {self.concurrency}"

    @property
    def stored(self) -> object:
        """See :class:`.client.Setting`."""
        return self.uri

    def write(self) -> None:
        """Store the object."""
        asyncio.run(self._write())

    async def _write(self) -> None:
        import obstore

        data = np.random.default_rng(0).bytes(self.part_nbytes)

        async def parts() -> AsyncIterator[bytes]:
            for start, stop in ranges(self.nbytes, self.part_nbytes):
                yield data[: stop - start]

        store, path = self._connected()
        how = {"chunk_size": self.part_nbytes, "max_concurrency": self.concurrency}
        await obstore.put_async(store, path, parts(), use_multipart=True, **how)  # type: ignore[arg-type]

    def read(self) -> None:
        """Get the whole object, in ranges."""
        asyncio.run(self._read())

    async def _read(self) -> None:
        import obstore

        store, path = self._connected()
        left = ranges(self.nbytes, self.part_nbytes)

        async def reader() -> None:
            for start, stop in left:
                await obstore.get_range_async(store, path, start=start, end=stop)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(reader())

    def remove(self) -> None:
        """Delete the object."""
        import obstore

        store, path = self._connected()
        try:
            obstore.delete(store, path)
        except FileNotFoundError:
            return

    def _connected(self) -> tuple[Any, str]:
        """Return obstore's store, and the object's name in it."""
        driver = bare_driver(self.uri)
        return driver._connect(Requests.SENDING), driver._root


def settings(uri: Uri, nbytes: int) -> list[Bare]:
    """Return the settings to try, for writes and reads."""
    return [
        Bare(uri, nbytes, part_nbytes, concurrency)
        for part_nbytes, concurrency in itertools.product(PARTS_NBYTES, CONCURRENCIES)
    ]
