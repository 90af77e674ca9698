"""Which checkpoints are at and below a place, which of them are abandoned, and which have lost
files."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.aio import at_most
from ...drivers.contract import Driver, ObjectInfo
from ...drivers.registry import open_driver
from ...errors import (
    AccessError,
    DamagedError,
    HoldfastError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ..format.lineage import LINEAGE_KEY, ROOT, Lineage
from ..format.manifest import MANIFEST_KEY, Manifest
from ..protocol.attempt import ATTEMPT_KEY_PATTERN
from ..runtime.engine import check_may_wait, offload, start
from .foreign import explains

__all__ = [
    "ListedCheckpoint",
    "Listing",
    "check_lineages",
    "list_checkpoints",
    "listed",
    "manifest_keys",
    "read_lineage",
]

_OF_ATTEMPT = re.compile(rf"(?:(?P<folder>.+)/)?{ATTEMPT_KEY_PATTERN}")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One line of a listing.

    ``problem`` says why the checkpoint, or the folder, cannot be read; then the figures are zero,
    and ``attempt`` empty. ``damage`` says which image is missing, or of another size than it was
    written with.
    ``abandoned``: training went back to an earlier step, and this checkpoint is later, on the
    branch that was left.
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

    @property
    def folder(self) -> str:
        """The folder that it lies in, by path; ``""`` for the place that is listed."""
        return self.path.rpartition("/")[0]


@explains("uri", "storage_options")
def list_checkpoints(
    uri: str | os.PathLike[str],
    *,
    last: int | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> list[ListedCheckpoint]:
    """List the checkpoints at and below ``uri``, by path relative to it (``""``: ``uri`` itself),
    ordered by step and time. Lines with a problem and abandoned ones come first, so a run goes on
    from the last one. ``last``: only so many, whose manifests are the newest by the storage's
    clock; no other manifest is read. Folders that cannot be entered are listed besides.
    ``storage_options`` as in :func:`open`.

    Where the record of a run's branches cannot be read, that file, ``lineage.json``, is a line with
    a problem, and no checkpoint of that run counts as abandoned.

    Raises StorageError; UsageError where ``last`` is less than 1.
    """
    if last is not None and last < 1:
        raise UsageError(f"the last {last} checkpoints are none", advice="Give 1 or more.")
    check_may_wait()
    driver = open_driver(uri, **(storage_options or {}))
    try:
        found: list[ListedCheckpoint] = start(_listed(driver, last)).result()
    finally:
        start(driver.close()).result()
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
    """Where the manifests are that this driver sees, in no order."""
    return [info.key async for info in driver.list() if _is_manifest(info)]


async def read_lineage(driver: Driver, folder: str = "") -> Lineage:
    """The lineage of the run in ``folder``; where none is recorded, that of a run that never went
    back.

    Raises DamagedError where the record cannot be read, or something else has its name;
    StorageError.
    """
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
        f"{LINEAGE_KEY} cannot be read, so which checkpoints of the run are abandoned is not "
        f"known: {cause.message}",
        uri=driver.uri,
        key=key,
        advice="Restore it; or call resume(state, step=…), which writes a new one: every "
        "checkpoint up to that step then counts.",
    )


def check_lineages(uri: str, listed: Sequence[ListedCheckpoint]) -> None:
    """Raise DamagedError if the listing of ``uri`` says that a run's lineage cannot be read, so
    that any of its checkpoints may be abandoned."""
    for c in listed:
        if c.problem is not None and c.path.rpartition("/")[2] == LINEAGE_KEY:
            raise DamagedError(c.problem, uri=uri, key=c.path)


async def listed(driver: Driver, unlisted: list[str]) -> AsyncIterator[ObjectInfo]:
    """Yield every object of a driver, and add the folders that it may not enter to ``unlisted``.
    Raises StorageError."""
    try:
        async for info in driver.list():
            yield info
    except AccessError as error:
        if not error.unlisted:
            raise
        unlisted += error.unlisted


class Listing:
    """The ``files`` that a driver lists, by key, with their sizes in bytes. ``unlisted``: folders
    that it may not enter."""

    def __init__(
        self, driver: Driver, files: Mapping[str, int], unlisted: Sequence[str] = ()
    ) -> None:
        self._driver = driver
        self._files = files
        self._unlisted = unlisted
        self.unknown: dict[str, DamagedError] = {}
        """By folder, why the lineage of its run is not known; of those that :meth:`checkpoints` has
        looked at."""

    @classmethod
    async def of(cls, driver: Driver) -> Listing:
        """Return all that is there now."""
        unlisted: list[str] = []
        files = {info.key: info.nbytes async for info in listed(driver, unlisted)}
        return cls(driver, files, unlisted)

    async def unreadable(self) -> list[ListedCheckpoint]:
        """Return a line for each folder that may not be entered, unless it belongs to a checkpoint,
        whose own line says so; for each whose manifest is not listed, but is there: a link, a pipe;
        and for each lineage that :meth:`checkpoints` could not read."""
        hidden = await self._hidden()
        folders = [*self.folders(), *(c.path for c in hidden)]
        known = tuple(f"{folder}/data".lstrip("/") for folder in folders)
        hidden += [
            _problem(f"{folder}/{LINEAGE_KEY}".lstrip("/"), error.message)
            for folder, error in self.unknown.items()
        ]
        return hidden + [
            _problem(folder, "the folder cannot be read: access is denied")
            for folder in self._unlisted
            if not f"{folder}/".startswith(tuple(f"{data}/" for data in known))
        ]

    async def _hidden(self) -> list[ListedCheckpoint]:
        """Return a line for each folder with files of an attempt whose manifest may not be looked
        at, or is no file."""
        found: list[ListedCheckpoint] = []

        async def look(folder: str) -> None:
            problem = await unreadable(self._driver, f"{folder}/{MANIFEST_KEY}".lstrip("/"))
            if problem is not None:
                found.append(_problem(folder, f"the manifest cannot be read: {problem}"))

        matches = filter(None, map(_OF_ATTEMPT.fullmatch, self._files))
        with_attempts = {match["folder"] or "" for match in matches}
        suspects = with_attempts.difference(self.folders())
        await at_most(self._driver.traits.concurrency, map(look, sorted(suspects)))
        return found

    def folders(self) -> list[str]:
        """Folders in which a manifest lies."""
        return [
            key.rpartition("/")[0] for key in self._files if key.rpartition("/")[2] == MANIFEST_KEY
        ]

    async def checkpoints(self, folders: Sequence[str]) -> list[ListedCheckpoint]:
        """Return the checkpoints in these folders, in no order. Several manifests are read at a
        time, since each takes a round trip."""
        found: list[ListedCheckpoint] = []

        async def look(folder: str) -> None:
            found.append(await self._line(folder))

        await at_most(self._driver.traits.concurrency, map(look, folders))
        return await self._marked(found)

    async def _marked(self, checkpoints: Sequence[ListedCheckpoint]) -> list[ListedCheckpoint]:
        """Return the same, with abandoned ones marked. Runs record their branches separately."""
        runs: dict[str, Lineage] = {}

        async def read(run: str) -> None:
            runs[run] = await self._lineage(run)

        def is_abandoned(c: ListedCheckpoint) -> bool:
            return _is_in_run(c) and not runs[c.folder].is_live(c.branch, c.step)

        folders = {c.folder for c in checkpoints if _is_in_run(c)}
        await at_most(self._driver.traits.concurrency, map(read, sorted(folders)))
        return [replace(c, abandoned=is_abandoned(c)) for c in checkpoints]

    async def _lineage(self, folder: str) -> Lineage:
        """Return the lineage of the run in ``folder``; where it cannot be read, note that in
        ``unknown``, and return that of a run that never went back."""
        recorded = f"{folder}/{LINEAGE_KEY}".lstrip("/") in self._files
        if self._driver.remote and not recorded:
            return Lineage()  # only on a local file system is there what a listing leaves out
        try:
            return await read_lineage(self._driver, folder)
        except DamagedError as error:
            self.unknown[folder] = error
            return Lineage()

    async def _line(self, folder: str) -> ListedCheckpoint:
        try:
            data = await self._driver.get(f"{folder}/{MANIFEST_KEY}".lstrip("/"))
            m = await offload(Manifest.decode, data)
        except HoldfastError as error:
            return _problem(folder, error.message)
        try:
            damage = await self._damage(folder, m)
        except StorageError as error:
            if error.temporary:
                raise
            return _problem(folder, f"an image cannot be looked at: {error.message}")
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
        )

    async def _damage(self, folder: str, m: Manifest) -> str | None:
        """What is wrong with the files of images, by a look at their sizes."""
        sizes = m.images.file_nbytes(m.block_nbytes).tolist()
        for image, nbytes in enumerate(sizes):
            key = f"{folder}/{m.image_key(image)}".lstrip("/")
            if self._files.get(key) == nbytes:
                continue
            # The listing may be older than the manifest, which another save has put since.
            found = await _size(self._driver, key)
            rank = int(m.images.rank[image])
            if found is None:
                return f"the image of rank {rank} is missing"
            if found != nbytes:
                return f"the image of rank {rank} has {found:,} bytes instead of {nbytes:,}"
        return None


def _is_in_run(c: ListedCheckpoint) -> bool:
    """Return whether ``c`` can be read, and lies in the folder of a run."""
    return bool(c.path) and c.problem is None


def _problem(folder: str, problem: str) -> ListedCheckpoint:
    return ListedCheckpoint(folder, None, 0, 0, 0, 0.0, problem)


async def unreadable(driver: Driver, key: str) -> str | None:
    """Return why an object with that name that is not listed cannot be read; None where there is
    nothing of that name, or it can be. Raises StorageError."""
    try:
        await driver.stat(key)
    except AccessError as error:
        return error.message
    except NotFoundError as error:
        return error.taken_by and error.message
    return None


async def _size(driver: Driver, key: str) -> int | None:
    try:
        return (await driver.stat(key)).nbytes
    except NotFoundError:
        return None


async def _listed(driver: Driver, last: int | None) -> list[ListedCheckpoint]:
    unlisted: list[str] = []
    infos = [info async for info in listed(driver, unlisted)]
    listing = Listing(driver, {info.key: info.nbytes for info in infos}, unlisted)
    folders = listing.folders()
    if last is not None:
        stored_s = {info.key: info.modified_s for info in infos if _is_manifest(info)}
        newest = sorted(stored_s, key=stored_s.__getitem__)[-last:]
        folders = [key.rpartition("/")[0] for key in newest]
    return [*await listing.checkpoints(folders), *await listing.unreadable()]


def _is_manifest(info: ObjectInfo) -> bool:
    return info.key.rpartition("/")[2] == MANIFEST_KEY
