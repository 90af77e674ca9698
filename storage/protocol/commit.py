"""The commit protocol: a checkpoint appears completely or not at all.

``docs/explanation/consistency.md`` lists the keys below a checkpoint's root, describes the steps in
full and argues why they suffice, also for copies, imports and prunings, and on storage without an
atomic exclusive put. In short, with the same numbers:

1. *begin*: every attempt that is not the current checkpoint is aborted by an abort record and
   deleted; then a new attempt puts its marker. The newest save wins: a process of a dead job that
   wakes up again can no longer commit.
2. All images become durable.
3. The leader merges the fragments of all ranks into one manifest (:mod:`..format.merge`).
4. *commit*: the leader puts its commit record. Exactly one of the commit record and an abort record
   can succeed, and of several commit records one.
5. The leader checks that the marker exists, and every image with its full size. The check follows
   the commit record, because an abort may have been completed, and its record deleted, before it.
6. The leader puts the manifest: atomically, durably. Then it looks for the prune lock, waits for
   the pruning to end, reads the manifest back, and puts it again if it is missing or still the
   previous one. After the third put the save fails. A save that must not replace a checkpoint looks
   for one before step 1 and before this put, and puts the manifest exclusively the first time.
7. *settle*: once all ranks know the outcome, the leader deletes the marker: from now on it does not
   put its manifest again. It also deletes the attempt that the manifest named before, if that was
   settled before step 6. Otherwise that attempt is spared for a grace period.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...core.aio import at_most, side_by_side
from ...drivers.contract import Driver
from ...errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    HoldfastError,
    InvisibleFilesError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from ..format.fragment import Fragment, join
from ..format.lineage import ROOT
from ..format.manifest import MANIFEST_KEY, Manifest, StoredFile, attempt_in
from ..format.merge import merge
from ..format.packed import Compression
from ..runtime.engine import offload
from . import limits
from .attempt import (
    Attempt,
    announce,
    check_exclusive_puts,
    check_marker,
    delete_attempt,
    list_attempts,
    lost,
    probe,
    put_commit_record,
    put_once,
    time_of_marker_s,
)
from .collect import abort_and_delete, collect_others, give_up, survey_attempts, sweep
from .current import current_attempt
from .preflight import check_range_reads
from .prune_lock import wait_for_prunings

_PUTS = 3
"""The number of puts of the manifest after which a save gives up on the storage."""

_log = logging.getLogger(__name__)


async def begin(driver: Driver, *, overwrite: bool = True) -> Attempt:
    """Collect dead attempts and begin a new one. On unbounded storage, the caller sweeps while it
    writes. Raises StorageError and SupersededError; StorageDownError also if a pruning has died
    here within the last hour or does not end: see step 6; with ``overwrite=False`` ExistsError,
    before anything is put or deleted, if there is a checkpoint."""
    if not overwrite:
        await refuse_existing(driver)
    attempt = await announce(driver)
    try:
        *_, survey = await side_by_side(
            check_exclusive_puts(driver, attempt),
            wait_for_prunings(driver, partial(time_of_marker_s, driver, attempt)),
            survey_attempts(driver, attempt),
        )
        await collect_others(driver, attempt, survey)
        if driver.traits.bounded:
            await sweep(driver, limits.CLEAN_UP_S)
    except BaseException:
        await give_up(driver, attempt)
        raise
    return attempt


async def begin_copy(driver: Driver, source_digest: str) -> tuple[Attempt, bool]:
    """Begin a copy of the checkpoint whose manifest has ``source_digest``, like :func:`begin`.

    Returns the attempt, and whether it is resumed: an existing attempt without a record that copies
    the same checkpoint is reused. Other processes may work on it too, so give it up only through
    :func:`abandon`, never by deleting it.
    """
    return await _begin_resumable(driver, {"copy_of": source_digest})


async def begin_import(driver: Driver, images_digest: str) -> tuple[Attempt, bool]:
    """Begin an import whose images are determined by ``images_digest``, like :func:`begin_copy`."""
    return await _begin_resumable(driver, {"import_of": images_digest})


async def _begin_resumable(driver: Driver, purpose: Mapping[str, str]) -> tuple[Attempt, bool]:
    """Begin an attempt whose marker states its ``purpose``, or resume one with the same marker."""
    async with probe(driver) as own:
        await wait_for_prunings(driver, partial(time_of_marker_s, driver, own))
        resumable = await _resumable(driver, own, purpose)
        attempt = resumable or await announce(driver, purpose)
        survey = await survey_attempts(driver, own)
        await collect_others(driver, own, survey, spare=attempt)
        await sweep(driver, limits.CLEAN_UP_S)
    return attempt, resumable is not None


async def _resumable(driver: Driver, own: Attempt, purpose: Mapping[str, str]) -> Attempt | None:
    now_s = await time_of_marker_s(driver, own)
    # Where attempts are collected by age, it must be young enough to be spared long after this
    # check.
    idle_s = float("inf")
    if not driver.traits.exclusive_is_atomic:
        idle_s = limits.IDLE_S / 2
    found = await list_attempts(driver)
    for attempt in sorted(found, key=lambda a: a.id, reverse=True):
        files = found[attempt]
        is_open = not files.has_record and now_s - files.written_s < idle_s
        if is_open and await _purpose(driver, attempt) == purpose:
            return attempt
    return None


async def _purpose(driver: Driver, attempt: Attempt) -> object:
    try:
        return json.loads(await driver.get(attempt.marker_key))
    except (NotFoundError, ValueError, RecursionError):
        return None


async def abandon_failed(driver: Driver, attempt: Attempt) -> None:
    """Abandon an attempt that could not be written. Raises SupersededError if that is why."""
    try:
        await check_marker(driver, attempt)
    finally:
        await abandon(driver, attempt)


async def abandon(driver: Driver, attempt: Attempt) -> None:
    """Delete an attempt that others may work on too, unless it is being committed. Logs errors."""
    with contextlib.suppress(StorageError, CheckpointError):
        try:
            await driver.stat(attempt.marker_key)
        except NotFoundError:
            # Another process has settled or deleted it; files that this process wrote since still
            # exist.
            if await current_attempt(driver) != attempt.id:
                await delete_attempt(driver, attempt)
            return
        if driver.traits.exclusive_is_atomic:
            await abort_and_delete(
                driver, attempt, has_record=False, now_s=0.0, grace_s=float("inf")
            )


async def refuse_existing(driver: Driver, key: str = MANIFEST_KEY) -> None:
    """Raise ExistsError if ``key``, which every checkpoint of a format has, exists. Its contents do
    not matter: a damaged checkpoint may be salvaged."""
    with contextlib.suppress(NotFoundError):
        await driver.stat(key)
        raise _exists(driver, key)


def _exists(driver: Driver, key: str = MANIFEST_KEY) -> HoldfastError:
    return ExistsError(
        "a checkpoint already exists, and overwrite is False",
        uri=driver.uri,
        key=key,
        advice="Save to another URI, or replace it: overwrite=True.",
    )


async def commit(
    driver: Driver,
    attempt: Attempt,
    manifest: Manifest,
    putting: Callable[[], None] = lambda: None,
    *,
    overwrite: bool = True,
) -> Attempt | None:
    """Make ``manifest`` the checkpoint; return the attempt it replaced, if that can be deleted now.
    With ``overwrite=False`` it replaces none: if several such commits overlap, one succeeds, where
    the storage's exclusive puts are atomic.

    Raises SupersededError, InvisibleFilesError, StorageError and, with ``overwrite=False``,
    ExistsError: then nothing has changed, except that after ``putting`` was called, just before the
    put, the manifest may have been stored."""
    data = await offload(manifest.encode)
    try:
        record = await put_commit_record(driver, attempt)
    except (ExistsError, NotFoundError) as error:
        # NotFoundError: the attempt is being deleted, including its folder.
        raise await lost(driver, attempt) from error

    async def now_s() -> float:
        return (await driver.stat(attempt.record_key)).modified_s

    before: str | None
    obsolete: Attempt | None
    *_, (before, obsolete) = await side_by_side(
        check_marker(driver, attempt),
        check_images(driver, manifest),
        _check_record(driver, attempt, record),
        _replaced(driver, attempt, now_s),
    )
    if not overwrite:
        await refuse_existing(driver)
    putting()
    for number in range(_PUTS):
        if overwrite or number > 0:
            await driver.put(MANIFEST_KEY, data)
        else:
            await _put_first(driver, data)
        await wait_for_prunings(driver, now_s)
        if await _is_kept(driver, data, {before, attempt.id}):
            return obsolete
    raise _not_kept(driver, MANIFEST_KEY, "the manifest")


async def _put_first(driver: Driver, data: bytes) -> None:
    """Put the manifest where there is none. Raises ExistsError if another save was faster."""
    try:
        await put_once(driver, MANIFEST_KEY, data)
    except ExistsError as error:
        raise _exists(driver) from error


async def _check_record(driver: Driver, attempt: Attempt, record: bytes) -> None:
    """Read the commit record back. Raises StorageError if it is missing or unreadable."""
    try:
        await check_range_reads(driver, attempt.record_key, record)
    except NotFoundError as error:
        await check_marker(driver, attempt)
        raise _not_kept(driver, attempt.record_key, "the commit record") from error


def _not_kept(driver: Driver, key: str, what: str) -> StorageError:
    return StorageError(
        f"the storage acknowledged {what} and does not return it",
        uri=driver.uri,
        key=key,
        advice="Is there a cache or a gateway in between? holdfast drivers --check URI tells more.",
    )


async def _replaced(
    driver: Driver, attempt: Attempt, now_s: Callable[[], Awaitable[float]]
) -> tuple[str | None, Attempt | None]:
    """Return the current attempt's id, and that attempt if it can be deleted after the commit."""
    before = None
    with contextlib.suppress(DamagedError):
        before = await current_attempt(driver)
    if before is None or before == attempt.id:
        return before, None
    obsolete = Attempt(before)
    if await is_settled(driver, obsolete, now_s):
        return before, obsolete
    return before, None


async def _is_kept(driver: Driver, data: bytes, superseded_ids: set[str | None]) -> bool:
    """Return whether the storage returns the manifest just put, or a later save's."""
    try:
        shown = await driver.get(MANIFEST_KEY)
        if shown == data:
            return True
        return await offload(attempt_in, shown) not in superseded_ids
    except (NotFoundError, DamagedError):
        return False
    except UnsupportedFormatError:
        return True  # written by a newer release


async def settle(driver: Driver, attempt: Attempt) -> None:
    """Record that ``attempt`` is committed and that its manifest will not be put again. Only the
    process that put the manifest calls this. Does not raise: after an hour the attempt counts as
    settled anyway."""
    try:
        await driver.delete(attempt.marker_key)
    except StorageError as error:
        _log.warning("attempt %s is not settled for an hour: %s", attempt.id, error)


async def is_settled(
    driver: Driver, attempt: Attempt, now_s: Callable[[], Awaitable[float]]
) -> bool:
    """Return whether the manifest of ``attempt``, already put, can no longer be put again.

    That holds once its leader has settled it, or when the grace period is over by the storage's
    clock, ``now_s``. A process that deletes the attempt for that reason must ask this before it
    replaces or deletes the manifest, so that a manifest put before the answer is gone. Raises
    StorageError.
    """
    try:
        await driver.stat(attempt.marker_key)
        recorded_s = (await driver.stat(attempt.record_key)).modified_s
    except NotFoundError:
        return True
    return await now_s() - recorded_s > limits.GRACE_S


async def check_images(driver: Driver, manifest: Manifest) -> None:
    """Raise InvisibleFilesError unless every file of the images exists with its full size."""

    async def check(file: StoredFile) -> None:
        try:
            seen_nbytes = (await driver.stat(file.key)).nbytes
        except NotFoundError as error:
            problem = "is not visible to the committing rank"
            raise _invisible(driver.uri, file, problem) from error
        if seen_nbytes != file.nbytes:
            problem = f"has {seen_nbytes:,} bytes for the committing rank, not {file.nbytes:,}"
            raise _invisible(driver.uri, file, problem)

    await at_most(driver.traits.concurrency, map(check, manifest.files))


def _invisible(uri: str, file: StoredFile, problem: str) -> HoldfastError:
    return InvisibleFilesError(
        f"the image of rank {file.rank} {problem}",
        uri=uri,
        key=file.key,
        rank=file.rank,
        advice="Use storage that all hosts share; a local disk serves the ranks of one host only.",
    )


async def commit_attempt(
    driver: Driver,
    attempt: Attempt,
    fragments: Sequence[Fragment],
    compression: Compression | None = None,
    branch: str = ROOT,
    *,
    overwrite: bool = True,
    increments: int = 0,
) -> None:
    """Commit the images of all ranks from one process, and delete the checkpoint that it replaces.
    ``fragments`` must be in order of rank. ``branch`` and ``increments`` go into the manifest.
    ``overwrite`` as in :func:`commit`. Raises CoverageError if an element is stored twice or not at
    all; SaveError; StorageError."""
    may_be_stored = False

    def putting() -> None:
        nonlocal may_be_stored
        may_be_stored = True

    try:
        manifest = await offload(merge, [join(fragments)], compression)
        manifest = replace(manifest, branch=branch, increments=increments)
        obsolete = await commit(driver, attempt, manifest, putting, overwrite=overwrite)
    except BaseException:
        if not may_be_stored:
            await give_up(driver, attempt)
        raise
    await settle(driver, attempt)
    if obsolete is not None:
        await delete_attempt(driver, obsolete)
    if not driver.traits.bounded:
        await sweep(driver, limits.CLEAN_UP_S)
