"""Storage in memory that requires an order of upload parts, and records how they arrive."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from holdfast.drivers.contract import Buffer, PartOrder, Upload
from holdfast.drivers.memory import MemoryDriver


class Ordered(MemoryDriver):
    """Records its uploads, and the number of simultaneous writes."""

    def __init__(self, order: PartOrder, location: str = "", streams: int = 1) -> None:
        super().__init__(location)
        self.traits = replace(self.traits, part_order=order, streams=streams)
        self.uploads: list[RecordedUpload] = []
        self.most_writing = 0

    async def create(self, key: str, nbytes: int) -> Upload:
        upload = RecordedUpload(self, await super().create(key, nbytes))
        self.uploads.append(upload)
        return upload


class RecordedUpload(Upload):
    """An upload that takes time, and records where writes begin and how many overlap."""

    def __init__(self, driver: Ordered, inner: Upload) -> None:
        self.driver, self.inner = driver, inner
        self.begun: list[int] = []
        self.running = self.most = 0
        self.open = True

    async def write(self, start: int, data: Buffer) -> None:
        self.begun.append(start)
        self.running += 1
        self.most = max(self.most, self.running)
        writing = sum(upload.running > 0 for upload in self.driver.uploads)
        self.driver.most_writing = max(self.driver.most_writing, writing)
        await asyncio.sleep(0.05)
        await self.inner.write(start, data)
        self.running -= 1

    async def commit(self, nbytes: int | None = None) -> None:
        await self.inner.commit(nbytes)
        self.open = False

    async def abort(self) -> None:
        await self.inner.abort()
        self.open = False
