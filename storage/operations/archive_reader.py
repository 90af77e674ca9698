"""Reads what ``torch.save`` has written, in any storage: a zip file with a pickle, which is read as
data and never unpickled, and a record of elements for each storage, which is stored as it is. It is
a file, or a part of one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ...core.aio import at_most, side_by_side
from ...core.garbage import collector_paused
from ...drivers.contract import Driver
from ...errors import DamagedError, UnsupportedFormatError
from ..format.torch_pickle import StoredTensor, Value, read_pickle
from ..format.torch_records import (
    CHECKSUM_NBYTES,
    LOCAL_NBYTES,
    EarlierError,
    ZipError,
    ZipRecord,
    content_start,
    directory,
)
from ..pipeline.file_chunks import ENCLOSED_NBYTES_MAX, Enclosed, Stretch
from ..runtime.engine import offload

__all__ = ["ArchiveForm", "ArchiveReader", "WholeArchive"]

_HEAD_NBYTES = 4096
_SMALL_NBYTES = 64 << 10
"""Up to this size all of it is read at once."""
_DIRECTORY_NBYTES_MAX = 256 << 20
_PICKLE_NBYTES_MAX = 256 << 20
_CHECKSUM_AT = 14
"""In the header before a record."""
_MAGIC = b"PK\x03\x04"
_PICKLE = "data.pkl"
_ORDER = "byteorder"
_KNOWN_MAX = 1024
_KNOWN_NBYTES_MAX = 4096
"""Of so many pickles, of at most this size, what they describe is kept. What a form consists of is
limited alike."""


def _no_record(name: str) -> bool:
    return False


class _Archive:
    """What ``torch.save`` has written to the bytes of ``where``. Its records are named without the
    folder that all of them are in. Positions count from its beginning."""

    def __init__(self, uri: str, where: Stretch) -> None:
        self._uri = uri
        self._where = where
        self._records: dict[str, ZipRecord] = {}

    def damaged(self, what: str) -> DamagedError:
        """The error for bytes that are not what they should be."""
        return DamagedError(what, uri=self._uri, key=self._where.key, advice="Get the file again.")

    def refused(self, what: str) -> UnsupportedFormatError:
        """The error for what is not read."""
        return UnsupportedFormatError(
            f"this file of torch.save is not read: {what}",
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
        """Return where the bytes of a record begin, which end at ``end`` at the latest. Raises
        DamagedError where they are not in the file, UnsupportedFormatError where they are
        compressed or encrypted."""
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
        """In which record the elements of a tensor are, from which byte of it on, and how many
        bytes. Raises UnsupportedFormatError, DamagedError."""
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
    """One of which only what is needed is read. ``tail_nbytes`` are read first from its end, where
    the directory is."""

    def __init__(self, driver: Driver, where: Stretch, tail_nbytes: int) -> None:
        super().__init__(driver.uri, where)
        self._driver = driver
        self._nbytes = where.nbytes
        self._tail_nbytes = tail_nbytes
        self._directory_start = 0
        self._read: list[tuple[int, bytes]] = []
        """What has been read of it: positions, and the bytes there."""

    async def value(self, is_record: Callable[[str], bool] = _no_record) -> Value:
        """What its pickle describes, see :func:`read_pickle`. Raises DamagedError for what is no
        whole file of ``torch.save``, UnsupportedFormatError for what is in one and is not read, by
        name; StorageError."""
        try:
            await self._open()
            pickle = await self._record_bytes(_PICKLE, _PICKLE_NBYTES_MAX)
            order = b"little"
            if _ORDER in self._records:
                order = await self._record_bytes(_ORDER, 16)
            value = await offload(_value_in, pickle, is_record)
        except ZipError as error:
            raise self.damaged(f"it is no whole zip file: {error}") from error
        except ValueError as error:
            raise self.refused(str(error)) from error
        self._check_order(order)
        return value

    async def places(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Stretch]:
        """By name, where the elements of tensors lie in the file. Raises UnsupportedFormatError,
        DamagedError."""
        elements = {name: self._elements(name, tensor) for name, tensor in tensors.items()}
        begins = await self._begins({record for record, _, _ in elements.values()})
        return {
            name: Stretch(self._where.key, self._where.start + begins[record] + start, nbytes)
            for name, (record, start, nbytes) in elements.items()
        }

    async def places_or_records(
        self, tensors: Mapping[str, StoredTensor]
    ) -> dict[str, Stretch | Enclosed]:
        """The same; but of a tensor in a small record, where that lies: the header of the record is
        not read by itself. Raises UnsupportedFormatError, DamagedError."""
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
        """Where the bytes of a record begin in ``content``, which begins with its header."""
        start = self._records[name].start
        return self._begin(name, content, start + len(content)) - start

    async def _open(self) -> None:
        """Read the directory at the end. Raises ZipError, ValueError."""
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
        """All of a record. Raises ValueError."""
        nbytes = self._record(name).nbytes
        if nbytes > nbytes_max:
            raise ValueError(f"its record {name} has {nbytes:,} bytes")
        start = (await self._begins([name]))[name]
        return await self._bytes(start, start + nbytes)

    async def _begins(self, names: Iterable[str]) -> dict[str, int]:
        """Where the bytes of records begin. Raises DamagedError where they do not lie in the file
        as they are."""
        found: dict[str, int] = {}

        async def find(name: str) -> None:
            start = self._record(name).start
            header = await self._bytes(start, min(start + LOCAL_NBYTES, self._nbytes))
            found[name] = self._begin(name, header, self._nbytes)

        await at_most(self._driver.traits.concurrency, map(find, names))
        return found

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


def _value_in(pickle: bytes, is_record: Callable[[str], bool]) -> Value:
    with collector_paused():
        return read_pickle(pickle, is_record)


@dataclass(frozen=True, slots=True)
class ArchiveForm:
    """Where the elements of a tensor ``begin`` in an archive, and everything in it that says so:
    bytes, and their positions. Another of the same size that has the same bytes there has its
    elements in the same place, whatever they are."""

    begin: int
    read: tuple[tuple[int, bytes], ...]

    def is_of(self, content: memoryview) -> bool:
        """Whether ``content``, an archive of the same size, has this form."""
        return all(bytes(content[at : at + len(data)]) == data for at, data in self.read)


class WholeArchive(_Archive):
    """One that has been read as a whole: ``content``. Raises DamagedError for what is no whole file
    of ``torch.save``."""

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
            raise self.damaged(f"it is no whole zip file: {error}") from error
        self._records, self._directory_start = found

    def value(self, known: dict[bytes, Value]) -> Value:
        """What its pickle describes. ``known`` are such values by their pickles: most tensors of a
        model have the same as others. Raises as :meth:`ArchiveReader.value` does."""
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

    def form(self, name: str, tensor: StoredTensor) -> tuple[ArchiveForm, bool]:
        """Where the elements of a tensor begin, and whether others may have the same form: what
        says so is small, and nothing of it lies among the elements. Raises UnsupportedFormatError,
        DamagedError."""
        record, start, nbytes = self._elements(name, tensor)
        begin = self._start(record) + start
        read = [self._extent(name) for name in (_PICKLE, _ORDER) if name in self._records]
        header = self._records[record].start
        read.append((header, header + _CHECKSUM_AT))
        read.append((header + _CHECKSUM_AT + CHECKSUM_NBYTES, header + LOCAL_NBYTES))
        checksum = self._records[record].checksum_start
        read.append((self._directory_start, checksum))
        read.append((checksum + CHECKSUM_NBYTES, len(self._content)))
        is_apart = all(stop <= begin or begin + nbytes <= at for at, stop in read)
        is_small = sum(stop - at for at, stop in read) <= _KNOWN_NBYTES_MAX
        found = tuple((at, bytes(self._content[at:stop])) for at, stop in read)
        return ArchiveForm(begin, found), is_apart and is_small

    def _extent(self, name: str) -> tuple[int, int]:
        """Of a record, with its header."""
        record = self._records[name]
        return record.start, self._start(name) + record.nbytes

    def _start(self, name: str) -> int:
        header = self._content[self._record(name).start :][:LOCAL_NBYTES]
        return self._begin(name, header, len(self._content))

    def _record_bytes(self, name: str) -> bytes:
        start = self._start(name)
        return bytes(self._content[start : start + self._record(name).nbytes])
