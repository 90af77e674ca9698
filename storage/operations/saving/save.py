"""One rank's part of a save: agree on the global plan, lay out the image, write it, commit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ....core.aio import side_by_side, wait_out
from ....core.spans import Where, span
from ....drivers.contract import Driver
from ....errors import (
    CheckpointError,
    CoordinationError,
    InvisibleFilesError,
    NotFoundError,
    SaveError,
    StorageDownError,
    StorageError,
)
from ....planner.image import ImageLayout
from ...format.fragment import Fragment, fragment_of, join
from ...format.lineage import ROOT
from ...format.manifest import MANIFEST_KEY, image_key
from ...format.merge import merge
from ...format.patches import PatchBases
from ...format.save_telemetry import encode_record
from ...format.tables import ImageTable
from ...pipeline.base import chosen
from ...pipeline.image_writer import WrittenImage, check_image_size
from ...protocol import limits
from ...protocol.attempt import Attempt, check_marker, delete_attempt, new_commit_record
from ...protocol.collect import give_up, sweep
from ...protocol.commit import begin, commit, settle
from ...protocol.current import is_current
from ...protocol.telemetry import put_telemetry
from ...ranks.hosts import share_of
from ...ranks.messages import LEADER, Nothing
from ...ranks.team import Team
from ...runtime.engine import offload
from ...state.plan import ImagePlan
from ..driver_progress import with_progress
from ..rounds import BEGIN, PATCH_ROUND, Begun, CanPatch, FragmentCodec, commit_round
from ..telemetry import Wrote, encoded_telemetry, rank_telemetry
from .global_plan import GlobalPlan
from .image_save import ImageSave, has_begun
from .keeper_save import global_plan_of, keep, planned
from .save_job import SaveJob

COMMITTED_S = 5.0
"""Time for which a rank that lost the job's store looks for the commit."""
COMMITTED_PAUSE_S = 0.2

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A committed save, seen from one rank: the attempt, the sizes of its image and of its file,
    how many bytes of it were borrowed from ``base``, and why none, if so."""

    attempt: str
    nbytes: int
    stored_nbytes: int
    borrowed_nbytes: int = 0
    base: str = ""
    why_whole: str = ""


async def run_save(driver: Driver, team: Team, job: SaveJob) -> Saved | None:
    """Save; return what this rank has written.

    Every rank of the team calls this. Returns None if all ranks captured into their keepers'
    memory; the keepers then complete the save (see :mod:`.keeper_request`).

    Raises any error on this rank; RankFailedError or DeadlineError for another rank; DeadlineError
    when the job's deadline passes. Then nothing was committed, unless the failure came between the
    put of the manifest and its confirmation. In any case the storage has a complete checkpoint.
    """
    driver = with_progress(driver, team)
    leader = _Leader(driver, job)
    until_ended = contextlib.AsyncExitStack()
    async with team.session(), contextlib.aclosing(leader), until_ended:
        try:
            async with job.deadline.holds(driver.uri, team.rank):
                saved = await _save(driver, team, job, leader, until_ended)
        except BaseException as error:
            await team.fail(error)
            await leader.give_up()
            raise
        await _settle(leader, job, driver.uri)
        return saved


async def _patch_bases(team: Team, job: SaveJob, layout: ImageLayout) -> PatchBases | None:
    """Return the versions to make patches of, if all ranks still have their bytes."""
    publication = job.publication
    if publication is None or publication.bases is None:
        return None
    bases = publication.bases
    mine = CanPatch(publication.image.is_base_of(layout, bases.previous))
    verdict = await team.round(PATCH_ROUND, mine, _all_can_patch)
    return bases if verdict.can else None


async def _all_can_patch(statements: Sequence[CanPatch]) -> CanPatch:
    return CanPatch(all(statement.can for statement in statements))


async def _save(
    driver: Driver,
    team: Team,
    job: SaveJob,
    leader: _Leader,
    until_ended: contextlib.AsyncExitStack,
) -> Saved | None:
    global_plan = await global_plan_of(team, driver.uri, job)
    if job.keeping is not None and await keep(team, job, global_plan):
        return None
    if job.budget_nbytes is not None and job.shares_budget and global_plan is not None:
        job.budget_nbytes = share_of(job.budget_nbytes, global_plan.route.sharing)
    plan = await planned(job, team.rank, global_plan)
    check_image_size(driver, plan.layout.nbytes)  # before anything is put
    job.bases = await _patch_bases(team, job, plan.layout)
    # Copying starts before the storage answers, because trainers wait for the copies.
    beginning = asyncio.ensure_future(leader.begin_for(team))
    image = ImageSave(driver, team, job, plan, beginning)
    try:
        written = await image.write(leader.will, until_ended)
        attempt = Attempt((await beginning).attempt)
    except BaseException as error:
        beginning.cancel()
        await wait_out([beginning])
        if has_begun(beginning) and isinstance(error, NotFoundError):
            # Another process deleted files being written. If that was a later save, raise its
            # error.
            await check_marker(driver, Attempt(beginning.result().attempt))
        raise
    borrowing = image.borrowing
    nbytes = plan.layout.nbytes if len(written.digests) else 0
    leader.wrote = Wrote(
        *(nbytes, written.stored_nbytes, written.borrowed_nbytes, borrowing.why_whole)
    )
    fragment = written_fragment(attempt, job, plan, written, team.rank)
    if team.rank != LEADER:  # the leader reports after its commit
        fragment = replace(fragment, telemetry=_record(job, team.rank, leader.wrote))
    try:
        await _commit(team, fragment, global_plan, leader)
    except InvisibleFilesError:
        # No other rank sees this file, so no other rank can collect it.
        await _drop(driver, image_key(attempt.id, team.rank, job.packing))
        raise
    except CoordinationError as error:
        may_be_committed = team.rank != LEADER and team.store_is_lost
        if not may_be_committed or not await _is_committed(driver, attempt):
            raise
        _log.info("the job's store was gone before word of the commit: %s", error)
    image.unwritten.epoch.commit(attempt.id, written.unchanged)
    job.published(attempt.id)
    await until_ended.aclose()  # its memory is free for the next save
    return Saved(
        *(attempt.id, nbytes, written.stored_nbytes, written.borrowed_nbytes),
        *(borrowing.uri, borrowing.why_whole),
    )


def _record(job: SaveJob, rank: int, wrote: Wrote) -> bytes:
    record = rank_telemetry(rank, wrote, job.fenced_s)
    return b"" if record is None else encode_record(record)


async def _commit(
    team: Team, fragment: Fragment, global_plan: GlobalPlan | None, leader: _Leader
) -> None:
    """Send the fragment through this host's first rank to the leader; return once committed."""
    plan = global_plan or GlobalPlan.alone(team.rank)
    codec = FragmentCodec(plan.sent_layouts, plan.received_layouts)
    host_ranks = plan.route.host_ranks
    if len(host_ranks) > 1:
        fragments = await team.gather("written", codec, host_ranks, fragment)
        if fragments:
            fragment = await offload(join, fragments)
    await team.round(commit_round(codec), fragment, leader.commit, plan.route.speakers)
    plan.sent_layouts.update(group.layout.key for group in fragment.groups)


async def _is_committed(driver: Driver, attempt: Attempt) -> bool:
    """Return whether the leader commits within a while: it may exit right after that."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + COMMITTED_S
    while True:
        with contextlib.suppress(CheckpointError, StorageError):
            if await is_current(driver, attempt.id):
                return True
        if loop.time() > until_s:
            return False
        await asyncio.sleep(COMMITTED_PAUSE_S)


async def _settle(leader: _Leader, job: SaveJob, uri: str) -> None:
    """Settle the committed attempt, within a limited time if the save has a deadline."""
    limit_s = None if job.deadline.timeout_s is None else limits.CLEAN_UP_S
    try:
        async with asyncio.timeout(limit_s):
            await leader.settle()
    except TimeoutError:
        _log.warning(
            "the replaced checkpoint stays at %s until a later save: deleting it took over %g s",
            uri,
            limits.CLEAN_UP_S,
        )


@dataclass(eq=False)
class _Leader:
    """The leader's part of a save: begin and commit an attempt. On others it only passes it on."""

    _driver: Driver
    _job: SaveJob
    wrote: Wrote = field(default_factory=Wrote)
    _branch: str = ROOT
    _record: bytes = field(default_factory=new_commit_record)
    _attempt: Attempt | None = None
    _obsolete: Attempt | None = None
    _uncommitted: Attempt | None = None
    """The attempt, as long as it is certainly not committed."""
    _head: tuple[str, int | None, float] = ("", None, 0.0)
    _world: int = 0
    _increments: int = 0
    _records: bytes = b""
    """Encoded records of the other ranks."""
    _sweeping: asyncio.Future[None] | None = None

    async def begin_for(self, team: Team) -> Begun:
        """Return what rank 0 begins, while data is copied."""
        return await team.round(BEGIN, Nothing(), self._begin, [LEADER])

    async def _begin(self, statements: Sequence[Nothing]) -> Begun:
        if self._job.admit is not None:
            self._branch = await self._job.admit()
        async with self._explaining():
            attempt, base = await side_by_side(
                self._begin_attempt(), chosen(self._job.base, self._driver)
            )
        self._increments = base.increments
        return Begun(attempt.id, base)

    async def _begin_attempt(self) -> Attempt:
        with span("begin"):
            begun = await begin(self._driver, overwrite=self._job.overwrite)
            attempt = Attempt(begun.id, self._record)
        self._attempt = self._uncommitted = attempt
        if not self._driver.traits.bounded:
            self._sweeping = asyncio.ensure_future(sweep(self._driver, limits.CLEAN_UP_S))
        return attempt

    @contextlib.asynccontextmanager
    async def _explaining(self) -> AsyncIterator[None]:
        """Let ``admit`` raise what a failure means to the caller: another save may have been
        faster, or have deleted files of this one since."""
        try:
            yield
        except (SaveError, StorageError) as error:
            if self._job.admit is not None and not isinstance(error, StorageDownError):
                await self._job.admit()
            raise

    def will(self) -> tuple[str, bytes]:
        """Return what a saver that survives this process needs to commit."""
        return self._branch, self._record

    async def commit(self, fragments: Sequence[Fragment]) -> Nothing:
        """Merge ``fragments``, one from each speaker, into a manifest and commit it."""
        async with self._explaining():
            await self._commit(fragments)
        return Nothing()

    async def _commit(self, fragments: Sequence[Fragment]) -> None:
        assert self._attempt is not None
        with span("merge"):
            manifest = await offload(merge, fragments, self._job.compression, self._job.bases)
        manifest = replace(manifest, branch=self._branch, increments=self._increments)
        self._head = fragments[0].head
        self._world = manifest.world
        self._records = b"".join(fragment.telemetry for fragment in fragments)
        with span("manifest", Where(MANIFEST_KEY)):
            self._obsolete = await commit(
                self._driver,
                self._attempt,
                manifest,
                self._putting,
                overwrite=self._job.overwrite,
            )

    def _putting(self) -> None:
        """Note that the manifest may be stored from here on, whatever error is raised."""
        self._uncommitted = None

    async def settle(self) -> None:
        """Settle the attempt: all ranks know that it is committed."""
        if self._attempt is None:
            return
        with span("settle"):
            # Both are independent, so storing the telemetry takes no extra time.
            await side_by_side(
                self._end(self._attempt),
                put_telemetry(self._driver, self._attempt.id, self._telemetry),
            )

    async def _end(self, attempt: Attempt) -> None:
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        await settle(self._driver, attempt)
        if self._obsolete is not None:
            await delete_attempt(self._driver, self._obsolete)

    async def _telemetry(self) -> bytes | None:
        mine = rank_telemetry(LEADER, self.wrote, self._job.fenced_s)
        if mine is None:
            return None
        return await offload(encoded_telemetry, self._head, self._world, mine, self._records)

    async def give_up(self) -> None:
        """Delete the attempt unless it may be committed."""
        if self._uncommitted is not None:
            await give_up(self._driver, self._uncommitted)

    async def aclose(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            cancelled = await wait_out([self._sweeping])
            if cancelled is not None:
                raise cancelled


def written_fragment(
    attempt: Attempt, job: SaveJob, plan: ImagePlan, written: WrittenImage, rank: int
) -> Fragment:
    """Return the fragment of this rank's image, for the leader."""
    stored_nbytes = None if job.packing is None else written.stored_nbytes
    images = ImageTable.of(rank, plan.layout.hashed_end, written.digests, stored_nbytes)
    head = (attempt.id, job.step, job.created_s)
    tables = (plan.reported, plan.shards, images)
    return fragment_of(head, rank, *tables, job.flat.tree, written.extents)


async def _drop(driver: Driver, image: str) -> None:
    try:
        await driver.delete(image)
    except StorageError as error:
        _log.warning("an image that no checkpoint names stays at %s: %s", driver.uri, error)
