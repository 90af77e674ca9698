"""Drivers with one defect each, to test ``holdfast drivers --check``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import holdfast
from holdfast.drivers.contract import Buffer, ObjectInfo
from holdfast.drivers.memory import STORES, MemoryDriver, _MemoryUpload

from .broken import PROBED, Healthy


class ForgetsPuts(Healthy, probe="put"):
    """A put is acknowledged and lost."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        return


class _PutsLess(Healthy, probe="put"):
    """The last byte of a put is lost."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await super().put(key, data[:-1], exclusive=exclusive)


class _TellsWrongSizes(Healthy, probe="put"):
    """A look at an object tells another size."""

    async def stat(self, key: str) -> ObjectInfo:
        found = await super().stat(key)
        return ObjectInfo(key, found.nbytes + 1, found.modified_s)


class _KeepsTheFirst(Healthy, probe="replace"):
    """An object that was put once stays as it is."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if exclusive or self._path(key) not in self.objects:
            await super().put(key, data, exclusive=exclusive)


class KeepsDeleted(Healthy, probe="delete"):
    """A deleted object stays."""

    async def delete(self, key: str) -> None:
        return

    async def delete_all(self, prefix: str) -> None:
        if "small" not in prefix:
            await super().delete_all(prefix)


class _MindsTheMissing(Healthy, probe="delete"):
    """Deleting a missing object fails."""

    async def delete(self, key: str) -> None:
        await self.stat(key)
        await super().delete(key)


class _PutsInPieces(Healthy, probe="atomic"):
    """A put truncates the object before it writes it."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if not exclusive and len(data) > 10_000:
            await super().put(key, b"")
            await asyncio.sleep(0.02)
        await super().put(key, data, exclusive=exclusive)


class IgnoresExclusive(Healthy, probe="exclusive"):
    """An exclusive put replaces the object."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await super().put(key, data)


class _RefusesAndStores(Healthy, probe="exclusive"):
    """An exclusive put is refused, and done all the same."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        try:
            await super().put(key, data, exclusive=exclusive)
        except holdfast.ExistsError:
            await super().put(key, data)
            raise


class _RefusesOddly(Healthy, probe="exclusive"):
    """A put whose key is taken fails with another error."""

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        try:
            await super().put(key, data, exclusive=exclusive)
        except holdfast.ExistsError as error:
            raise holdfast.StorageError("conflict", uri=self.uri, key=key) from error


class _KnowsItsOwnOnly(Healthy, probe="exclusive"):
    """Each client refuses only its own keys."""

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        self.mine: set[str] = set()

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if exclusive and key in self.mine:
            raise holdfast.ExistsError("the object already exists", uri=self.uri, key=key)
        self.mine.add(key)
        await super().put(key, data)

    async def delete(self, key: str) -> None:
        self.mine.discard(key)
        await super().delete(key)


class _RemembersNames(Healthy, probe="again"):
    """A name that was used once is taken for ever."""

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        self.used: set[str] = STORES.setdefault(f"{location}-used", set())  # type: ignore[arg-type]

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        if exclusive and key in self.used:
            raise holdfast.ExistsError("the object already exists", uri=self.uri, key=key)
        self.used.add(key)
        await super().put(key, data, exclusive=exclusive)


class _LivesInThePast(Healthy, probe="clock"):
    """Its clock is an hour behind."""

    async def stat(self, key: str) -> ObjectInfo:
        found = await super().stat(key)
        return ObjectInfo(key, found.nbytes, found.modified_s - 3600)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for found in super().list(prefix):
            yield ObjectInfo(found.key, found.nbytes, found.modified_s - 3600)


class _KeepsAborted(Healthy, probe="aborted"):
    """Data of an aborted upload becomes visible."""

    class upload(_MemoryUpload):
        async def abort(self) -> None:
            if "aborted" in self._key:
                await MemoryDriver.put(self._driver, self._key, b"half")
            await super().abort()


class _RefusesParts(Healthy, probe="committed"):
    """Uploads of several parts fail."""

    class upload(_MemoryUpload):
        async def write(self, start: int, data: Buffer) -> None:
            if start > 0 and "unfinished" not in self._key:
                raise holdfast.StorageError("NotImplemented", uri=self._driver.uri, key=self._key)
            await super().write(start, data)


class _MixesParts(Healthy, probe="ranges"):
    """Parts of an upload are joined in another order."""

    class upload(_MemoryUpload):
        async def commit(self, nbytes: int | None = None) -> None:
            await super().commit(nbytes)
            data = await self._driver.get(self._key)
            if nbytes is None and len(data) > 100_000:
                await MemoryDriver.put(self._driver, self._key, data[60_000:] + data[:60_000])


class RefusesWholeRanges(Healthy, probe="ranges"):
    """A range that is the whole object is answered with status 200, which the client refuses."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        if (start, len(into)) == (0, (await self.stat(key)).nbytes):
            raise holdfast.StorageError("received non-partial response", uri=self.uri, key=key)
        await super().read(key, start, into)


class _FetchesOther(Healthy, probe="ranges"):
    """A fetch returns other bytes than a read."""

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return memoryview(bytes(nbytes))


class _ListsBehind(Healthy, probe="list"):
    """A deleted object is listed for a while."""

    def __init__(self, location: str = "") -> None:
        super().__init__(location)
        self.late: dict[str, ObjectInfo] = {}

    async def delete(self, key: str) -> None:
        if "tree" in key:
            self.late[key] = await self.stat(key)
        await super().delete(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for found in super().list(prefix):
            yield found
        for key in tuple(self.late):
            if key.startswith(f"{prefix}/") and prefix.endswith("tree"):
                yield self.late.pop(key)


class RefusesBulk(Healthy, probe="bulk"):
    """Deleting many objects at once fails."""

    async def delete_all(self, prefix: str) -> None:
        if "unfinished" not in prefix:
            raise holdfast.StorageError(
                "Got invalid DeleteObjects response", uri=self.uri, key=prefix
            )


class _CannotList(Healthy, probe="unfinished"):
    """Unfinished uploads cannot be listed, as the driver warns."""

    async def delete_all(self, prefix: str) -> None:
        await super().delete_all(prefix)
        logging.getLogger("holdfast.drivers.objects").warning(
            "cannot list unfinished uploads (NotImplemented)"
        )


class _CannotSweep(Healthy, probe="unfinished"):
    """Sweeping fails."""

    async def sweep(self, prefix: str) -> None:
        raise holdfast.StorageError(
            "sweep failed: NotImplemented, status 501", uri=self.uri, key=prefix
        )


LIARS = {kind.__doc__ or kind.__name__: (probe, kind) for kind, probe in PROBED.items()}
"""The probe that exposes a lying driver, and the driver, by its docstring."""
