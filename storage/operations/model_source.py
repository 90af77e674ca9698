"""What a model in safetensors files consists of: which tensors, and where in which file each lies.

Files come from anywhere, so nothing in them is believed: an index that names files outside of its
folder is refused before any of them is read, headers are limited in size, and the tensors of a file
must take exactly its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...core import safetensors
from ...core.aio import at_most
from ...core.garbage import collector_paused
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError, UnsupportedFormatError
from ...planner.box import Box
from ..pipeline.file_chunks import Enclosed, Stretch

__all__ = [
    "Files",
    "Model",
    "SourceTensor",
    "check_unchanged",
    "find_files",
    "read_model",
    "stamps_of",
]

_INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_INDEX_NBYTES_MAX = 256 << 20
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_DTYPES = {code: dtype for dtype, code in safetensors.DTYPES.items()} | {"C64": "complex64"}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a model, or a part of one, with its elements in row-major order in a file;
    ``dtype`` is torch's name. The parts of a tensor have one name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: Stretch | Enclosed
    part: Box | tuple[int, int] | None = None
    """A box of the tensor; or a range of its elements, from the first to the one past the last; or
    all of it."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return safetensors.ITEMSIZES[_CODES[self.dtype]]


Path = tuple[str | int, ...]
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of all files, and what the storage says of each file: size and time."""

    tensors: tuple[SourceTensor, ...]
    stamps: Mapping[str, tuple[int, float]]
    left: tuple[str, ...] = ()
    """Names of what is there too, is no tensor, and is not imported."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What is no tensor and is imported, by name."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """By name of a tensor or a value, the keys that lead to it in the state, where that is
    known."""

    @property
    def names(self) -> list[str]:
        """Of everything that is imported."""
        return list(dict.fromkeys([*(tensor.name for tensor in self.tensors), *self.values]))

    def of(self, names: Container[str]) -> Model:
        """Of this model what is named so."""
        return Model(
            tuple(tensor for tensor in self.tensors if tensor.name in names),
            self.stamps,
            values={name: value for name, value in self.values.items() if name in names},
            paths=self.paths,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.where.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Files:
    """The keys of a model's files, and which tensor the index says is in which; None: there is no
    index."""

    keys: Sequence[str]
    by_name: Mapping[str, str] | None = None


async def find_files(driver: Driver, keys: Sequence[str]) -> Files:
    """The files of the model in a folder with files of these ``keys``.

    Raises NotFoundError where there is no model, DamagedError where files belong together and there
    is no index, or an index that is none; UnsupportedFormatError where there are several.
    """
    indexes = [key for key in keys if key.endswith(_INDEX_SUFFIX)]
    files = [key for key in keys if key.endswith(_SUFFIX)]
    if len(indexes) > 1:
        raise UnsupportedFormatError(
            f"there are several models: {', '.join(indexes)}",
            uri=driver.uri,
            advice="Give a folder with one of them.",
        )
    if indexes:
        by_name = await _read_index(driver, indexes[0])
        return Files(sorted(set(by_name.values())), by_name)
    if not files:
        raise NotFoundError(
            "there is no safetensors file",
            uri=driver.uri,
            advice="Give the folder of a model; symbolic links are not followed.",
        )
    if len(files) > 1:
        raise DamagedError(
            f"there are {len(files):,} safetensors files and no index, so the model may be "
            f"incomplete",
            uri=driver.uri,
            advice="Give one of the files, or get the index too.",
        )
    return Files(files)


async def _read_index(driver: Driver, key: str) -> dict[str, str]:
    """Which tensor is in which file. Raises DamagedError for what is no index, or names what is no
    file of the folder."""
    if (await driver.stat(key)).nbytes > _INDEX_NBYTES_MAX:
        raise DamagedError("the index is too large to be one", uri=driver.uri, key=key)
    try:
        weight_map = json.loads(await driver.get(key))["weight_map"]
        names = {str(name): file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError("the index is malformed", uri=driver.uri, key=key) from error
    for name, file in names.items():
        if not isinstance(file, str) or _FILE_NAME.fullmatch(file) is None:
            raise DamagedError(
                f"the index says that tensor {name!r} is in {file!r}, which is no file of its "
                f"folder",
                uri=driver.uri,
                key=key,
            )
    if not names:
        raise DamagedError("the index names no tensor", uri=driver.uri, key=key)
    return names


async def read_model(driver: Driver, files: Files) -> Model:
    """The model in these files, as their headers tell. Raises DamagedError where a file is not what
    its header says, or does not have what the index says; NotFoundError; StorageError."""
    found: dict[str, list[SourceTensor]] = {}
    stamps: dict[str, tuple[int, float]] = {}

    async def read(key: str) -> None:
        info = await driver.stat(key)
        stamps[key] = (info.nbytes, info.modified_s)
        found[key] = await _read_header(driver, key, info.nbytes)

    await at_most(driver.traits.concurrency, map(read, files.keys))
    if files.by_name is not None:
        _check_index(driver, found, files.by_name)
    tensors = tuple(tensor for key in files.keys for tensor in found[key])
    return Model(tensors, {key: stamps[key] for key in files.keys})


async def stamps_of(driver: Driver, keys: Iterable[str]) -> dict[str, tuple[int, float]]:
    """What the storage says of files. Raises NotFoundError."""
    stamps: dict[str, tuple[int, float]] = {}

    async def look(key: str) -> None:
        info = await driver.stat(key)
        stamps[key] = (info.nbytes, info.modified_s)

    await at_most(driver.traits.concurrency, map(look, keys))
    return stamps


async def check_unchanged(driver: Driver, model: Model) -> None:
    """Raise DamagedError where a file is not the one any more whose header was read."""

    async def check(key: str, stamp: tuple[int, float]) -> None:
        info = await driver.stat(key)
        if (info.nbytes, info.modified_s) != stamp:
            raise DamagedError(
                "the file was changed while it was read",
                uri=driver.uri,
                key=key,
                advice="Import it again, when no process writes to it.",
            )

    await at_most(driver.traits.concurrency, (check(*item) for item in model.stamps.items()))


async def _read_header(driver: Driver, key: str, file_nbytes: int) -> list[SourceTensor]:
    try:
        first = bytearray(min(safetensors.LENGTH_NBYTES, file_nbytes))
        await driver.read(key, 0, memoryview(first))
        length = safetensors.length_in(bytes(first))
        data_start = safetensors.LENGTH_NBYTES + length
        if length > safetensors.HEADER_NBYTES_MAX or data_start > file_nbytes:
            raise ValueError(f"a header of {length:,} bytes in a file of {file_nbytes:,}")
        text = bytearray(length)
        await driver.read(key, safetensors.LENGTH_NBYTES, memoryview(text))
        with collector_paused():
            entries = safetensors.parsed(bytes(text), file_nbytes - data_start)
    except ValueError as error:
        raise DamagedError(
            f"the file is not what its header says: {error}",
            uri=driver.uri,
            key=key,
            advice="Get the file again.",
        ) from error
    return [
        SourceTensor(
            e.name, _DTYPES[e.code], e.shape, Stretch(key, data_start + e.start, e.stop - e.start)
        )
        for e in entries
    ]


def _check_index(
    driver: Driver, found: dict[str, list[SourceTensor]], by_name: Mapping[str, str]
) -> None:
    there = {tensor.name: key for key, tensors in found.items() for tensor in tensors}
    for name, key in [*by_name.items(), *there.items()]:
        if by_name.get(name) != key or there.get(name) != key:
            raise DamagedError(
                f"index and files disagree on where tensor {name!r} is", uri=driver.uri, key=key
            )
