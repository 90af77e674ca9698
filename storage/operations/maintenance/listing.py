"""Lists the checkpoints at and below a place, marking abandoned ones and missing images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ....core.aio import at_most
from ....drivers.contract import Driver, ObjectInfo
from ....errors import (
    AccessError,
    DamagedError,
    HoldfastError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ...format.lineage import LINEAGE_KEY, ROOT, Lineage
from ...format.manifest import MANIFEST_KEY, Manifest
from ...format.patches import CHANNEL_HEAD_KEY
from ...protocol.attempt import ATTEMPT_KEY_PATTERN
from ...runtime.engine import offload, run
from ..foreign_formats import explains
from ..location import Place, UriLike

_OF_ATTEMPT = re.compile(rf"(?:(?P<folder>.+)/)?{ATTEMPT_KEY_PATTERN}")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One line of a listing.

    ``problem``: why the checkpoint or folder cannot be read; the figures are then zero and
    ``attempt`` is empty. ``nbytes``: of the tensors. ``stored_nbytes``: of the images;
    ``own_nbytes`` of them were written for this checkpoint, the rest lies in files that it shares
    with earlier ones. ``damage``: which image is missing or has the wrong size. ``abandoned``:
    training went back to an earlier step, and this later checkpoint is on the branch it left.
    ``is_version``: it belongs to a weight channel, not to a run.
    """

    path: str
    step: int | None
    world: int
    tensors: int
    nbytes: int
    created_s: float
    problem: str | None = None
    attempt: str = ""
    branch: str = ROOT
    abandoned: bool = False
    damage: str | None = None
    stored_nbytes: int = 0
    own_nbytes: int = 0
    is_version: bool = False

    @property
    def folder(self) -> str:
        """Path of the folder that contains it; ``""`` for the listed place."""
        return self.path.rpartition("/")[0]


@explains("uri", "storage_options")
def list_checkpoints(
    uri: UriLike,
    *,
    last: int | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> list[ListedCheckpoint]:
    """List the checkpoints at and below ``uri``, by relative path (``""``: ``uri`` itself).

    Ordered by step and time; lines with a problem and abandoned checkpoints come first, so a run
    resumes from the last line. ``last``: only that many, whose manifests are the newest by the
    storage's clock; other manifests are not read. Folders that cannot be entered are always listed.
    ``storage_options`` as in :func:`open`.

    A run's ``lineage.json`` that cannot be read is a line with a problem, and no checkpoint of that
    run counts as abandoned. Raises StorageError; UsageError if ``last`` is less than 1.
    """
    if last is not None and last < 1:
        raise UsageError(f"last={last}", advice="Give 1 or more.")
    found = run(_listed(Place.of(uri, storage_options), last))
    return sorted(
        found,
        key=lambda c: (
            c.problem is None,
            not c.abandoned,
            c.step is None,
            c.step or 0,
            c.created_s,
            c.path,
        ),
    )


async def manifest_keys(driver: Driver) -> list[str]:
    """Return the keys of the manifests that this driver lists, in no order."""
    return [info.key async for info in driver.list() if _is_manifest(info)]


async def read_lineage(driver: Driver, folder: str = "") -> Lineage:
    """Return the lineage of the run in ``folder``; without a record, that of a run that never went
    back. Raises DamagedError if the record cannot be read or its name is taken by something else;
    StorageError."""
    key = f"{folder}/{LINEAGE_KEY}".lstrip("/")
    try:
        return Lineage.decode(await driver.get(key))
    except (AccessError, DamagedError) as error:
        raise _unknown_lineage(driver, key, error) from error
    except NotFoundError as error:
        if error.taken_by is None:
            return Lineage()
        raise _unknown_lineage(driver, key, error) from error


def _unknown_lineage(driver: Driver, key: str, cause: HoldfastError) -> DamagedError:
    return DamagedError(
        f"{LINEAGE_KEY} cannot be read, so it is unknown which checkpoints of the run are "
        f"abandoned: {cause.message}",
        uri=driver.uri,
        key=key,
        advice="Restore it; or call resume(state, step=…), which writes a new one: every "
        "checkpoint up to that step then counts.",
    )


def check_lineages(uri: str, listed: Sequence[ListedCheckpoint]) -> None:
    """Raise DamagedError if a run's lineage, and so what is abandoned, cannot be read."""
    for c in listed:
        if c.problem is not None and c.path.rpartition("/")[2] == LINEAGE_KEY:
            raise DamagedError(c.problem, uri=uri, key=c.path)


class Listing:
    """The ``files`` that a driver lists, by key. ``unlisted``: folders it may not enter."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.files: dict[str, ObjectInfo] = {}
        self.unlisted: Sequence[str] = ()
        self.unknown: dict[str, DamagedError] = {}
        """Errors of lineages that :meth:`checkpoints` could not read, by folder."""

    @classmethod
    async def of(cls, driver: Driver) -> Listing:
        """List all files that exist now."""
        listing = cls(driver)
        try:
            async for info in driver.list():
                listing.files[info.key] = info
        except AccessError as error:
            if not error.unlisted:
                raise
            listing.unlisted = error.unlisted
        return listing

    async def unreadable(self) -> list[ListedCheckpoint]:
        """Return a line for each problem besides checkpoints.

        These are folders that may not be entered, unless they belong to a checkpoint, whose own
        line says so; manifests that exist without being listed (a link, a pipe); and lineages that
        :meth:`checkpoints` could not read.
        """
        hidden = await self._hidden()
        folders = [*self.folders(), *(c.path for c in hidden)]
        known = tuple(f"{folder}/data".lstrip("/") for folder in folders)
        hidden += [
            _problem(f"{folder}/{LINEAGE_KEY}".lstrip("/"), error.message)
            for folder, error in self.unknown.items()
        ]
        return hidden + [
            _problem(folder, "the folder cannot be read: access is denied")
            for folder in self.unlisted
            if not f"{folder}/".startswith(tuple(f"{data}/" for data in known))
        ]

    async def _hidden(self) -> list[ListedCheckpoint]:
        """Return a line for each folder that may hold an attempt but has no readable manifest."""

        async def look(folder: str) -> str | None:
            return await unreadable(self._driver, f"{folder}/{MANIFEST_KEY}".lstrip("/"))

        matches = filter(None, map(_OF_ATTEMPT.fullmatch, self.files))
        with_attempts = {match["folder"] or "" for match in matches}
        suspects = sorted(with_attempts.difference(self.folders()))
        problems = await at_most(self._driver.traits.concurrency, map(look, suspects))
        return [
            _problem(folder, f"the manifest cannot be read: {problem}")
            for folder, problem in zip(suspects, problems, strict=True)
            if problem is not None
        ]

    def folders(self) -> list[str]:
        """Return the folders that contain a manifest."""
        return [info.key.rpartition("/")[0] for info in self.files.values() if _is_manifest(info)]

    async def checkpoints(self, folders: Sequence[str]) -> list[ListedCheckpoint]:
        """Return the checkpoints in these folders, in order; reads several at a time."""
        concurrency = self._driver.traits.concurrency
        found = await at_most(concurrency, map(self._line, folders))
        found = [replace(c, is_version=c.is_version or self._is_numbered(c)) for c in found]
        runs = sorted({c.folder for c in found if _is_in_run(c)})
        read = await at_most(concurrency, map(self._lineage, runs))
        lineages = dict(zip(runs, read, strict=True))

        def is_abandoned(c: ListedCheckpoint) -> bool:
            return _is_in_run(c) and not lineages[c.folder].is_live(c.branch, c.step)

        return [replace(c, abandoned=is_abandoned(c)) for c in found]

    def _is_numbered(self, c: ListedCheckpoint) -> bool:
        """Return whether a checkpoint lies in a weight channel, under a number."""
        head = f"{c.folder}/{CHANNEL_HEAD_KEY}".lstrip("/")
        return c.path.rpartition("/")[2].isdecimal() and head in self.files

    async def _lineage(self, folder: str) -> Lineage:
        """Return a run's lineage; one that is unreadable is noted, and counts as never left."""
        recorded = f"{folder}/{LINEAGE_KEY}".lstrip("/") in self.files
        if self._driver.remote and not recorded:
            return Lineage()  # only local file systems have entries that a listing omits
        try:
            return await read_lineage(self._driver, folder)
        except DamagedError as error:
            self.unknown[folder] = error
            return Lineage()

    async def manifest(self, folder: str) -> Manifest:
        """Return the manifest in a folder. Raises HoldfastError."""
        data = await self._driver.get(f"{folder}/{MANIFEST_KEY}".lstrip("/"))
        return await offload(Manifest.decode, data)

    async def _line(self, folder: str) -> ListedCheckpoint:
        try:
            m = await self.manifest(folder)
        except HoldfastError as error:
            return _problem(folder, error.message)
        try:
            damage = await self._damage(folder, m)
        except StorageError as error:
            if error.temporary:
                raise
            return _problem(folder, f"an image cannot be accessed: {error.message}")
        return ListedCheckpoint(
            folder,
            m.step,
            m.world,
            len(m.tensors),
            m.tensor_nbytes,
            m.created_s,
            attempt=m.attempt,
            branch=m.branch,
            damage=damage,
            stored_nbytes=m.stored_nbytes,
            own_nbytes=m.own_nbytes,
            is_version=m.bases is not None,
        )

    async def _damage(self, folder: str, m: Manifest) -> str | None:
        """Return the first missing file of an image or wrong size, or None."""
        for file in m.files:
            key = f"{folder}/{file.key}".lstrip("/")
            listed = self.files.get(key)
            if listed is not None and listed.nbytes == file.nbytes:
                continue
            # The listing may be older than the manifest, if another save has put it since.
            found = await size_of(self._driver, key)
            what = f"the image of rank {file.rank}"
            if m.extents is not None:
                what = file.key
            if found is None:
                return f"{what} is missing"
            if found != file.nbytes:
                return f"{what} has {found:,} bytes instead of {file.nbytes:,}"
        return None


def _is_in_run(c: ListedCheckpoint) -> bool:
    return bool(c.path) and c.problem is None and not c.is_version


def _problem(folder: str, problem: str) -> ListedCheckpoint:
    return ListedCheckpoint(folder, None, 0, 0, 0, 0.0, problem)


async def unreadable(driver: Driver, key: str) -> str | None:
    """Return why an unlisted object cannot be read; None if it can, or does not exist."""
    try:
        await driver.stat(key)
    except AccessError as error:
        return error.message
    except NotFoundError as error:
        return error.taken_by and error.message
    return None


async def size_of(driver: Driver, key: str) -> int | None:
    """Return the size of an object in bytes; None if it does not exist."""
    try:
        return (await driver.stat(key)).nbytes
    except NotFoundError:
        return None


async def _listed(place: Place, last: int | None) -> list[ListedCheckpoint]:
    async with place.opened() as driver:
        listing = await Listing.of(driver)
        folders = listing.folders()
        if last is not None:
            stored = [info for info in listing.files.values() if _is_manifest(info)]
            newest = sorted(stored, key=lambda info: info.modified_s)[-last:]
            folders = [info.key.rpartition("/")[0] for info in newest]
        return [*await listing.checkpoints(folders), *await listing.unreadable()]


def _is_manifest(info: ObjectInfo) -> bool:
    return info.key.rpartition("/")[2] == MANIFEST_KEY
