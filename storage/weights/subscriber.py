"""Follows a weight channel. Every rank of the engine has a subscriber."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch

from ...core.aio import wait_out
from ...core.spans import Recorder, recording
from ...drivers.contract import Driver
from ...drivers.layers.host_cache import HostCache
from ...drivers.registry import open_driver
from ...errors import (
    CoordinationError,
    DamagedError,
    NotFoundError,
    RankFailedError,
    ReplacedError,
    UsageError,
)
from ..format.part import Selection
from ..format.patches import zstandard
from ..operations.call_errors import announcing_errors, printed_uri
from ..operations.loading.differences import Strict
from ..operations.loading.load import LoadJob, run_build, run_load
from ..operations.location import UriLike
from ..operations.options import BUDGET_NBYTES, DEADLINE_S, check_budget
from ..operations.reading.reader import Checkpoint
from ..operations.reading.selection import chosen
from ..operations.reading.shares import Skip
from ..operations.report import Update
from ..operations.telemetry import Outcome, announce, log_safely, log_updated, recorded_figures
from ..ranks.calls import Call
from ..ranks.messages import Nothing, Round
from ..ranks.process_group import Group, acting_in, current_rank, current_team
from ..ranks.team import Team
from ..runtime.engine import check_may_wait, run
from ..state.bits import as_bits
from ..state.flattening.flatten import flatten
from .channel import awaited, is_immutable, newest_after, read_head
from .leases import Lease
from .memory import for_reading, is_in_memory
from .mirror import Mirror, Version
from .staging import Staging

_TRIES = 3

_REPEATABLE = (DamagedError, NotFoundError, RankFailedError, ReplacedError)
"""Errors after which an update is tried again, from an anchor on the ranks that raised them."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Has:
    """The version that a rank uses; -1 for none."""

    version: int


@dataclass(frozen=True, slots=True)
class _Target:
    """The version that all ranks update to; ``sequence`` 0 if there is no newer one."""

    sequence: int = 0
    attempt: str = ""


_CHOOSE = Round.of("choose", _Has, _Target)
_READY = Round.of("ready", Nothing, Nothing)


class Prepared:
    """A verified version, on all ranks, that the engine does not use yet."""

    def __init__(self, subscriber: Subscriber, version: Version, report: Update) -> None:
        self._subscriber = subscriber
        self._version = version
        self._report = report

    @property
    def version(self) -> int:
        """The version, as its publisher numbered it."""
        return self._report.version

    def commit(self) -> Update:
        """Make the engine use this version; return a report. The engine must not compute meanwhile.
        Every rank that has prepared the version calls this."""
        return self._subscriber._commit(self, self._version, self._report)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """Options of :func:`holdfast.subscribe`."""

    strict: Strict = True
    cast: bool = False
    in_place: bool = False
    budget_nbytes: int = BUDGET_NBYTES
    deadline_s: float = DEADLINE_S
    storage_options: Mapping[str, object] | None = None
    process_group: Group = None
    once_per_host: bool | None = None


class Subscriber:
    """Updates the weights of an engine from the channel ``uri``; made by
    :func:`holdfast.subscribe`."""

    def __init__(self, uri: UriLike, into: object, options: SubscribeOptions) -> None:
        zstandard()
        check_budget(options.budget_nbytes)
        self._uri = os.fspath(uri)
        self._into = into
        self._options = options
        driver = open_driver(for_reading(uri), **(options.storage_options or {}))
        self._cache: HostCache | None = None
        if options.once_per_host or (options.once_per_host is None and is_in_memory(uri)):
            self._cache = HostCache(driver, immutable=is_immutable)
        self._driver: Driver = self._cache or driver
        self._mirror = Mirror(self._driver)
        self._lease = Lease(self._driver)
        self._used: Version | None = None
        self._staging = Staging(in_place=options.in_place)
        self._built: object = None
        self._prepared_last: Prepared | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine uses; None before the first update."""
        return None if self._used is None else self._used.manifest.step

    @property
    def state(self) -> object:
        """The weights in use as nested dicts of whole tensors, if there is no ``into``. The first
        access after an update builds them."""
        if self._built is None and self._used is not None:
            driver = self._mirror.at(self._used_whole())
            with acting_in(self._options.process_group):
                building = run_build(driver, current_rank(), self._options.budget_nbytes)
            self._built, _, _ = run(building)
        return self._built

    def newest(self) -> int | None:
        """Return the newest published version, or None. Does not involve other
        ranks. Raises StorageError, DamagedError."""
        check_may_wait()
        return run(self._newest())

    def update(self, timeout_s: float = 0.0) -> Update | None:
        """Update to the newest version; wait up to ``timeout_s`` for one that is newer than the
        version in use. Return a report, or None without such a version.

        Every rank calls this; all end on the same version. The bytes of a version are verified
        before the first of them is used. After an error the engine still uses the old version, on
        every rank. Raises MismatchError if the weights do not fit the engine, DamagedError,
        StorageError, RankFailedError and DeadlineError.
        """
        prepared = self.prepare(timeout_s)
        return None if prepared is None else prepared.commit()

    def prepare(self, timeout_s: float = 0.0) -> Prepared | None:
        """Fetch and verify the newest version, while the engine uses the old one; see
        :meth:`update`. Its ``commit()`` swaps them."""
        check_may_wait()
        began_s = time.perf_counter()
        try:
            with acting_in(self._options.process_group):
                return self._prepare(timeout_s)
        except BaseException as error:
            seconds = time.perf_counter() - began_s
            announce(Outcome("update", printed_uri(self._uri), seconds, error=error))
            raise

    def _forget(self) -> None:
        """Drop all bytes, so that an update reads them from an anchor again."""
        if self._cache is not None:
            for key in self._mirror.files:
                self._cache.drop(key)
        self._mirror.forget()

    def weights(
        self,
        only: Selection = (),
        *,
        rename: Mapping[str, str] | None = None,
        skip: Skip | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for each tensor of the version in use, whole and on the CPU, as
        ``load_weights`` of inference engines takes them. Only without ``into``.

        ``only``, ``rename`` and ``skip`` as in :meth:`holdfast.Checkpoint.read_shares`, which also
        says how tensors are read ahead. By default, names leave out the top key of the state, such
        as ``"model"``. Use all tensors before the next update. Raises UsageError before the first
        update.
        """
        version = self._used_whole()
        names = chosen(version.whole.tensors.rows, only)
        if rename is None:
            tops = {name.partition(".")[0] for name in names if "." in name}
            rename = {f"{top}.*": "*" for top in tops}
        checkpoint = Checkpoint(self._mirror.at(version), version.whole, 0)
        checkpoint.close_when_collected()
        return checkpoint.read_shares(only, rename=rename, skip=skip)

    def modified(self) -> list[str]:
        """Return the names of tensors of ``into`` that do not have the bytes of the version in use,
        because something else has changed them. The next update replaces them.

        Does not involve other ranks; takes as much memory as the weights. Raises UsageError before
        the first update and without ``into``, DamagedError and StorageError.
        """
        if self._into is None or self._used is None:
            raise UsageError("no weights of an engine are in use")
        flat = flatten(self._into, loading=True)
        staged = Staging().stage(flat, self._into)
        options = self._options
        job = LoadJob(staged, strict=False, cast=options.cast, budget_nbytes=options.budget_nbytes)
        run(run_load(self._mirror.at(self._used), Team(), job))
        return [
            name
            for name, live, used in zip(flat.names, flat.locals, staged.locals, strict=True)
            if name in job.match.filled and not torch.equal(as_bits(live), as_bits(used))
        ]

    def _used_whole(self) -> Version:
        """Return the version in use, of which all bytes are in memory. Raises UsageError."""
        if self._into is not None:
            raise UsageError("this subscriber fills the engine's own weights")
        if self._used is None:
            raise UsageError("no version is in use yet", advice="Call update() first.")
        return self._used

    def close(self) -> None:
        """Free the memory of the subscriber; the engine keeps its weights."""
        self._mirror.forget()
        self._staging.clear()
        run(self._driver.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _newest(self) -> int | None:
        head = await read_head(self._driver)
        sequence = await newest_after(self._driver, head.sequence)
        if not sequence:
            return None
        return (await self._mirror.version(sequence)).manifest.step

    async def _chosen(self, team: Team, timeout_s: float) -> _Target:
        """Return the version that all ranks update to."""

        async def choose(statements: Sequence[_Has]) -> _Target:
            used = min(statement.version for statement in statements)

            async def is_newer(sequence: int) -> bool:
                return await self._numbered(sequence) > used

            newest = await awaited(self._driver, is_newer, timeout_s, team.report_progress)
            if not newest:
                return _Target()
            sequence = await self._lease.take(newest)
            return _Target(sequence, (await self._mirror.version(sequence)).manifest.attempt)

        used = -1 if self.version is None else self.version
        async with team.session():
            try:
                return await team.round(_CHOOSE, _Has(used), choose)
            except BaseException as error:
                await team.fail(error)
                raise

    async def _numbered(self, sequence: int) -> int:
        """Return the version number of a version. A channel in memory may have begun anew, so its
        sequence does not say whether it is newer."""
        step = (await self._mirror.version(sequence)).manifest.step
        return -1 if step is None else step

    def _prepare(self, timeout_s: float) -> Prepared | None:
        mirror = self._mirror
        before = mirror.received_nbytes, mirror.anchored
        target = self._choose(timeout_s)
        if not target.sequence:
            return None
        began_s = time.perf_counter()
        recorder = Recorder(current_rank())
        for left in reversed(range(_TRIES)):
            try:
                with recording(recorder):
                    version = self._fetch(target)
                break
            except Exception as error:
                if not left or not self._is_repeated(target, error):
                    raise
                _log.warning("an update is repeated: %s", error)
                if not isinstance(error, RankFailedError):
                    self._forget()
            again = self._choose(0.0)
            target = again if again.sequence else target
        m = version.manifest
        used = version.sequence - 1 if self._used is None else self._used.sequence
        report = Update(
            printed_uri(self._uri),
            m.attempt,
            version=-1 if m.step is None else m.step,
            sequence=version.sequence,
            skipped=max(0, version.sequence - used - 1),
            received_nbytes=mirror.received_nbytes - before[0],
            anchored_chunks=mirror.anchored - before[1],
            prepare_s=time.perf_counter() - began_s,
            **recorded_figures(recorder),
        )
        self._prepared_last = Prepared(self, version, report)
        return self._prepared_last

    def _choose(self, timeout_s: float) -> _Target:
        call = Call("choose version", printed_uri(self._uri))
        team = current_team(call, self._options.deadline_s, saving=False)
        return run(self._chosen(team, timeout_s))

    def _fetch(self, target: _Target) -> Version:
        """Fill the second set of tensors; without ``into``, only bring the mirror to it. Return the
        version."""
        self._prepared_last = None  # its tensors are filled again
        call = Call("update", printed_uri(self._uri), target.sequence)
        team = current_team(call, self._options.deadline_s, saving=False)
        with announcing_errors(team):
            version = run(self._mirror.version(target.sequence, target.attempt))
        if self._into is None:
            run(self._leasing(version, self._fetch_whole(team, version)))
            return version
        with announcing_errors(team):
            flat = flatten(self._into, loading=True)
            staged = self._staging.stage(flat, self._into)
        options = self._options
        job = LoadJob(
            staged,
            strict=options.strict,
            cast=options.cast,
            budget_nbytes=options.budget_nbytes,
        )
        run(self._leasing(version, run_load(self._mirror.at(version), team, job)))
        self._staging.filled = job.match.filled
        return version

    def _is_repeated(self, target: _Target, error: Exception) -> bool:
        """Return whether all ranks can repeat an update that has failed on some of them."""
        call = Call("repeat update", printed_uri(self._uri), target.sequence)
        team = current_team(call, self._options.deadline_s, saving=False)
        if not isinstance(error, _REPEATABLE):
            run(team.fail(error))
            return False
        try:
            run(_met(team))
        except CoordinationError:
            return False
        return True

    async def _fetch_whole(self, team: Team, version: Version) -> None:
        """Bring the mirror to a version on every rank; return once all have done so."""
        async with team.session():
            try:
                await self._mirror.fetch(version, team.report_progress)
                await team.round(_READY, Nothing(), _all_here)
            except BaseException as error:
                await team.fail(error)
                raise

    async def _leasing(self, version: Version, work: Coroutine[object, object, T]) -> T:
        """Do ``work`` while a lease of the version is renewed, if this rank has put one."""
        if self._lease.sequence != version.sequence:
            return await work
        renewing = asyncio.ensure_future(self._lease.renew())
        try:
            return await work
        finally:
            renewing.cancel()
            await wait_out([renewing])
            await self._lease.release()

    def _commit(self, prepared: Prepared, version: Version, report: Update) -> Update:
        if prepared is not self._prepared_last:
            raise UsageError(
                f"version {prepared.version} is not the one that was prepared last",
                advice="Commit each prepared version once, before preparing the next.",
            )
        began_s = time.perf_counter()
        self._built = None
        self._staging.swap()
        self._used = version
        self._prepared_last = None
        report = replace(report, pause_s=time.perf_counter() - began_s)
        seconds = report.prepare_s + report.pause_s
        log_safely(log_updated, report)
        announce(Outcome("update", report.uri, seconds, step=report.version, report=report))
        return report


async def _met(team: Team) -> None:
    """Return once all ranks are here."""
    async with team.session():
        await team.round(_READY, Nothing(), _all_here)


async def _all_here(statements: Sequence[Nothing]) -> Nothing:
    return Nothing()
