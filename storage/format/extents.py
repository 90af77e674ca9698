"""Extents: the places of images in files that a checkpoint shares with earlier ones.

Images are those of any checkpoint; this maps their ranges to ranges of files. A file is the
attempt's own, or a hard link to a file of an earlier attempt, the *lender*.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.decoded_json import Json, strs_in
from ...core.units import ceil_div
from ...errors import DamagedError
from ...planner.columns import Ints, ranges
from ...planner.image import DIGEST_NBYTES
from .columns import Columns, decode_columns, encode_columns, narrowed
from .tables import ImageTable, ints_of

FILES_MAX = 4096
"""Most files of one rank."""
EXTENT_COLUMNS = (
    *("file.lender", "file.rank", "file.part", "file.nbytes"),
    *("extent.count", "extent.blocks", "extent.file", "extent.block"),
    *("page.file", "page.slot"),
)
"""Columns of version 3, in the order of the attributes of :class:`Extents`."""
WHOLE_IMAGE = 2
"""``file_part`` of the image of a rank that saved it as a whole; other parts hold blocks only."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """``nbytes`` of the file in row ``file``, from byte ``start``. They are the bytes of an image
    from ``image_start``."""

    file: int
    start: int
    image_start: int
    nbytes: int


@dataclass(frozen=True)
class Extents:
    """Columns of files (F,), of extents per image (I,), of extents (E,) and of digest pages (C,).

    ``file_lender``: 0, or 1 + an index into ``lenders``. Extents cover the blocks of all images, in
    order: ``extent_blocks`` of them lie in ``extent_file``, from its block ``extent_block``. The
    page of a chunk lies in ``page_file``, from byte 16 × ``page_slot``.
    """

    lenders: tuple[str, ...]
    file_lender: Ints
    file_rank: Ints
    file_part: Ints
    file_nbytes: Ints
    extent_count: Ints
    extent_blocks: Ints
    extent_file: Ints
    extent_block: Ints
    page_file: Ints
    page_slot: Ints

    @classmethod
    def of_images(cls, images: ImageTable, chunk_nbytes: int, block_nbytes: int) -> Extents:
        """Return the extents of images that are files of their own."""
        hashed_nbytes = images.hashed_nbytes
        rows = np.arange(len(images))
        chunks = images.chunks(chunk_nbytes)
        image, index = ranges(np.zeros_like(chunks), chunks)
        slot = hashed_nbytes[image] // DIGEST_NBYTES + index * (chunk_nbytes // block_nbytes)
        none = np.zeros_like(rows)
        return cls(
            (),
            *(none, images.rank, none + WHOLE_IMAGE, images.nbytes(block_nbytes)),
            *(none + 1, ceil_div(hashed_nbytes, block_nbytes), rows, none),
            *(image, slot),
        )

    @classmethod
    def joined(cls, parts: Sequence[Extents]) -> Extents:
        """Concatenate the extents of different images, which share no files."""
        lenders = tuple(dict.fromkeys(lender for part in parts for lender in part.lenders))
        row = {lender: 1 + i for i, lender in enumerate(lenders)}
        rows = [np.array([0, *map(row.__getitem__, part.lenders)]) for part in parts]
        files = np.cumsum([0, *(part.file_nbytes.size for part in parts)]).tolist()
        columns: dict[str, list[Ints]] = {name: [] for name in EXTENT_COLUMNS}
        for part, lender, first in zip(parts, rows, files[:-1], strict=True):
            moved = dict(part.columns())
            moved["file.lender"] = lender[part.file_lender]
            moved["extent.file"] = part.extent_file + first
            moved["page.file"] = part.page_file + first
            for name, column in moved.items():
                columns[name].append(column)
        return cls(lenders, *(np.concatenate(columns[name]) for name in EXTENT_COLUMNS))

    @property
    def is_plain(self) -> bool:
        """Whether each image is a file of its own."""
        return not self.lenders and bool((self.file_part == WHOLE_IMAGE).all())

    def encode(self) -> bytes:
        """Return the columns as bytes, for :meth:`decode`."""
        narrow = {name: narrowed(column) for name, column in self.columns().items()}
        return encode_columns(narrow, {"lenders": json.dumps(self.lenders)})

    @classmethod
    def decode(cls, data: bytes, what: str) -> Extents:
        """Decode extents, unchecked. Raises DamagedError."""
        columns, metadata = decode_columns(data, what)
        try:
            return extents_of(columns, json.loads(metadata["lenders"]))
        except (KeyError, ValueError) as error:
            raise DamagedError(f"{what} are malformed: {error!r}") from error

    def columns(self) -> Columns:
        """Return the columns by name."""
        return {name: getattr(self, name.replace(".", "_")) for name in EXTENT_COLUMNS}

    def keys(self, folder: str) -> list[str]:
        """Return the keys of all files; ``folder``: the attempt's."""
        folders = [folder, *(lent_folder(folder, lender) for lender in self.lenders)]
        files = (self.file_lender, self.file_rank, self.file_part)
        rows = zip(*(column.tolist() for column in files), strict=True)
        return [f"{folders[lender]}/{file_name(rank, part)}" for lender, rank, part in rows]

    def file_map(self, hashed_nbytes: Ints, chunk_nbytes: int, block_nbytes: int) -> FileMap:
        """Return the map from images of these sizes to files."""
        block = _Blocks(self, hashed_nbytes, block_nbytes)
        chunks = ceil_div(hashed_nbytes, chunk_nbytes)
        page_image = np.repeat(np.arange(len(chunks)), chunks)
        page = np.arange(len(page_image)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        page_nbytes = chunk_nbytes // block_nbytes * DIGEST_NBYTES
        nbytes = hashed_nbytes + DIGEST_NBYTES * ceil_div(hashed_nbytes, block_nbytes)
        base = np.append(0, np.cumsum(nbytes))
        starts = [
            base[block.image] + block.start,
            base[page_image] + hashed_nbytes[page_image] + page * page_nbytes,
        ]
        files = [self.extent_file, self.page_file]
        file_starts = [self.extent_block * block_nbytes, self.page_slot * DIGEST_NBYTES]
        return FileMap.of(base, *map(np.concatenate, (starts, files, file_starts)))


def lent_folder(folder: str, lender: str) -> str:
    """Return the key of the folder of links to a lender's files, in an attempt's ``folder``."""
    return f"{folder}/lent/{lender}"


def file_name(rank: int, part: int) -> str:
    """Return the name of a file in the folder of its attempt."""
    if part == WHOLE_IMAGE:
        return f"{rank}.safetensors"
    return f"{rank}.{part}.blocks"


class _Blocks:
    """Position of each extent in its ``image``: bytes from ``start``, ``nbytes`` of them."""

    def __init__(self, extents: Extents, hashed_nbytes: Ints, block_nbytes: int) -> None:
        blocks = ceil_div(hashed_nbytes, block_nbytes)
        first = np.cumsum(blocks) - blocks
        end = np.cumsum(extents.extent_blocks)
        self.image = np.repeat(np.arange(len(blocks)), extents.extent_count)
        self.start = (end - extents.extent_blocks - first[self.image]) * block_nbytes
        stop = (end - first[self.image]) * block_nbytes
        self.nbytes = np.minimum(stop, hashed_nbytes[self.image]) - self.start


def extents_of(columns: Columns, lenders: Json) -> Extents:
    """Return the extents in decoded columns. Raises KeyError and ValueError."""
    named = tuple(strs_in(lenders, "lenders"))
    return Extents(named, *(ints_of(columns, name) for name in EXTENT_COLUMNS))


@dataclass(frozen=True, eq=False)
class FileMap:
    """Maps bytes of images, laid end to end, to bytes of files. ``base``: (I + 1,) first byte of
    each image. ``start``, ``file``, ``file_start``: (R,) runs of adjacent bytes of one file."""

    base: Ints
    start: Ints
    file: Ints
    file_start: Ints

    @classmethod
    def of(cls, base: Ints, start: Ints, file: Ints, file_start: Ints) -> FileMap:
        """Build a map from runs in any order; joins adjacent ones."""
        order = np.argsort(start, kind="stable")
        start, file, file_start = start[order], file[order], file_start[order]
        goes_on = (np.diff(file) == 0) & (np.diff(file_start) == np.diff(start))
        first = np.append(True, ~goes_on)[: len(start)]
        return cls(base, start[first], file[first], file_start[first])

    @property
    def nbytes(self) -> Ints:
        """(R,) bytes of each run."""
        return np.diff(np.append(self.start, self.base[-1]))

    def ranges(self, image: int, start: int, stop: int) -> list[FileRange]:
        """Return where bytes [start, stop) of an image lie, in order."""
        if start >= stop:
            return []
        base = int(self.base[image])
        first = int(np.searchsorted(self.start, base + start, "right")) - 1
        last = int(np.searchsorted(self.start, base + stop, "left"))
        begin = np.maximum(self.start[first:last], base + start)
        end = np.append(self.start[first + 1 : last], base + stop)
        at = self.file_start[first:last] + begin - self.start[first:last]
        columns = (self.file[first:last], at, begin - base, end - begin)
        return [FileRange(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]

    def touches(self, file: int, image: Ints, start: Ints, stop: Ints) -> npt.NDArray[np.bool_]:
        """Return for each range [start, stop) of an image, by columns (n,), whether any of it lies
        in the file in row ``file``."""
        mine = self.file == file
        begin = np.append(self.start[mine], self.base[-1])
        end = np.append(self.start[1:], self.base[-1])[mine]
        base = self.base[image]
        first = np.searchsorted(end, base + start, "right")
        return begin[first] < base + stop


def extent_conditions(
    extents: Extents, hashed_nbytes: Ints, chunk_nbytes: int, block_nbytes: int
) -> Iterator[tuple[bool, str]]:
    """Yield pairs of a required condition and the problem if it is False.

    The order matters: a condition may rely on earlier ones. The images are checked already.
    """
    x = extents
    files = x.file_lender.size
    flat = [x.file_lender, x.file_rank, x.file_part, x.file_nbytes]
    yield all(column.shape == (files,) for column in flat), "shapes of file columns"
    yield bool((x.file_lender <= len(x.lenders)).all()), "lenders of files"
    yield bool((x.file_part <= WHOLE_IMAGE).all()), "parts of files"
    rows = np.stack([x.file_lender, x.file_rank, x.file_part], axis=1)
    yield len(np.unique(rows, axis=0)) == files, "files that occur twice"
    _, of_rank = np.unique(x.file_rank, return_counts=True)
    yield int(of_rank.max(initial=0)) <= FILES_MAX, f"more than {FILES_MAX:,} files of a rank"

    rows_of_extents = x.extent_blocks.size
    flat = [x.extent_blocks, x.extent_file, x.extent_block]
    yield all(column.shape == (rows_of_extents,) for column in flat), "shapes of extent columns"
    yield bool((x.extent_file < files).all()), "files of extents"
    blocks = ceil_div(hashed_nbytes, block_nbytes)
    count = x.extent_count
    yield count.shape == blocks.shape, "numbers of extents"
    # No count exceeds the expected sum, so the sum cannot have wrapped.
    fits = int(count.max(initial=0)) <= rows_of_extents
    yield fits and int(count.sum()) == rows_of_extents, "numbers of extents"
    yield _cover(x, blocks), "extents do not cover the images"
    yield _inside(x, hashed_nbytes, block_nbytes), "blocks outside their file"
    yield _disjoint(x), "extents overlap in a file"

    chunks = ceil_div(hashed_nbytes, chunk_nbytes)
    shape = (int(chunks.sum()),)
    yield x.page_file.shape == x.page_slot.shape == shape, "shapes of page columns"
    yield bool((x.page_file < files).all()), "files of pages"
    index = np.arange(shape[0]) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    per_chunk = chunk_nbytes // block_nbytes
    digests = np.minimum(np.repeat(blocks, chunks) - index * per_chunk, per_chunk)
    room = x.file_nbytes[x.page_file] // DIGEST_NBYTES - digests
    yield bool((x.page_slot <= room).all()), "pages outside their file"


def _cover(x: Extents, blocks: Ints) -> bool:
    """Return whether the extents of each image have as many blocks as it, each at least one."""
    total = int(blocks.sum())
    if not ((x.extent_blocks > 0) & (x.extent_blocks <= total)).all():
        return False
    if float(x.extent_blocks.sum(dtype=np.float64)) >= 2.0**62:
        return False
    ends = np.append(0, np.cumsum(x.extent_blocks))[np.cumsum(x.extent_count)]
    return bool((ends == np.cumsum(blocks)).all())


def _inside(x: Extents, hashed_nbytes: Ints, block_nbytes: int) -> bool:
    size = x.file_nbytes[x.extent_file]
    if not (x.extent_block <= size // block_nbytes).all():
        return False
    nbytes = _Blocks(x, hashed_nbytes, block_nbytes).nbytes
    return bool((nbytes <= size - x.extent_block * block_nbytes).all())


def _disjoint(x: Extents) -> bool:
    """Return whether no block of a file is used twice. This bounds images by the sizes of files."""
    order = np.lexsort((x.extent_block, x.extent_file))
    file, block = x.extent_file[order], x.extent_block[order]
    end = block + x.extent_blocks[order]
    return not ((file[1:] == file[:-1]) & (block[1:] < end[:-1])).any()
