"""Turns a whole checkpoint into one of version 3, which borrows equal blocks from an earlier one.

Files are written and linked with ``os`` only, and the earlier checkpoint may itself have borrowed.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.errors import CheckpointError
from holdfast.storage.format.extents import EXTENT_COLUMNS, WHOLE_IMAGE, Extents
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.runtime import engine

from .ranks import save_as_ranks
from .tiny import Damaged, Tiny, rechunked, state_of

FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Memory with hard links: a disk would be flushed many times."""
NAME = tuple[str, int, int]
"""A file: lender, rank, part."""
PLACE = tuple[NAME, int]
"""A file, and a byte of it."""


@dataclass
class Base:
    """An earlier checkpoint: digests and places of the blocks and pages of each rank's image."""

    folder: Path
    manifest: Manifest
    paths: dict[NAME, Path] = field(default_factory=dict)
    sizes: dict[NAME, int] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path) -> Base:
        base = cls(folder, Manifest.decode((folder / MANIFEST_KEY).read_bytes()))
        for name, file in zip(base.names, base.manifest.files, strict=True):
            base.paths[name] = folder / file.key
            base.sizes[name] = file.nbytes
        return base

    @property
    def names(self) -> list[NAME]:
        m = self.manifest
        if m.extents is None:
            return [(m.attempt, rank, WHOLE_IMAGE) for rank in m.images.rank.tolist()]
        x = m.extents
        lenders = [m.attempt, *x.lenders]
        rows = (x.file_lender.tolist(), x.file_rank.tolist(), x.file_part.tolist())
        return [(lenders[lender], rank, part) for lender, rank, part in zip(*rows, strict=True)]

    def image(self, rank: int, hashed: int) -> int | None:
        """Return the row of the image of ``rank`` if it has this size."""
        rows = self.manifest.images.rank.tolist()
        if rank not in rows:
            return None
        row = rows.index(rank)
        return row if self.manifest.images.hashed_nbytes[row] == hashed else None

    def place(self, image: int, at: int, nbytes: int) -> PLACE:
        (part,) = self.manifest.file_ranges(image, at, at + nbytes)
        return self.names[part.file], part.start

    def bytes_of(self, image: int, start: int, stop: int) -> bytes:
        found = b""
        for part in self.manifest.file_ranges(image, start, stop):
            with open(self.paths[self.names[part.file]], "rb") as file:
                file.seek(part.start)
                found += file.read(part.nbytes)
        assert len(found) == stop - start
        return found


@dataclass
class Writer:
    """Fills the own files of a checkpoint, and notes which others it borrows from."""

    attempt: str
    own: dict[NAME, bytearray] = field(default_factory=dict)
    files: dict[NAME, int] = field(default_factory=dict)
    """All files, with their rows."""
    extents: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Blocks, file and first block of each extent, by image."""
    pages: list[tuple[int, int]] = field(default_factory=list)

    def row(self, name: NAME) -> int:
        return self.files.setdefault(name, len(self.files))

    def add_block(self, place: PLACE, block_nbytes: int) -> None:
        file, block = self.row(place[0]), place[1] // block_nbytes
        assert place[1] % block_nbytes == 0
        extents = self.extents[-1]
        if extents and extents[-1][1] == file and extents[-1][2] + extents[-1][0] == block:
            extents[-1] = (extents[-1][0] + 1, file, extents[-1][2])
        else:
            extents.append((1, file, block))

    def append(self, name: NAME, data: bytes) -> PLACE:
        written = self.own.setdefault(name, bytearray())
        written += data
        return name, len(written) - len(data)

    def add_image(self, m: Manifest, image: int, data: bytes, base: Base | None) -> None:
        """Borrow each block and page that is equal in the base, and append the others."""
        rank, hashed = int(m.images.rank[image]), int(m.images.hashed_nbytes[image])
        block, chunk = m.block_nbytes, m.chunk_nbytes
        assert len(data) == hashed + 16 * -(-hashed // block)
        row = base.image(rank, hashed) if base is not None else None
        old = b"" if base is None or row is None else base.bytes_of(row, hashed, len(data))
        self.extents.append([])
        for number, start in enumerate(range(0, hashed, block)):
            stop = min(start + block, hashed)
            at = slice(16 * number, 16 * number + 16)
            place = base.place(row, start, stop - start) if old else None  # type: ignore[union-attr,arg-type]
            if place is None or old[at] != data[hashed:][at]:
                changed_before = place is not None and place[0][0] == base.manifest.attempt  # type: ignore[union-attr]
                part = int(changed_before and place[0][2] != WHOLE_IMAGE)  # type: ignore[index]
                place = self.append((self.attempt, rank, part), data[start:stop])
            self.add_block(place, block)
        for start in range(0, hashed, chunk):
            count = -(-(min(start + chunk, hashed) - start) // block)
            at = slice(16 * (start // block), 16 * (start // block + count))
            page = data[hashed:][at]
            if old and old[at] == page:
                place = base.place(row, hashed + at.start, len(page))  # type: ignore[union-attr,arg-type]
            else:
                part = int((self.attempt, rank, 1) in self.own)
                place = self.append((self.attempt, rank, part), page)
            self.pages.append((self.row(place[0]), place[1] // 16))

    def table(self, base: Base | None) -> Extents:
        lenders = sorted({name[0] for name in self.files} - {self.attempt})
        sizes = {name: len(data) for name, data in self.own.items()}
        if base is not None:
            sizes |= {name: size for name, size in base.sizes.items() if name not in sizes}
        files = [
            (0 if lender == self.attempt else 1 + lenders.index(lender), rank, part, sizes[name])
            for name in self.files
            for lender, rank, part in [name]
        ]
        flat = [extent for extents in self.extents for extent in extents]
        columns = [
            *np.array(files, np.int64).reshape(-1, 4).T,
            np.array([len(extents) for extents in self.extents], np.int64),
            *np.array(flat, np.int64).reshape(-1, 3).T,
            *np.array(self.pages, np.int64).reshape(-1, 2).T,
        ]
        assert len(columns) == len(EXTENT_COLUMNS)
        return Extents(tuple(lenders), *columns)


def lend(whole: Path, base: Path | None, target: Path) -> Manifest:
    """Write the checkpoint in the folder ``whole``, of version 1, to ``target`` as version 3."""
    m = Manifest.decode((whole / MANIFEST_KEY).read_bytes())
    lender = None if base is None else Base.at(base)
    writer = Writer(m.attempt)
    for image in range(len(m.images)):
        writer.add_image(m, image, (whole / m.image_key(image)).read_bytes(), lender)
    made = replace(m, extents=writer.table(lender))
    for name, file in zip(writer.files, made.files, strict=True):
        path = target / file.key
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in writer.own:
            path.write_bytes(writer.own[name])
        else:
            assert lender is not None
            os.link(lender.paths[name], path)
    (target / MANIFEST_KEY).write_bytes(made.encode())
    return made


def save_borrowing(
    target: Path, states: Sequence[Any], base: Path | None, step: int | None = None, **how: bool
) -> Manifest:
    """Save one state per rank at ``target`` as version 3, borrowing from the checkpoint at
    ``base``. ``how`` as in :func:`save_whole`."""
    whole = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        save_whole(whole, states, step, **how)
        return lend(whole, base, target)
    finally:
        shutil.rmtree(whole)


def save_whole(
    folder: Path, states: Sequence[Any], step: int | None = None, *, small: bool = False
) -> None:
    """Save one state per rank as version 1; ``small``: in chunks and blocks of a few KiB."""
    driver = open_driver(folder)
    try:
        save_as_ranks(driver, states)
        manifest, _ = engine.start(read_manifest(driver)).result()
        if small:
            manifest = Manifest.decode(rechunked(driver, manifest))
        data = replace(manifest, step=step).encode()
        engine.start(driver.put(MANIFEST_KEY, data)).result()
    finally:
        engine.start(driver.close()).result()


def tiny_borrowed() -> dict[str, bytes]:
    """Return the files of a checkpoint like :func:`~support.tiny.tiny`, as version 3."""
    states = [state_of(rank) for rank in range(2)]
    before = [copy.deepcopy(state) for state in states]
    for state in before:
        state["w"][3:5] += 1
    with tempfile.TemporaryDirectory(dir=FOLDER) as root:
        save_whole(Path(root, "base"), before, small=True)
        target = Path(root, "target")
        save_borrowing(target, states, Path(root, "base"), small=True)
        files = [path for path in target.rglob("*") if path.is_file()]
        return {path.relative_to(target).as_posix(): path.read_bytes() for path in files}


class TinyBorrowed(Tiny):
    """A checkpoint of version 3, in memory, that can be damaged and mended."""

    def __init__(self, name: str) -> None:
        files = tiny_borrowed()
        for key, data in files.items():
            engine.start(MemoryDriver(name).put(key, data)).result()
        super().__init__(name, files=files)

    def uses(self, d: Damaged) -> bool:
        """Return whether an image contains any of the damaged bytes."""
        m = self.manifest
        sizes = m.images.nbytes(m.block_nbytes).tolist()
        parts = [part for i, nbytes in enumerate(sizes) for part in m.file_ranges(i, 0, nbytes)]
        return any(
            m.files[part.file].key == d.key
            and part.start < d.stop
            and d.start < part.start + part.nbytes
            for part in parts
        )

    def _names(self, error: CheckpointError, d: Damaged) -> bool:
        """Return whether the error names the file, or all files in which a damaged chunk lies."""
        return d.key in (error.key, *error.message.replace(",", "").split())
