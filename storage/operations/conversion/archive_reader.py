"""Reads ``torch.save`` files, whole or embedded in another file, in any storage.

Such a file is a zip archive with a pickle, which is read as data and never unpickled, and an
uncompressed record of elements per storage. Nothing is trusted: records outside the file and
compressed records are detected.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ....core.aio import at_most, side_by_side
from ....drivers.contract import Driver
from ....errors import DamagedError, UnsupportedFormatError
from ...format.torch_pickle import StoredTensor, Value, no_record, read_pickle
from ...pipeline.file_chunks import ENCLOSED_NBYTES_MAX, Enclosed, Stretch
from ...runtime.engine import offload

T = TypeVar("T")

_TAIL_NBYTES = 1 << 20
"""Enough for the directory of a file with thousands of tensors."""
_HEAD_NBYTES = 4096
_SMALL_NBYTES = 64 << 10
"""Files up to this size are read in one request."""
_DIRECTORY_NBYTES_MAX = 256 << 20
_PICKLE_NBYTES_MAX = 256 << 20
_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s22xHH")
"""The header before each record, excluding the name and the extra field."""
_IS_ENCRYPTED = 1
_PICKLE = "data.pkl"
_ORDER = "byteorder"
_KNOWN_MAX = 1024
_KNOWN_NBYTES_MAX = 4096
"""Limits for caching decoded pickles: their number and size."""


class ZipError(Exception):
    """Raised for data that is not a complete zip file."""


class EarlierError(Exception):
    """Raised if bytes from ``start`` on are needed that have not been read yet."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of ``nbytes`` bytes, whose header is at byte ``start`` of the file."""

    start: int
    nbytes: int
    is_stored: bool
    """True if the bytes are stored raw: neither compressed nor encrypted."""


class _Tail(io.BytesIO):
    """A file whose bytes before ``start`` are not in memory. Seeking there raises EarlierError."""

    def __init__(self, tail: bytes, start: int) -> None:
        super().__init__(tail)
        self._start = start

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET:
            return self._start + super().seek(offset, whence)
        if offset < self._start:
            raise EarlierError(offset)
        return self._start + super().seek(offset - self._start)

    def tell(self) -> int:
        return self._start + super().tell()


def directory(tail: bytes, tail_start: int) -> tuple[dict[str, ZipRecord], int]:
    """Return the records of a file and the file offset of the directory.

    ``tail`` is the end of the file, from byte ``tail_start`` on. Record names omit their common
    folder. Raises EarlierError if the directory begins before ``tail``; ZipError if it is damaged.
    """
    try:
        with zipfile.ZipFile(_Tail(tail, tail_start)) as archive:
            entries = archive.infolist()
            start = archive.start_dir
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise ZipError(f"its directory is malformed: {error}") from error
    found: dict[str, ZipRecord] = {}
    for entry in entries:
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        is_stored &= not entry.flag_bits & _IS_ENCRYPTED
        if is_stored and entry.compress_size != entry.file_size:
            raise ZipError("its directory states two sizes of one entry")
        if not 0 <= entry.header_offset < start:
            raise ZipError("its directory locates an entry that is not in it")
        name = entry.filename.partition("/")[2]
        found[name] = ZipRecord(entry.header_offset, entry.file_size, is_stored)
    return found, start


def content_start(header: bytes | memoryview, record: ZipRecord) -> int:
    """Return the file offset of a record's bytes, given its ``header``. Raises ZipError."""
    if len(header) < _LOCAL.size:
        raise ZipError("the header of a record is not in it")
    magic, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    if magic != _MAGIC:
        raise ZipError("a record has no header")
    return int(record.start + _LOCAL.size + name_nbytes + extra_nbytes)


def any_record(name: str) -> bool:
    """Accept a class of any name; see :func:`read_pickle`."""
    return True


async def read_archive(
    driver: Driver,
    key: str,
    read: Callable[[Value], T],
    is_record: Callable[[str], bool] = no_record,
    part: tuple[int, int] | None = None,
) -> tuple[ArchiveReader, T]:
    """Return a file, or a part of one (start and bytes), and what ``read`` makes of its contents.

    Raises UnsupportedFormatError if ``read`` raises ValueError; otherwise like
    :meth:`ArchiveReader.value`.
    """
    start, nbytes = part or (0, (await driver.stat(key)).nbytes)
    archive = ArchiveReader(driver, Stretch(key, start, nbytes), _TAIL_NBYTES)
    value = await archive.value(is_record)
    try:
        return archive, await offload(read, value)
    except ValueError as error:
        raise archive.refused(str(error)) from error


class _Archive:
    """A ``torch.save`` archive at ``where``.

    Record names omit the folder that all records share. Positions are relative to the archive.
    """

    def __init__(self, uri: str, where: Stretch) -> None:
        self._uri = uri
        self._where = where
        self._records: dict[str, ZipRecord] = {}

    def damaged(self, what: str) -> DamagedError:
        return DamagedError(what, uri=self._uri, key=self._where.key, advice="Get the file again.")

    def refused(self, what: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            f"this torch.save file cannot be imported: {what}",
            uri=self._uri,
            key=self._where.key,
            advice="Load it with torch, and save a dict of its tensors, each "
            "resolve_conj().resolve_neg().contiguous().",
        )

    def _record(self, name: str) -> ZipRecord:
        try:
            return self._records[name]
        except KeyError as error:
            raise self.damaged(f"there is no record {name!r}") from error

    def _begin(self, name: str, header: bytes | memoryview, end: int) -> int:
        """Return the position of a record's bytes, which must end by ``end``.

        Raises DamagedError if they are not in the file, UnsupportedFormatError if they are
        compressed or encrypted.
        """
        record = self._record(name)
        if not record.is_stored:
            raise self.refused(f"record {name!r} is compressed or encrypted")
        try:
            begin = content_start(header, record)
        except ZipError as error:
            raise self.damaged(f"record {name!r} is not in the file: {error}") from error
        if begin + record.nbytes > end:
            raise self.damaged(f"record {name!r} is not in the file")
        return begin

    def _elements(self, name: str, tensor: StoredTensor) -> tuple[str, int, int]:
        """Return a tensor's record, the offset of its elements in the record, and their size in
        bytes.

        Raises UnsupportedFormatError and DamagedError.
        """
        record = f"data/{tensor.storage}"
        start = tensor.offset * tensor.itemsize
        nbytes = math.prod(tensor.shape) * tensor.itemsize
        if not tensor.is_contiguous:
            raise self.refused(f"tensor {name!r} is not contiguous")
        if tensor.bits:
            raise self.refused(f"tensor {name!r} is a view with its {tensor.bits[0]} bit set")
        if start + nbytes > self._record(record).nbytes:
            raise self.damaged(f"tensor {name!r} is larger than its record")
        return record, start, nbytes

    def _check_order(self, order: bytes) -> None:
        if order.strip() != b"little":
            raise self.refused("the elements are not little-endian")


class ArchiveReader(_Archive):
    """Reads only the needed parts of an archive, beginning with its last ``tail_nbytes``, where
    the directory is."""

    def __init__(self, driver: Driver, where: Stretch, tail_nbytes: int) -> None:
        super().__init__(driver.uri, where)
        self._driver = driver
        self._nbytes = where.nbytes
        self._tail_nbytes = tail_nbytes
        self._directory_start = 0
        self._read: list[tuple[int, bytes]] = []
        """Cached ranges: (position, bytes)."""

    async def value(self, is_record: Callable[[str], bool] = no_record) -> Value:
        """Return the contents of the pickle; see :func:`read_pickle`.

        Raises DamagedError for an incomplete file, UnsupportedFormatError naming content that is
        not supported, and StorageError.
        """
        try:
            await self._open()
            pickle = await self._record_bytes(_PICKLE, _PICKLE_NBYTES_MAX)
            order = b"little"
            if _ORDER in self._records:
                order = await self._record_bytes(_ORDER, 16)
            value = await offload(read_pickle, pickle, is_record)
        except ZipError as error:
            raise self.damaged(f"it is not a complete zip file: {error}") from error
        except ValueError as error:
            raise self.refused(str(error)) from error
        self._check_order(order)
        return value

    async def places(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stretch]:
        """Return the location in the file of each tensor's elements, by name.

        Raises UnsupportedFormatError and DamagedError.
        """
        elements = {name: self._elements(name, tensor) for name, tensor in tensors.items()}
        begins = await self._begins({record for record, _, _ in elements.values()})
        return {
            name: Stretch(self._where.key, self._where.start + begins[record] + start, nbytes)
            for name, (record, start, nbytes) in elements.items()
        }

    async def places_or_records(
        self, tensors: Mapping[str, StoredTensor]
    ) -> dict[str, Stretch | Enclosed]:
        """Locate tensors like :meth:`places`, but a tensor in a small record by the whole record.

        This saves a separate read of the record's header. Raises UnsupportedFormatError and
        DamagedError.
        """
        starts = sorted({record.start for record in self._records.values()})
        ends = dict(itertools.pairwise([*starts, self._directory_start]))
        found: dict[str, Stretch | Enclosed] = {}
        for name, tensor in tensors.items():
            record, start, nbytes = self._elements(name, tensor)
            begin = self._records[record].start
            span = ends[begin] - begin
            if 0 < span <= ENCLOSED_NBYTES_MAX:
                around = Stretch(self._where.key, self._where.start + begin, span)
                find = partial(self._begin_within, record)
                found[name] = Enclosed(around, nbytes, start, find)
        left = {name: tensor for name, tensor in tensors.items() if name not in found}
        return found | await self.places(left)

    def _begin_within(self, name: str, content: memoryview) -> int:
        """Return the offset of a record's bytes in ``content``, which begins with the record's
        header."""
        start = self._records[name].start
        return self._begin(name, content, start + len(content)) - start

    async def _open(self) -> None:
        """Read the directory at the end of the archive. Raises ZipError and ValueError."""
        head_nbytes = min(_HEAD_NBYTES, self._nbytes)
        start = max(0, self._nbytes - self._tail_nbytes)
        if self._nbytes <= _SMALL_NBYTES:
            head_nbytes = start = 0
        await side_by_side(self._keep(0, head_nbytes), self._keep(start, self._nbytes))
        if await self._bytes(0, min(len(_MAGIC), self._nbytes)) != _MAGIC:
            raise ValueError("it is not of the format that torch writes since version 1.6")
        while True:
            tail = await self._bytes(start, self._nbytes)
            try:
                self._records, self._directory_start = await offload(directory, tail, start)
                return
            except EarlierError as error:
                if self._nbytes - error.start > _DIRECTORY_NBYTES_MAX:
                    raise ZipError("a directory of any size") from error
                start = error.start

    async def _record_bytes(self, name: str, nbytes_max: int) -> bytes:
        nbytes = self._record(name).nbytes
        if nbytes > nbytes_max:
            raise ValueError(f"its record {name} has {nbytes:,} bytes")
        start = (await self._begins([name]))[name]
        return await self._bytes(start, start + nbytes)

    async def _begins(self, names: Collection[str]) -> dict[str, int]:
        """Return the positions of records' bytes. Raises DamagedError if they are not in the
        file."""

        async def find(name: str) -> int:
            start = self._record(name).start
            header = await self._bytes(start, min(start + _LOCAL.size, self._nbytes))
            return self._begin(name, header, self._nbytes)

        begins = await at_most(self._driver.traits.concurrency, map(find, names))
        return dict(zip(names, begins, strict=True))

    async def _keep(self, start: int, stop: int) -> None:
        self._read.append((start, await self._bytes(start, stop)))

    async def _bytes(self, start: int, stop: int) -> bytes:
        for position, data in self._read:
            if position <= start and stop <= position + len(data):
                return data[start - position : stop - position]
        into = bytearray(max(0, stop - start))
        if into:
            await self._driver.read(self._where.key, self._where.start + start, memoryview(into))
        return bytes(into)


class WholeArchive(_Archive):
    """An archive whose ``content`` is entirely in memory. Raises DamagedError if it is
    incomplete."""

    def __init__(self, uri: str, where: Stretch, content: memoryview) -> None:
        super().__init__(uri, where)
        self._content = content
        start = max(0, len(content) - _HEAD_NBYTES)
        try:
            try:
                found = directory(bytes(content[start:]), start)
            except EarlierError:
                found = directory(bytes(content), 0)
        except ZipError as error:
            raise self.damaged(f"it is not a complete zip file: {error}") from error
        self._records, _ = found

    def value(self, known: dict[bytes, Value]) -> Value:
        """Return the contents of the pickle. ``known`` caches them by pickle: most tensors share
        one.

        Raises like :meth:`ArchiveReader.value`.
        """
        if _ORDER in self._records:
            self._check_order(self._record_bytes(_ORDER))
        pickle = self._record_bytes(_PICKLE)
        if pickle in known:
            return known[pickle]
        try:
            value = read_pickle(pickle)
        except ValueError as error:
            raise self.refused(str(error)) from error
        if len(pickle) <= _KNOWN_NBYTES_MAX and len(known) < _KNOWN_MAX:
            known[pickle] = value
        return value

    def begin(self, name: str, tensor: StoredTensor) -> int:
        """Return where a tensor's elements begin. Raises UnsupportedFormatError, DamagedError."""
        record, start, _ = self._elements(name, tensor)
        return self._start(record) + start

    def _start(self, name: str) -> int:
        header = self._content[self._record(name).start :][: _LOCAL.size]
        return self._begin(name, header, len(self._content))

    def _record_bytes(self, name: str) -> bytes:
        start = self._start(name)
        return bytes(self._content[start : start + self._record(name).nbytes])
