"""Counts the space of checkpoints that share files: each file once, however many hold it.

A hard link below ``lent/<lender>/`` has the name that the file has in ``data/<lender>/``, so keys
tell which files are the same, on any storage.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ....core.aio import at_most
from ....drivers.contract import ObjectInfo
from ....errors import HoldfastError, StorageError, UriError
from ...format.manifest import ATTEMPT_PATTERN, PATCH, Manifest, image_key
from ...runtime.engine import offload, run
from ..foreign_formats import explains
from ..location import Place, UriLike
from .listing import Listing

_FILE = re.compile(
    rf"(?:(?P<folder>.+)/)?data/(?P<attempt>{ATTEMPT_PATTERN})/"
    rf"(?:lent/(?P<lender>{ATTEMPT_PATTERN})/)?(?P<name>[0-9]+\.[^/]+)"
)
_KEYS_MAX = 100_000
"""Limit of the keys to list in the folder of a run, for the names of lenders."""


class Holder(NamedTuple):
    """An attempt in the folder at ``path``, to which a file belongs."""

    path: str
    attempt: str


@dataclass(eq=False, slots=True)
class StoredOnce:
    """A file of ``nbytes``. ``writer``: the attempt that wrote it. ``uses``: ranges of bytes that
    checkpoints use."""

    writer: str
    nbytes: int
    holders: set[Holder] = field(default_factory=set)
    uses: set[tuple[int, int]] = field(default_factory=set)

    def live_nbytes(self) -> int:
        """Return the number of bytes in use."""
        live = end = 0
        for start, stop in sorted(self.uses):
            live += max(0, stop - max(start, end))
            end = max(end, stop)
        return live


def files_by_key(listed: Iterable[ObjectInfo]) -> dict[str, StoredOnce]:
    """Return the file of each key that belongs to an image. Links to a file have the same one. A
    checkpoint that was copied by hand has files of its own."""
    matches = ((info, _FILE.fullmatch(info.key)) for info in listed)
    found = [(info, match) for info, match in matches if match is not None]
    found.sort(key=lambda pair: pair[1]["lender"] is not None)
    files: dict[tuple[str, str], StoredOnce] = {}
    by_key = {}
    for info, match in found:
        writer = match["lender"] or match["attempt"]
        file = files.get((writer, match["name"]))
        if file is None or match["lender"] is None:
            file = files[writer, match["name"]] = StoredOnce(writer, info.nbytes)
        file.holders.add(Holder(match["folder"] or "", match["attempt"]))
        by_key[info.key] = file
    return by_key


def name_of(key: str) -> tuple[str, str]:
    """Return the writer and the name of a file; the same for all links to it. ``key``: in the
    folder of a checkpoint. ``("", key)`` if it belongs to no image."""
    match = _FILE.fullmatch(key)
    return (match["lender"] or match["attempt"], match["name"]) if match else ("", key)


@dataclass(frozen=True, slots=True)
class Shared:
    """Files of deleted checkpoints that others hold. ``nbytes``: of the files that stay, each once;
    ``paths``: their holders. ``links_nbytes``: of all deleted links that free no space."""

    nbytes: int = 0
    paths: tuple[str, ...] = ()
    links_nbytes: int = 0


def shared_by(files: Mapping[str, StoredOnce], gone: Collection[Holder]) -> Shared:
    """Return the files that stay if the attempts in ``gone`` are deleted. Pure."""
    nbytes = links_nbytes = 0
    paths: set[str] = set()
    for file in set(files.values()):
        going = file.holders.intersection(gone)
        kept = file.holders - going
        if going and kept:
            nbytes += file.nbytes
            paths.update(holder.path for holder in kept)
        links_nbytes += file.nbytes * max(0, len(going) - (not kept))
    return Shared(nbytes, tuple(sorted(paths)), links_nbytes)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files that one attempt wrote and the same checkpoints hold.

    ``path``: of the checkpoint that wrote them; None if it is gone. ``live_nbytes``: bytes in use
    by any checkpoint. ``held_by``: paths of all that hold the files, among them unfinished saves.
    """

    attempt: str
    path: str | None
    files: int
    nbytes: int
    live_nbytes: int
    held_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """The space below ``uri``, by groups of files in the order in which they were written.
    ``other_nbytes``: of manifests, telemetry and all other files."""

    uri: str
    groups: tuple[FileGroup, ...]
    other_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all files, each counted once."""
        return sum(group.nbytes for group in self.groups) + self.other_nbytes


@explains("uri", "storage_options")
def space(uri: UriLike, *, storage_options: Mapping[str, object] | None = None) -> SpaceReport:
    """Return the space of the checkpoints at and below ``uri``. Raises StorageError."""
    return run(_space(Place.of(uri, storage_options)))


async def _space(place: Place) -> SpaceReport:
    async with place.opened() as driver:
        listing = await Listing.of(driver)
        files = files_by_key(listing.files.values())

        async def look(folder: str) -> None:
            with contextlib.suppress(HoldfastError):  # `ls` shows it
                await offload(_note_uses, files, folder, await listing.manifest(folder))

        await at_most(driver.traits.concurrency, map(look, listing.folders()))
    other_nbytes = sum(info.nbytes for key, info in listing.files.items() if key not in files)
    return SpaceReport(place.uri.redacted, _groups(files), other_nbytes)


def _note_uses(files: Mapping[str, StoredOnce], folder: str, m: Manifest) -> None:
    """Add the ranges of files that the checkpoint in ``folder`` uses."""
    held = [files.get(f"{folder}/{stored.key}".lstrip("/")) for stored in m.files]
    for image, nbytes in enumerate(m.images.file_nbytes(m.block_nbytes).tolist()):
        for part in m.file_ranges(image, 0, nbytes):
            file = held[part.file]
            if file is not None:
                file.uses.add((part.start, part.start + part.nbytes))
    if m.bases is not None and m.bases.whole:
        for rank in m.images.rank.tolist():
            file = files.get(f"{folder}/{image_key(m.attempt, rank, PATCH)}".lstrip("/"))
            if file is not None:
                file.uses.add((0, file.nbytes))


def _groups(files: Mapping[str, StoredOnce]) -> tuple[FileGroup, ...]:
    groups: dict[tuple[str, tuple[Holder, ...]], list[StoredOnce]] = {}
    for file in set(files.values()):
        groups.setdefault((file.writer, tuple(sorted(file.holders))), []).append(file)
    return tuple(
        FileGroup(
            attempt=writer,
            path=next((path for path, attempt in holders if attempt == writer), None),
            files=len(group),
            nbytes=sum(file.nbytes for file in group),
            live_nbytes=sum(file.live_nbytes() for file in group),
            held_by=tuple(path for path, _ in holders),
        )
        for (writer, holders), group in sorted(groups.items())
    )


async def paths_of(place: Place, attempts: Collection[str]) -> dict[str, str]:
    """Return the paths of checkpoints beside ``place``, by attempt: of those of ``attempts`` that
    can be found."""
    found: dict[str, str] = {}
    with contextlib.suppress(UriError, StorageError):
        folder, _ = place.divided()
        async with folder.opened() as driver:
            seen = 0
            async for info in driver.list():
                seen += 1
                if len(found) == len(attempts) or seen > _KEYS_MAX:
                    break
                match = _FILE.fullmatch(info.key)
                if match and match["attempt"] in attempts and match["folder"]:
                    found[match["attempt"]] = match["folder"]
    return found
