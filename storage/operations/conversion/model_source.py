"""Reads the headers of a model in safetensors files: tensors, and their locations in the files.

Files come from anywhere, so nothing in them is trusted: an index that names files outside its
folder is refused before any of them is read, headers are limited in size, and the tensors of a file
must cover its bytes exactly.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....core import safetensors
from ....core.aio import at_most
from ....core.garbage import collector_paused
from ....drivers.contract import Driver
from ....errors import DamagedError, NotFoundError, UnsupportedFormatError
from ....planner.box import Box
from ...format.torch_pickle import NEW_DTYPES
from ...pipeline.file_chunks import Enclosed, Stretch

logger = logging.getLogger(__name__)

_FORMAT = "pt"
_SUFFIX = ".safetensors"
_INDEX = re.compile(r"(.+)\.safetensors(\.[^.]+)?\.index(\.[^.]+)?\.json", re.DOTALL)
"""Names of index files. Libraries put the name of a variant, such as fp16, before or after
``index``, or before ``safetensors``."""
_SHARD = re.compile(r".+-[0-9]{5,}-of-[0-9]{5,}(\.[^.]+)?\.safetensors", re.DOTALL)
_TORCH_INDEX = re.compile(r".+\.bin(\.[^.]+)?\.index(\.[^.]+)?\.json", re.DOTALL)
_NAMED_MAX = 20
_INDEX_NBYTES_MAX = 256 << 20
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a model, or a part of one, stored in row-major order in a file.

    ``dtype`` is torch's name, or the format's code if torch has no such dtype. All parts of a
    tensor share its name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: Stretch | Enclosed
    part: Box | tuple[int, int] | None = None
    """A box of the tensor; or a range [first, last) of its elements; or None for all of it."""

    @property
    def itemsize(self) -> int:
        """Bytes per element. Raises UnsupportedFormatError for a dtype that torch lacks."""
        if self.dtype not in NEW_DTYPES:
            raise UnsupportedFormatError(
                f"tensor {self.name!r} of shape {list(self.shape)} has the dtype "
                f"{self.dtype!r:.100}, which torch does not have",
                advice=f"Leave it out: --skip {self.name!r}, or skip=[{self.name!r}].",
            )
        return NEW_DTYPES[self.dtype]


Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of all files, and each file's (size, modification time)."""

    tensors: tuple[SourceTensor, ...]
    stamps: Mapping[str, tuple[int, float]]
    left: tuple[str, ...] = ()
    """Names of non-tensor items that are not imported."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Non-tensor items that are imported, by name."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Known paths of tensors and values in the state, by name."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of safetensors files, without ``format``."""

    @property
    def names(self) -> list[str]:
        """Names of everything that is imported."""
        return list(dict.fromkeys([*(tensor.name for tensor in self.tensors), *self.values]))

    def of(self, names: Container[str]) -> Model:
        """Return the model restricted to these names."""
        return replace(
            self,
            tensors=tuple(tensor for tensor in self.tensors if tensor.name in names),
            values={name: value for name, value in self.values.items() if name in names},
        )

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.where.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Files:
    """The keys of a model's files, and the index as tensor name -> key; None without an index."""

    keys: Sequence[str]
    by_name: Mapping[str, str] | None = None


def is_index(key: str) -> bool:
    """Return whether a file of this name is an index of safetensors files."""
    return _INDEX.fullmatch(key) is not None


async def indexed_files(driver: Driver, key: str) -> Files:
    """Return the files that the index ``key`` names. Raises DamagedError, NotFoundError."""
    by_name = await _read_index(driver, key)
    return Files(sorted(set(by_name.values())), by_name)


async def find_files(driver: Driver, keys: Sequence[str]) -> Files:
    """Return the files of the model in a folder with files ``keys``.

    Ignores variants of a model, such as ``model.fp16.safetensors``, if the plain model exists.
    Raises NotFoundError if there is no model; DamagedError if the index is missing or malformed;
    UnsupportedFormatError if there are several models.
    """
    files = [key for key in keys if key.endswith(_SUFFIX)]
    singles = [key for key in files if not _SHARD.fullmatch(key)]
    stems = {key.removesuffix(_SUFFIX) for key in singles}
    stems |= {match[1] for key in keys if (match := _INDEX.fullmatch(key)) and _is_plain(match)}
    indexes = [key for key in keys if is_index(key) and not _is_variant(key, stems)]
    singles = [key for key in singles if not _is_variant(key, stems)]
    choices = indexes or singles
    if len(choices) > 1:
        kind = "" if indexes else " without an index"
        raise UnsupportedFormatError(
            f"there are several models or model files{kind}: {', '.join(choices[:_NAMED_MAX])}",
            uri=driver.uri,
            advice="Give one of them, by its own URI.",
        )
    if indexes:
        return await indexed_files(driver, indexes[0])
    if len(singles) == 1:
        return Files(singles)
    if not files:
        raise _no_model(driver, keys)
    raise DamagedError(
        f"there are {len(files):,} safetensors files and no index, so the model may be incomplete",
        uri=driver.uri,
        advice="Give one of the files, or get the index too.",
    )


def _is_plain(index: re.Match[str]) -> bool:
    return index[2] is None and index[3] is None


def _is_variant(key: str, stems: Container[str]) -> bool:
    """Return whether a file or an index is a variant of a model with one of the ``stems``."""
    index = _INDEX.fullmatch(key)
    if index is not None and not _is_plain(index):
        return index[1] in stems
    stem = index[1] if index is not None else key.removesuffix(_SUFFIX)
    model, _, variant = stem.rpartition(".")
    return model in stems and variant[:1].isalpha()


def _no_model(driver: Driver, keys: Sequence[str]) -> NotFoundError | UnsupportedFormatError:
    of_torch = [key for key in keys if _TORCH_INDEX.fullmatch(key)]
    if of_torch:
        return UnsupportedFormatError(
            f"{of_torch[0]} is an index of torch.save files, which is not supported",
            uri=driver.uri,
            advice="Import the files that it names one by one, or save the model with safetensors.",
        )
    return NotFoundError(
        "there is no safetensors file",
        uri=driver.uri,
        advice="Give the folder of a model; symbolic links are not followed.",
    )


async def _read_index(driver: Driver, key: str) -> dict[str, str]:
    """Return the file of each tensor. Raises DamagedError if the index is malformed or names a
    path outside its folder."""
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
                f"the index says that tensor {name!r} is in {file!r}, which is not a file in its "
                f"folder",
                uri=driver.uri,
                key=key,
            )
    if not names:
        raise DamagedError("the index names no tensor", uri=driver.uri, key=key)
    return names


async def read_model(driver: Driver, files: Files) -> Model:
    """Read a model from the headers of its files.

    Raises DamagedError if a file contradicts its header or the index; NotFoundError and
    StorageError.
    """
    stamps = await stamps_of(driver, files.keys)
    headers = await at_most(
        driver.traits.concurrency,
        (_read_header(driver, key, nbytes) for key, (nbytes, _) in stamps.items()),
    )
    found = {key: tensors for key, (tensors, _) in zip(stamps, headers, strict=True)}
    if files.by_name is not None:
        _check_index(driver, found, files.by_name)
    metadata = _united(driver, dict(zip(stamps, (said for _, said in headers), strict=True)))
    return Model(tuple(itertools.chain(*found.values())), stamps, metadata=metadata)


def _united(driver: Driver, said: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Merge the metadata of all files. If two contradict each other, keep the first and log a
    warning."""
    united: dict[str, str] = {}
    for key, metadata in said.items():
        for name, text in metadata.items():
            if united.setdefault(name, text) != text:
                logger.warning(
                    "%s: the metadata of file %s says %r for %r, an earlier file says %r, which is "
                    "kept",
                    driver.uri,
                    key,
                    text[:100],
                    name[:100],
                    united[name][:100],
                )
    if united.get("format") == _FORMAT:
        del united["format"]  # every export writes it
    return united


async def stamps_of(driver: Driver, keys: Collection[str]) -> dict[str, tuple[int, float]]:
    """Return (size, modification time) of each file, in order. Raises NotFoundError."""
    infos = await at_most(driver.traits.concurrency, map(driver.stat, keys))
    stamps = [(info.nbytes, info.modified_s) for info in infos]
    return dict(zip(keys, stamps, strict=True))


async def check_unchanged(driver: Driver, model: Model) -> None:
    """Raise DamagedError if a file has changed since its header was read."""
    for key, stamp in (await stamps_of(driver, model.stamps)).items():
        if stamp != model.stamps[key]:
            raise DamagedError(
                "the file was changed while it was read",
                uri=driver.uri,
                key=key,
                advice="Import it again, when no process writes to it.",
            )


async def _read_header(
    driver: Driver, key: str, file_nbytes: int
) -> tuple[list[SourceTensor], Mapping[str, str]]:
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
            header = safetensors.parsed(bytes(text), file_nbytes - data_start)
    except ValueError as error:
        raise DamagedError(
            f"the file contradicts its header: {error}",
            uri=driver.uri,
            key=key,
            advice="Get the file again.",
        ) from error
    tensors = []
    for e in header.entries:
        where = Stretch(key, data_start + e.start, e.stop - e.start)
        tensors.append(SourceTensor(e.name, *safetensors.to_torch(e.code, e.shape), where))
    return tensors, header.metadata


def _check_index(
    driver: Driver, found: dict[str, list[SourceTensor]], by_name: Mapping[str, str]
) -> None:
    there = {tensor.name: key for key, tensors in found.items() for tensor in tensors}
    for name, key in [*by_name.items(), *there.items()]:
        if by_name.get(name) != key or there.get(name) != key:
            raise DamagedError(
                f"index and files disagree on where tensor {name!r} is", uri=driver.uri, key=key
            )
