"""The commit protocol: what makes a checkpoint appear whole, or not at all.
``docs/explanation/consistency.md`` argues it.

Keys below a checkpoint's root::

    manifest.safetensors            the checkpoint; its appearance is the commit
    data/<attempt>/attempt.json     from before any data until it is settled: makes it known to collectors; empty, or
                                    what it copies
    data/<attempt>/<rank>.safetensors           or .safetensors.lz4
    data/<attempt>/fate             written once, exclusively: a claim by its leader, "abort" by a later save (:mod:`.fate`)
    data/pruning                    while somebody deletes the checkpoint: put before its last look at the manifest

1. *begin*: every attempt that is not the current checkpoint is sentenced ("abort") and deleted,
   then a new attempt begins. The newest save wins: a zombie of a dead job cannot commit any more.
2. all images become durable.
3. *commit*: the leader claims its own fate. Exactly one of claim and sentence can succeed, and of
   several claims one.
4. It sees ``attempt.json``, and every image, whole. After the claim: a sentence may have been
   carried out, and so removed. Whoever deletes an attempt deletes ``attempt.json`` first, and its
   fate later. So if it is there after a claim that succeeded, there never was a sentence, and
   nobody deletes, or is about to delete, an image.
5. It puts the manifest: atomically, durably. Then it looks for ``data/pruning``. A pruning puts
   that, and then looks whether the manifest is still the one to be deleted. So one of the two sees
   the other: the pruning leaves the manifest alone, or the leader waits until it is over, and puts
   its manifest again if that is gone.
6. *settle*: once the verdict is out, the leader deletes ``attempt.json``: it puts no manifest any
   more. And what the manifest named before goes, if that was settled before 5. Else its leader may
   be putting its manifest once more, since an answer that was lost looks like a put that failed: so
   it is left alone for a grace period.

An attempt that is claimed but not current either is in between 3 and 5, or died there, or was
replaced in step 5 of another. It is left alone for a grace period by the storage's own clock, and
then deleted.

Storage without an atomic exclusive put cannot decide a race between claim and sentence. There
nobody is sentenced: an attempt that is not current is left alone until nothing was written to it
for a longer period of grace. What is promised then rests on clocks: that no saver goes on after it
was idle for that long. And the newest save does not win: whichever puts its manifest last does.

``attempt.json`` of a save is empty: some storage (HDFS) keeps a writer waiting, up to half a
second, until it has counted the replicas of a file that is not.

A *copy* of a checkpoint begins like a save, except that it goes on with an undecided attempt that
was to copy the same one (``attempt.json`` says so): its images are what they would be made again.
Whether whoever began that attempt is dead does not matter. Both write the same bytes under the same
keys, and one of them claims: a claim says whose it is. Where both can, for want of an atomic
exclusive put, neither settles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.aio import at_most, side_by_side
from ...drivers.contract import Driver, ObjectInfo
from ...errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    HoldfastError,
    InvisibleFilesError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    SupersededError,
)
from ..format.manifest import MANIFEST_KEY, Manifest, image_key
from ..runtime.engine import offload
from .attempt import Attempt, Trace, attempts
from .current import attempt_of
from .fate import SENTENCE, claim, put_once, sentence
from .fitness import TRIAL_NBYTES, answers_ranges, refuses_taken
from .prune_lock import PRUNING_KEY, new_sign, pruned_since_s, pruning_over, take_away

__all__ = [
    "CLEAN_UP_S",
    "GRACE_S",
    "IDLE_S",
    "abandon",
    "begin",
    "begin_copy",
    "clock_s",
    "collect",
    "commit",
    "delete_attempt",
    "delete_manifest",
    "give_up",
    "is_settled",
    "settle",
    "still_there",
    "sweep",
]

GRACE_S = 3600.0
"""Longer than any put of a manifest may take."""
CLEAN_UP_S = 30.0
"""How long a save that failed tries to remove what it has written, and one that begins to sweep up
after others."""
IDLE_S = 24 * 3600.0
"""Without a new file for this long, an attempt is dead: where there is no better way to tell."""

_log = logging.getLogger(__name__)


async def begin(driver: Driver) -> Attempt:
    """Collect what dead attempts left, and begin a new one. Where room does not run out, the caller
    sweeps, while it writes.

    Raises StorageError, SupersededError; StorageDownError also where a pruning has died here within
    the last hour, or does not end: see 5.
    """
    attempt = await _announce(driver)
    try:
        *_, found = await side_by_side(
            _see_exclusive(driver, attempt),
            pruning_over(driver, partial(_time_s, driver, attempt), CLEAN_UP_S, GRACE_S),
            _look(driver, attempt),
        )
        await _collect_others(driver, attempt, found)
        if driver.traits.bounded:
            await sweep(driver, CLEAN_UP_S)
    except BaseException:
        await give_up(driver, attempt)
        raise
    return attempt


async def begin_copy(driver: Driver, of: str) -> tuple[Attempt, bool]:
    """Like :func:`begin`, for a copy of the checkpoint whose manifest has the digest ``of``.

    Goes on with an attempt that was to be a copy of the same, if there is one and nobody has
    decided on it: then True. Such an attempt may have more owners, so it is given up by
    :func:`abandon`, and never by deleting it.
    """
    async with _probe(driver) as probe:
        await pruning_over(driver, partial(_time_s, driver, probe), CLEAN_UP_S, GRACE_S)
        former = await _former(driver, probe, of)
        attempt = former or await _announce(driver, {"copy_of": of})
        await _collect_others(driver, probe, await _look(driver, probe), spare=attempt)
        await sweep(driver, CLEAN_UP_S)
    return attempt, former is not None


async def abandon(driver: Driver, attempt: Attempt) -> None:
    """Delete an attempt that others may work on, too, unless one of them has claimed it. Does not
    raise StorageError."""
    with contextlib.suppress(StorageError, CheckpointError):
        try:
            await driver.stat(attempt.marker)
        except NotFoundError:
            # Another owner has settled it, or somebody has deleted it, and what we have written
            # since then is still there.
            if await _current_attempt(driver) != attempt.id:
                await delete_attempt(driver, attempt)
            return
        if driver.traits.exclusive_is_atomic:
            await _collect(driver, attempt, decided=False, now_s=0.0, grace_s=float("inf"))


async def collect(driver: Driver, idle_s: float) -> None:
    """What :func:`begin` collects, without a save to follow: so attempts that live are spared. An
    attempt counts as dead when nothing was written to it for ``idle_s`` seconds. Raises
    StorageError, SupersededError, UnsupportedFormatError."""
    async with _probe(driver) as probe:
        await _collect_others(driver, probe, await _look(driver, probe), idle_s=idle_s)
        flagged_s = await pruned_since_s(driver)
        if (
            flagged_s is not None
            and (await still_there(driver, probe)).modified_s - flagged_s > GRACE_S
        ):
            await driver.delete(PRUNING_KEY)
        await sweep(driver)


async def commit(
    driver: Driver, attempt: Attempt, manifest: Manifest, putting: Callable[[], None] = lambda: None
) -> Attempt | None:
    """Make ``manifest`` the checkpoint; return the attempt that it replaced, if that can be deleted
    now.

    Raises SupersededError, InvisibleFilesError, StorageError: then nothing changed, except that
    after ``putting`` was called, which is just before the put, the manifest may still turn out to
    have been stored.
    """
    data = await offload(manifest.encode)
    try:
        claimed = await claim(driver, attempt.fate)
    except (
        ExistsError,
        NotFoundError,
    ) as error:  # not found: the attempt is being deleted, folder and all
        raise _superseded(driver) from error

    async def now_s() -> float:
        return (await driver.stat(attempt.fate)).modified_s

    obsolete: Attempt | None
    *_, obsolete = await side_by_side(
        still_there(driver, attempt),
        _see_all(driver, manifest),
        answers_ranges(driver, attempt.fate, claimed),
        _obsolete(driver, attempt, now_s),
    )
    putting()
    await driver.put(MANIFEST_KEY, data)
    if not await _stays(driver, now_s):
        await driver.put(MANIFEST_KEY, data)  # whoever prunes now sees this one
    return obsolete


async def _obsolete(
    driver: Driver, attempt: Attempt, now_s: Callable[[], Awaitable[float]]
) -> Attempt | None:
    """What is the checkpoint as long as ``attempt`` is not, if it can be deleted once that is:
    nobody puts its manifest any more, not even after that of ``attempt``."""
    before = None
    with contextlib.suppress(DamagedError):
        before = await _current_attempt(driver)
    if before is None or before == attempt.id:
        return None
    obsolete = Attempt(before)
    return obsolete if await is_settled(driver, obsolete, now_s) else None


async def _stays(driver: Driver, now_s: Callable[[], Awaitable[float]]) -> bool:
    """Whether the manifest that has just been put is there when a pruning that may not have seen it
    is over."""
    await pruning_over(driver, now_s, CLEAN_UP_S, GRACE_S)
    try:
        await driver.stat(MANIFEST_KEY)
    except NotFoundError:
        return False
    return True


async def delete_manifest(driver: Driver, attempt: Attempt) -> bool:
    """Delete the manifest, durably, if it is that of ``attempt``, which is settled; not one that a
    save puts meanwhile. False where it is another, or somebody else is about to delete it. Where it
    is not known what became of the deletion, nobody may delete it, or save here, for an hour.

    Raises StorageError, DamagedError, UnsupportedFormatError.
    """
    flagged_s = await pruned_since_s(driver)
    if flagged_s is not None and await clock_s(driver) - flagged_s <= GRACE_S:
        return False
    sign = new_sign()
    try:
        if flagged_s is None:
            await put_once(driver, PRUNING_KEY, sign)
        else:
            await driver.put(PRUNING_KEY, sign)  # whoever put the other one has died
    except ExistsError:
        return False
    ours = False
    try:
        ours = await _current_attempt(driver) == attempt.id
    finally:
        if not ours:  # nobody need wait for a deletion that will not be
            await take_away(driver, sign, alone=flagged_s is None)
    if ours:
        await driver.delete(MANIFEST_KEY)
        await take_away(driver, sign, alone=flagged_s is None)
    return ours


async def settle(driver: Driver, attempt: Attempt) -> None:
    """Say that ``attempt`` is committed, and that its manifest is not put any more. For whoever has
    put it, alone. Does not raise: after an hour it counts as settled by itself."""
    try:
        await driver.delete(attempt.marker)
    except StorageError as error:
        _log.warning("attempt %s is not settled for an hour: %s", attempt.id, error)


async def is_settled(
    driver: Driver, attempt: Attempt, now_s: Callable[[], Awaitable[float]]
) -> bool:
    """Whether nobody puts the manifest of ``attempt``, which has been put, any more: its leader has
    said so, or a grace period is over by the storage's clock, ``now_s``. Whoever deletes it for
    that reason asks first, and then replaces or deletes the manifest: so what was put before the
    answer is gone. Raises StorageError."""
    try:
        await driver.stat(attempt.marker)
        claimed_s = (await driver.stat(attempt.fate)).modified_s
    except NotFoundError:
        return True
    return await now_s() - claimed_s > GRACE_S


async def clock_s(driver: Driver) -> float:
    """What time it is by the storage's clock. Raises StorageError, SupersededError."""
    async with _probe(driver) as probe:
        return await _time_s(driver, probe)


async def _time_s(driver: Driver, attempt: Attempt) -> float:
    """When an attempt that goes on began."""
    return (await still_there(driver, attempt)).modified_s


async def delete_attempt(driver: Driver, attempt: Attempt) -> bool:
    """Delete an attempt that no manifest names, nor ever will; tell whether that worked. Does not
    raise StorageError: the next save collects what is left."""
    try:
        await driver.delete(attempt.marker)  # first: see step 4
        await driver.delete_all(attempt.prefix)
    except StorageError as error:
        _log.warning("leftovers of attempt %s stay until the next save: %s", attempt.id, error)
        return False
    return True


async def give_up(driver: Driver, attempt: Attempt) -> None:
    """As :func:`delete_attempt`, for an attempt that has failed, and not for long: the storage may
    be gone, and whoever waits is to hear of the failure."""
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            if await delete_attempt(driver, attempt):
                await sweep(driver)  # the folder of all attempts, where this was the only one
    except TimeoutError:
        _log.warning(
            "leftovers of attempt %s stay until the next save: %g s were not enough",
            attempt.id,
            CLEAN_UP_S,
        )


@contextlib.asynccontextmanager
async def _probe(driver: Driver) -> AsyncIterator[Attempt]:
    """An attempt for the length of a block, that is never committed: its files' times tell what
    time the storage has."""
    attempt = await _announce(driver)
    try:
        await _see_exclusive(driver, attempt)
        yield attempt
    finally:
        await delete_attempt(driver, attempt)


async def _announce(driver: Driver, told: Mapping[str, Any] | None = None) -> Attempt:
    """Make a new attempt known."""

    async def announced() -> Attempt:
        attempt = Attempt(
            time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)
        )
        await driver.put(attempt.marker, json.dumps(told).encode() if told else b"", exclusive=True)
        return attempt

    try:
        return await announced()
    except ExistsError:
        # Nobody else has this id: some storage, or its client, has done the request twice, and the
        # second answer came. So another id is taken, to be sure. What was put is collected, like
        # whatever the dead have left.
        return await announced()


async def _see_exclusive(driver: Driver, attempt: Attempt) -> None:
    """See that the storage refuses an exclusive put where the key is taken, before anybody is
    sentenced by one. Raises StorageError where it does not, SupersededError where another save has
    deleted the marker."""
    if not await refuses_taken(driver, attempt.marker):
        raise _superseded(driver)


async def _former(driver: Driver, probe: Attempt, of: str) -> Attempt | None:
    """The newest attempt that a copy of the same checkpoint can go on with."""
    now_s = (await still_there(driver, probe)).modified_s
    # Whoever would collect it by its age must find it young for as long as it takes to look at it,
    # and long after.
    idle_s = float("inf") if driver.traits.exclusive_is_atomic else IDLE_S / 2
    found = await attempts(driver)
    for other in sorted(found, key=lambda a: a.id, reverse=True):
        trace = found[other]
        is_open = not trace.decided and now_s - trace.written_s < idle_s
        if is_open and await _copied(driver, other) == of:
            return other
    return None


async def _copied(driver: Driver, attempt: Attempt) -> str | None:
    """The digest of the manifest that an attempt was to copy, if it was to copy one."""
    try:
        told = json.loads(await driver.get(attempt.marker))
    except (NotFoundError, ValueError, RecursionError):
        return None
    of = told.get("copy_of") if isinstance(told, dict) else None
    return of if isinstance(of, str) else None


async def sweep(driver: Driver, limit_s: float | None = None) -> None:
    """Collect what killed savers left unfinished; for so long, where whoever waits is to get on.
    Does not raise."""
    try:
        async with asyncio.timeout(limit_s):
            await driver.sweep("data")
            await driver.sweep(MANIFEST_KEY)
    except StorageError as error:
        _log.warning("unfinished files stay until the next save: %s", error)
    except TimeoutError:
        _log.warning("unfinished files stay until the next save: %s s were not enough", limit_s)


async def still_there(driver: Driver, attempt: Attempt) -> ObjectInfo:
    """The attempt's marker. Raises SupersededError where it is gone: another save is deleting this
    attempt. Gone it is, too, where what was to be refused (:func:`_see_exclusive`) has come late,
    and been stored in its place."""
    try:
        found = await driver.stat(attempt.marker)
    except NotFoundError as error:
        raise _superseded(driver) from error
    if found.nbytes == TRIAL_NBYTES:
        raise _superseded(driver)
    return found


def _superseded(driver: Driver) -> HoldfastError:
    return SupersededError(
        "another save to this URI began later and took over",
        uri=driver.uri,
        advice="Give every job, and every save in flight, a URI of its own.",
    )


async def _current_attempt(driver: Driver) -> str | None:
    """Raises DamagedError, and UnsupportedFormatError: what a newer release wrote is not to be
    overwritten."""
    try:
        return await attempt_of(driver)
    except NotACheckpointError:
        return None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one look at all attempts has found: the storage's time, the current one, and how long
    others stay that have claimed."""

    now_s: float
    current: str | None
    grace_s: float
    traces: Mapping[Attempt, Trace]


async def _look(driver: Driver, attempt: Attempt) -> _Seen:
    """Look at all attempts, on behalf of ``attempt``. In whichever order the answers come: what has
    changed between them has a fate, which is asked again before anything is deleted, or is too
    young for that."""

    async def current() -> tuple[str | None, float]:
        try:
            return await _current_attempt(driver), GRACE_S
        except (
            DamagedError
        ):  # whichever claimed attempt it named, somebody may want to salvage: keep them all
            return None, float("inf")

    now_s, (named, grace_s), traces = await side_by_side(
        _time_s(driver, attempt), current(), attempts(driver)
    )
    return _Seen(now_s, named, grace_s, traces)


async def _collect_others(
    driver: Driver,
    attempt: Attempt,
    seen: _Seen,
    *,
    spare: Attempt | None = None,
    idle_s: float = float("-inf"),
) -> None:
    """Delete what is neither ``attempt`` nor ``spare`` nor the current checkpoint, nor was written
    to within ``idle_s``."""
    now_s, current, grace_s = seen.now_s, seen.current, seen.grace_s
    for other, trace in seen.traces.items():
        quiet_s = max(
            0.0, now_s - trace.written_s
        )  # some storage tells whole seconds of one object, and finer of a list
        if other in (attempt, spare) or other.id == current or quiet_s < idle_s:
            continue
        if driver.traits.exclusive_is_atomic:
            await _collect(driver, other, trace.decided, now_s, grace_s)
        elif now_s - trace.written_s > max(grace_s, IDLE_S):
            await delete_attempt(driver, other)


async def _collect(
    driver: Driver, attempt: Attempt, decided: bool, now_s: float, grace_s: float
) -> None:
    """Delete an attempt that is not the current checkpoint, if it is certain that it never will be."""
    if not decided:
        await sentence(driver, attempt.fate)
    try:
        claimed = await driver.get(attempt.fate) != SENTENCE
        age_s = now_s - (await driver.stat(attempt.fate)).modified_s
    except NotFoundError:
        return  # another collector was faster
    if not claimed or age_s > grace_s:
        await delete_attempt(driver, attempt)


async def _see_all(driver: Driver, manifest: Manifest) -> None:
    """Raise InvisibleFilesError unless every image is there, with its full size."""
    sizes = manifest.images.file_nbytes(manifest.block_nbytes).tolist()

    async def look(rank: int, nbytes: int) -> None:
        key = image_key(manifest.attempt, rank, manifest.compression)
        try:
            seen = (await driver.stat(key)).nbytes
        except NotFoundError as error:
            raise _invisible(
                driver.uri, key, rank, "is not visible to the committing rank"
            ) from error
        if seen != nbytes:
            raise _invisible(
                driver.uri, key, rank, f"has {seen:,} bytes for the committing rank, not {nbytes:,}"
            )

    await at_most(driver.traits.concurrency, map(look, manifest.images.rank.tolist(), sizes))


def _invisible(uri: str, key: str, rank: int, what: str) -> HoldfastError:
    return InvisibleFilesError(
        f"the image of rank {rank} {what}",
        uri=uri,
        key=key,
        rank=rank,
        advice="Use storage that all hosts share; a local disk serves the ranks of one host only.",
    )
