"""What a file of ``torch.save`` consists of: a zip file with a pickle, which is read as data and never
unpickled, and a record of elements for each storage, which is stored as it is."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable

from ...core.aio import at_most
from ...drivers.contract import Driver
from ...errors import DamagedError, UnsupportedFormatError
from ..format.torch_pickle import StoredTensor, Value, leaves, read_pickle
from ..pipeline.file_chunks import Stretch
from ..runtime.engine import offload
from .model_source import Model, SourceTensor

__all__ = ["TORCH_SUFFIXES", "read_torch_model"]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

_TAIL_NBYTES = 1 << 20
_DIRECTORY_NBYTES_MAX = 256 << 20
_PICKLE_NBYTES_MAX = 256 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\x03\x04"


async def read_torch_model(driver: Driver, key: str) -> Model:
    """The tensors in a file, by their paths. Raises DamagedError for what is no such file,
    UnsupportedFormatError for what is in one and is not read, by name; NotFoundError,
    StorageError."""
    info = await driver.stat(key)
    archive = _Archive(driver, key, info.nbytes)
    try:
        await archive.open()
        pickle = await archive.read("data.pkl", _PICKLE_NBYTES_MAX)
        order = await archive.read("byteorder", 16) if archive.has("byteorder") else b"little"
        found = dict(await offload(_read, pickle))
    except ValueError as error:
        raise UnsupportedFormatError(
            f"this file of torch.save is not read: {error}",
            uri=driver.uri,
            key=key,
            advice="Load it with torch, and save a dict of its tensors.",
        ) from error
    except (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError) as error:
        raise _damaged(driver, key, f"it is no whole zip file: {error}") from error
    if order.strip() != b"little":
        raise UnsupportedFormatError(
            "the elements are not little-endian", uri=driver.uri, key=key, advice="Save it again."
        )
    tensors = {name: value for name, value in found.items() if isinstance(value, StoredTensor)}
    starts = await archive.starts({f"data/{t.storage}" for t in tensors.values()})
    return Model(
        tuple(_source(archive, name, tensor, starts) for name, tensor in tensors.items()),
        {key: (info.nbytes, info.modified_s)},
        tuple(name for name in found if name not in tensors),
    )


def _read(pickle: bytes) -> list[tuple[str, Value]]:
    found = list(leaves(read_pickle(pickle)))
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise ValueError("two of its values have one path, if keys are joined by dots")
    return found


def _source(
    archive: _Archive, name: str, tensor: StoredTensor, starts: dict[str, int]
) -> SourceTensor:
    """Where a tensor lies in the file. Raises UnsupportedFormatError, DamagedError."""
    if not tensor.is_contiguous:
        raise UnsupportedFormatError(
            f"tensor {name!r} is not contiguous",
            uri=archive.driver.uri,
            key=archive.key,
            advice="Save tensor.contiguous() in its place.",
        )
    numel = 1
    for length in tensor.shape:
        numel *= length
    record = f"data/{tensor.storage}"
    start = tensor.offset * tensor.itemsize
    nbytes = numel * tensor.itemsize
    if start + nbytes > archive.nbytes(record):
        raise _damaged(archive.driver, archive.key, f"tensor {name!r} is larger than its record")
    where = Stretch(archive.key, starts[record] + start, nbytes)
    return SourceTensor(name, tensor.dtype, tensor.shape, where)


def _damaged(driver: Driver, key: str, what: str) -> DamagedError:
    return DamagedError(what, uri=driver.uri, key=key, advice="Get the file again.")


class _Archive:
    """The records of a zip file in a driver's storage. They are named without the folder that all of
    them are in."""

    def __init__(self, driver: Driver, key: str, nbytes: int) -> None:
        self.driver = driver
        self.key = key
        self._nbytes = nbytes
        self._records: dict[str, zipfile.ZipInfo] = {}

    async def open(self) -> None:
        """Read the directory at the end. Raises BadZipFile, ValueError."""
        if await self._bytes(0, min(len(_MAGIC), self._nbytes)) != _MAGIC:
            raise ValueError("it is not of the format that torch writes since version 1.6")
        start = max(0, self._nbytes - _TAIL_NBYTES)
        while True:
            tail = _Tail(await self._bytes(start, self._nbytes), start)
            try:
                records = await offload(_records, tail)
                break
            except _EarlierError as error:
                if (
                    not 0 <= error.start < start
                    or self._nbytes - error.start > _DIRECTORY_NBYTES_MAX
                ):
                    raise zipfile.BadZipFile("a directory of any size") from error
                start = error.start
        self._records = {info.filename.partition("/")[2]: info for info in records}

    def has(self, name: str) -> bool:
        """Whether there is such a record."""
        return name in self._records

    def nbytes(self, name: str) -> int:
        """The size of a record."""
        return self._record(name).file_size

    async def read(self, name: str, nbytes_max: int) -> bytes:
        """All of a record. Raises BadZipFile, ValueError."""
        nbytes = self.nbytes(name)
        if nbytes > nbytes_max:
            raise ValueError(f"its record {name} has {nbytes:,} bytes")
        start = (await self.starts([name]))[name]
        return await self._bytes(start, start + nbytes)

    async def starts(self, names: Iterable[str]) -> dict[str, int]:
        """Where the bytes of records begin. Raises DamagedError where they do not lie in the file as
        they are."""
        found: dict[str, int] = {}

        async def find(name: str) -> None:
            info = self._record(name)
            begin = info.header_offset
            header = await self._bytes(begin, min(begin + _LOCAL_HEADER.size, self._nbytes))
            if len(header) < _LOCAL_HEADER.size or info.compress_type != zipfile.ZIP_STORED:
                raise _damaged(self.driver, self.key, f"record {name!r} is not stored as it is")
            magic, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
            start = begin + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
            if magic != _MAGIC or start + info.file_size > self._nbytes:
                raise _damaged(self.driver, self.key, f"record {name!r} is not in the file")
            found[name] = start

        await at_most(self.driver.traits.concurrency, map(find, names))
        return found

    def _record(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._records[name]
        except KeyError as error:
            raise _damaged(self.driver, self.key, f"there is no record {name!r}") from error

    async def _bytes(self, start: int, stop: int) -> bytes:
        into = bytearray(max(0, stop - start))
        if into:
            await self.driver.read(self.key, start, memoryview(into))
        return bytes(into)


class _EarlierError(Exception):
    """Bytes from ``start`` on are asked for, which have not been read."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class _Tail(io.RawIOBase):
    """The end of a file, as a file that can be read from there on."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._start = start
        self._position = 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where it is, in the whole file."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the whole file."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        end = self._start + len(self._data)
        self._position = bases.get(whence, end) + offset
        if self._position < 0:
            raise OSError("before the beginning")
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Bytes from here on. Raises _EarlierError."""
        if self._position < self._start:
            raise _EarlierError(self._position)
        begin = self._position - self._start
        end = len(self._data) if size < 0 else begin + size
        data = self._data[begin:end]
        self._position += len(data)
        return data


def _records(tail: _Tail) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(tail) as archive:
            return archive.infolist()
    except OSError as error:  # a place before the beginning
        raise zipfile.BadZipFile(str(error)) from error
