"""Versions of a weight channel, read one by one: listed, described, opened as whole checkpoints.

Needs neither torch nor a job, unlike a subscriber.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from ...core.aio import at_most
from ...drivers.registry import open_driver
from ...errors import NotACheckpointError, NotFoundError
from ..operations.location import Place, UriLike
from ..operations.maintenance.copy import BUDGET_NBYTES, Orders, Sent, copy_checkpoint
from ..operations.reading.reader import Checkpoint
from ..runtime.engine import check_may_wait, interrupt, run, start
from ..runtime.progress import ProgressCallback, ProgressReporter
from .channel import Head, awaited, leased, newest_after, read_head, version_key
from .leases import Lease
from .memory import for_reading
from .mirror import Mirror, Version

_CHUNKS_HELD = 32
"""Chunks in memory while one version is read in order."""


@dataclass(frozen=True, slots=True)
class ListedVersion:
    """A version of a channel.

    ``version``: as its publisher numbered it; ``sequence``: its number in the channel. ``nbytes``:
    of its tensors; ``stored_nbytes``: of all its files. ``is_anchor``: it is stored whole.
    ``is_offered``: subscribers may begin to read it; others are kept for subscribers that are
    reading, or as bases of patches. ``leases``: of subscribers that are reading it.
    """

    sequence: int
    version: int | None
    is_anchor: bool
    created_s: float
    nbytes: int
    stored_nbytes: int
    is_offered: bool
    leases: int


@dataclass(frozen=True, slots=True)
class Described:
    """Contents of the files of a version.

    ``changed``: share of the 16-bit units of its images that differ from the version before; None
    for an anchor without patches. ``rank_nbytes``: bytes of files, by rank.
    """

    changed: float | None
    rank_nbytes: Mapping[int, int]


class Channel:
    """Reads the channel ``uri``. ``holds_all``: keep the weights in host memory, so that the next
    version is read as a patch of them. Otherwise each version is read from its anchor, within
    half a gigabyte of memory."""

    def __init__(
        self,
        uri: UriLike,
        *,
        holds_all: bool = False,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        check_may_wait()
        self._driver = open_driver(for_reading(uri), **(storage_options or {}))
        self._mirror = Mirror(self._driver, None if holds_all else _CHUNKS_HELD)
        self.uri = self._driver.uri

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._mirror.forget()
        run(self._driver.close())

    def versions(self) -> list[ListedVersion]:
        """Return the versions that have not been deleted, oldest first. Raises DamagedError and
        StorageError."""
        return run(self._versions())

    def find(self, version: int | None = None) -> Version:
        """Return the ``version`` of this number, or the newest one. Raises NotACheckpointError if
        nothing is published here; NotFoundError if the channel does not have it."""
        return run(self._find(version))

    def at(self, sequence: int, attempt: str = "") -> Version:
        """Return the version with this number in the channel. Raises NotFoundError."""
        return run(self._mirror.version(sequence, attempt))

    def wait(self, after: int, timeout_s: float) -> Version | None:
        """Return the newest version, once it is newer than ``after``, by the publisher's numbers;
        None after ``timeout_s``."""

        async def is_newer(sequence: int) -> bool:
            return ((await self._mirror.version(sequence)).manifest.step or 0) > after

        sequence = run(awaited(self._driver, is_newer, timeout_s))
        return self.at(sequence) if sequence else None

    def forget(self) -> None:
        """Drop all weights from memory, so that they are read from an anchor again."""
        self._mirror.forget()

    def describe(self, version: Version) -> Described:
        """Return the contents of a version's files; reads a little of its patches. Raises
        DamagedError."""
        return run(self._describe(version))

    def opened(self, version: Version) -> Checkpoint:
        """Open a version as a whole checkpoint, which reads it through this channel. Raises
        NotFoundError."""
        driver = self._mirror.at(version)
        return Checkpoint(driver, version.whole, len(version.manifest.encode()))

    @contextmanager
    def leased(self, version: Version) -> Iterator[None]:
        """Keep a version from being deleted. Raises NotFoundError if it is not offered any more."""
        lease = Lease(self._driver)
        renewing = None
        try:
            if run(lease.take(version.sequence)) != version.sequence:
                raise self._gone(version.manifest.step)
            renewing = start(lease.renew())
            yield
        finally:
            if renewing is not None:
                interrupt(renewing)
            run(lease.release())

    def copy(
        self, version: Version, dest: UriLike, *, overwrite: bool, progress: ProgressCallback
    ) -> Sent:
        """Copy a version to ``dest`` as a whole checkpoint: verified, atomic and repeatable, and
        with the errors of :func:`holdfast.copy`."""
        with ProgressReporter(progress) as reporter:
            return run(self._copy(version, Place.of(dest, None), overwrite, reporter))

    def _gone(self, version: int | None) -> NotFoundError:
        return NotFoundError(
            f"the channel does not offer version {version}",
            uri=self.uri,
            advice="`holdfast weights ls` shows the versions that it offers.",
        )

    async def _head(self) -> tuple[Head, list[int]]:
        """Return the head, and the numbers of all versions."""
        head = await read_head(self._driver)
        newest = await newest_after(self._driver, head.sequence)
        found = [*head.kept, *range(head.sequence + 1, newest + 1)]
        if not found:
            raise NotACheckpointError(
                "no version of weights is published here",
                uri=self.uri,
                advice="Is it the URI that the trainer gives to holdfast.publish?",
            )
        return head, found

    async def _versions(self) -> list[ListedVersion]:
        head, found = await self._head()
        held = await leased(self._driver, time.time())

        async def look(sequence: int) -> ListedVersion | None:
            try:
                version = await self._mirror.version(sequence)
            except NotFoundError:  # it has just been deleted
                return None
            m = version.manifest
            key = version_key(sequence)
            stored_nbytes = sum([info.nbytes async for info in self._driver.list(key)])
            return ListedVersion(
                sequence=sequence,
                version=m.step,
                is_anchor=not m.is_patched,
                created_s=m.created_s,
                nbytes=m.tensor_nbytes,
                stored_nbytes=stored_nbytes,
                is_offered=sequence >= head.offered,
                leases=held.count(sequence),
            )

        listed = await at_most(self._driver.traits.concurrency, map(look, found))
        return [version for version in listed if version is not None]

    async def _find(self, number: int | None) -> Version:
        _, found = await self._head()
        for sequence in reversed(found):
            try:
                version = await self._mirror.version(sequence)
            except NotFoundError:
                continue
            if number is None or version.manifest.step == number:
                return version
        raise self._gone(number)

    async def _describe(self, version: Version) -> Described:
        m = version.manifest
        files = {file.rank: file.nbytes for file in m.files}
        if m.bases is None:
            return Described(None, files)
        changed = 0
        for image, rank in enumerate(m.images.rank.tolist()):
            patched = await self._mirror.patched(version, image)
            changed += patched.changed_nbytes
            files[rank] += patched.file_nbytes if m.bases.whole else 0
        return Described(changed / max(1, int(m.images.hashed_nbytes.sum())), files)

    async def _copy(
        self, version: Version, dest: Place, overwrite: bool, reporter: ProgressReporter
    ) -> Sent:
        done_nbytes = 0

        def sent(nbytes: int) -> None:
            nonlocal done_nbytes
            done_nbytes += nbytes
            reporter.report(done_nbytes, version.whole.stored_nbytes)

        async with dest.opened() as ours:
            theirs = self._mirror.at(version)
            _, copied = await copy_checkpoint(theirs, ours, Orders(overwrite, BUDGET_NBYTES), sent)
        return copied
