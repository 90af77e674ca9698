"""A save by the saver, a process of this trainer: capture the image into shared memory; the saver
hashes and writes it, and commits it if the trainer dies.

Threads in this process do the same where the saver cannot: without memory for the whole image, for
storage that lives in this process, or if no process can be started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import astuple, replace
from functools import cache
from typing import TypeAlias

from ....core.spans import current
from ....drivers.contract import Driver
from ....errors import SaveError
from ...arenas.memory import Memory
from ...format.manifest import image_key
from ...pipeline.base import Borrowing, ChosenBase
from ...pipeline.capture import TensorChunks, capture_into
from ...pipeline.chunks import chunks_to_write
from ...pipeline.image_writer import Callbacks, WrittenImage
from ...pipeline.memory_writer import BUDGET_NBYTES, write_memory
from ...ranks.team import Team
from ...runtime.engine import offload
from ...saver import client
from ...saver.image_memory import give_memory, take_memory
from ...saver.messages import Moved, Write, Wrote
from ...saver.promises import keep_promise
from ...state.pinned import pin
from ...state.plan import SavePlan
from ..rounds import Begun
from .save_job import SaveJob

NBYTES_MIN = 32 << 20
"""Smaller images are written by threads: they would not gain from another process."""

_KNOWN_SHARE_MAX = 0.5
"""Share of an image that is known to be unchanged above which threads write the rest."""

_log = logging.getLogger(__name__)


Will: TypeAlias = Callable[[], tuple[str, bytes]]
"""Returns the branch and the commit record of a save whose attempt has begun."""


class SaverSave:
    """One image, captured into ``memory`` and written by the saver."""

    def __init__(
        self,
        job: SaveJob,
        plan: SavePlan,
        team: Team,
        place: tuple[str, str, Mapping[str, str]],
        memory: Memory,
    ) -> None:
        """``place``: the destination, from :meth:`.keeper_request.Storage.place`."""
        self._place = place
        self._job = job
        self._plan = plan
        self._rank, self._world = team.rank, team.world
        self._moved = team.report_progress
        self._memory = memory
        self.borrowing = Borrowing(job.base, ChosenBase())

    @classmethod
    async def of(cls, job: SaveJob, driver: Driver, plan: SavePlan, team: Team) -> SaverSave | None:
        """Return a save by the saver, or None if threads have to do it."""
        if job.storage is None or job.publication is not None:
            return None
        nbytes = plan.layout.nbytes
        fits = job.budget_nbytes is None or nbytes <= job.budget_nbytes
        if not fits or plan.layout.hashed_end < NBYTES_MIN or not chunks_to_write(plan.layout):
            return None
        if driver.traits.in_process or not client.is_wanted() or _is_for_threads(job, plan):
            return None
        try:
            place = job.storage().place()
        except SaveError:  # these options cannot be sent to another process
            return None
        memory = await offload(take_memory, nbytes, pin)
        if memory is None:
            job.budget_nbytes = BUDGET_NBYTES
            return None
        return cls(job, plan, team, place, memory)

    async def write(
        self,
        driver: Driver,
        begin: Callable[[], Awaitable[Begun]],
        will: Will,
        until_ended: AsyncExitStack,
    ) -> WrittenImage:
        """Capture the image, and have it written once ``begin()`` has returned. The saver commits
        it if this process dies before ``until_ended`` is closed, which also ends the use of the
        memory. Raises the errors of :class:`~...pipeline.image_writer.ImageWriter`."""
        until_ended.callback(give_memory, self._memory)
        await self._capture()
        begun = await begin()
        self.borrowing = Borrowing(self._job.base, begun.base)
        key = image_key(begun.attempt, self._rank, self._job.packing)
        request = await offload(self._request, begun, key, current() is not None, *will())
        progress = _Progress(replace(self._job.callbacks, moved=self._moved))
        while (saver := await client.running()) is not None:
            writing = saver.writing(request, self._memory, progress.moved)
            try:
                answer = await until_ended.enter_async_context(writing)
            except client.SaverLost as error:
                _log.warning("an image is written once more: %s", error)
                continue
            if isinstance(answer, Wrote):
                progress.end()
                recorder = current()
                if recorder is not None and answer.summary is not None:
                    recorder.add(answer.summary)
                self.borrowing.uri, self.borrowing.why_whole = answer.base, answer.why_whole
                return answer.image
            if not answer.unopened:
                answer.failure.raise_alike()
            _log_unopened(driver.uri, answer.failure.message)
            break
        return await self._write_here(driver, key)

    async def _capture(self) -> None:
        """Copy the image into memory, while the saver starts."""
        starting = asyncio.ensure_future(client.running())
        try:
            plan, callbacks = self._plan, self._job.callbacks
            chunks = TensorChunks(plan.layout, plan.source)
            beside = not self._job.waits
            is_fresh = not self._memory.is_populated
            try:
                await capture_into(self._memory, plan.layout, chunks, self._moved, beside=beside)
            finally:
                if is_fresh:
                    await offload(keep_promise)
            callbacks.captured()
        finally:
            await starting

    def _request(self, begun: Begun, key: str, records: bool, branch: str, record: bytes) -> Write:
        job, plan, base = self._job, self._plan, self._job.base
        layout = plan.layout
        return Write(
            *(*self._place, key, self._rank, self._world),
            *(self._memory.nbytes, layout.nbytes, layout.hashed_end),
            *(layout.chunk_nbytes, layout.block_nbytes),
            compression=job.compression or "",
            records=records,
            attempt=begun.attempt,
            step=job.step,
            created_s=job.created_s,
            draft=job.draft(plan, self._rank),
            record=record,
            branch=branch,
            overwrite=job.overwrite,
            base="" if base is None else base.folder,
            choice=begun.base,
            limits=() if base is None else astuple(base.limits),
        )

    async def _write_here(self, driver: Driver, key: str) -> WrittenImage:
        job, layout = self._job, self._plan.layout
        callbacks = Callbacks(lambda: None, job.callbacks.sealed, self._moved, job.callbacks.wrote)
        return await write_memory(
            *(driver, key, layout, self._memory, job.compression),
            callbacks=callbacks,
            borrower=(self.borrowing, self._rank),
        )


def _is_for_threads(job: SaveJob, plan: SavePlan) -> bool:
    """Return whether this incremental save is one for threads of this process: only it knows that
    most bytes have not changed, so that nobody has to copy or hash them."""
    if job.base is None:
        return False
    if not job.base.folder:
        return True
    # Behind an earlier save, threads copy everything, so that the trainer need not wait for that.
    proven = plan.source.proven() if job.after is None else []
    known_nbytes = sum(stop - start for start, stop in proven)
    return known_nbytes > _KNOWN_SHARE_MAX * plan.layout.hashed_end


class _Progress:
    """Passes the saver's progress on to the callbacks of a save."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._is_sealed = False

    def moved(self, event: Moved) -> None:
        self._callbacks.moved()
        if event.sealed:
            self.end()
        self._callbacks.wrote(event.done_nbytes, event.total_nbytes)

    def end(self) -> None:
        """Note that the image is sealed."""
        if not self._is_sealed:
            self._is_sealed = True
            self._callbacks.sealed()


@cache
def _log_unopened(uri: str, problem: str) -> None:
    _log.warning("threads write to %s, since another process cannot: %s", uri, problem)
