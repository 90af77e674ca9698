"""One rank's image on its way to storage: by the saver, or by threads of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace

from ....drivers.contract import Driver
from ....errors import StorageError
from ...format.manifest import image_key
from ...pipeline.base import Borrowing, ChosenBase
from ...pipeline.borrowing import BaseImage
from ...pipeline.capture import TensorChunks
from ...pipeline.image_writer import ImageWriter, WrittenImage
from ...ranks.team import Team
from ...state.capture.unwritten import Unwritten
from ...state.plan import SavePlan
from ..rounds import Begun
from .save_job import SaveJob
from .saver_save import SaverSave, Will


class ImageSave:
    """Writes the image of ``plan`` for the attempt that ``beginning`` returns. ``borrowing``: its
    use of a base; ``unwritten``: memory without a write since the save before."""

    def __init__(
        self,
        driver: Driver,
        team: Team,
        job: SaveJob,
        plan: SavePlan,
        beginning: asyncio.Future[Begun],
    ) -> None:
        self._driver = driver
        self._team = team
        self._job = job
        self._plan = plan
        self._beginning = beginning
        self.borrowing = Borrowing(job.base, ChosenBase())
        self.unwritten = Unwritten() if job.lazy is None else job.lazy.unwritten

    async def write(self, will: Will, until_ended: AsyncExitStack) -> WrittenImage:
        """Capture and write the image; it is durable on return. ``will``, ``until_ended``: see
        :meth:`.saver_save.SaverSave.write`. Raises as
        :class:`~...pipeline.image_writer.ImageWriter` does, and as another rank that has failed
        earlier."""
        by_saver = await SaverSave.of(self._job, self._driver, self._plan, self._team)
        writing: Awaitable[WrittenImage]
        if by_saver is None:
            writing = self._by_threads()
        else:
            writing = by_saver.write(self._driver, self._begin, will, until_ended)
        try:
            written = await writing
        except StorageError as error:
            # A leader that has learned of a failure removes the attempt even while other ranks are
            # still writing to it.
            first = await self._team.failure() if has_begun(self._beginning) else None
            if first is not None:
                raise first from error
            raise
        if by_saver is not None:
            self.borrowing = by_saver.borrowing
        return written

    async def _by_threads(self) -> WrittenImage:
        job, plan = self._job, self._plan
        async with AsyncExitStack() as opened:
            chunks = TensorChunks(plan.layout, plan.source)

            async def base() -> BaseImage | None:
                chosen = (await asyncio.shield(self._beginning)).base
                self.borrowing = borrowing = Borrowing(job.base, chosen)
                rank, layout = self._team.rank, plan.layout
                found = await borrowing.image(self._driver, rank, layout, opened)
                if found is not None and self.unwritten.since(borrowing.choice.attempt):
                    found.known = chunks.known
                return found

            callbacks = replace(job.callbacks, moved=self._team.report_progress)
            writer = ImageWriter(
                *(self._driver, plan.layout, chunks, job.budget_nbytes, callbacks, job.compression),
                base=None if job.base is None else base,
            )
            job.publish_with(writer)
            # Not behind an earlier save: the trainer would wait for its writes.
            writer.awaits_base = self.unwritten.may_know and job.after is None
            return await writer.write(self._key)

    async def _begin(self) -> Begun:
        if self._job.after is not None:
            await self._team.progress_with(asyncio.wrap_future(self._job.after))
        return await asyncio.shield(self._beginning)

    async def _key(self) -> str:
        attempt = (await self._begin()).attempt
        return image_key(attempt, self._team.rank, self._job.packing)


def has_begun(beginning: asyncio.Future[Begun]) -> bool:
    """Return whether the attempt has begun."""
    return beginning.done() and not beginning.cancelled() and beginning.exception() is None
