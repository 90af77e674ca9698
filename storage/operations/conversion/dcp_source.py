"""Reads a folder of torch's distributed checkpoint (DCP): tensors as located boxes, and values.

``.metadata`` names the items. Each is a part of a file, in ``torch.save`` format. The elements of a
large box are located by reading the beginning and the end of its item; those of a small one when
the item itself is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ....core.aio import at_most
from ....core.garbage import collector_paused
from ....drivers.contract import Driver
from ....errors import DamagedError, UnsupportedFormatError
from ....planner.box import Box
from ...format.dcp_metadata import (
    DCP_METADATA_KEY,
    FilePart,
    FolderContents,
    StoredParts,
    read_metadata,
)
from ...format.torch_pickle import NEW_DTYPES, Name, Record, StoredTensor, Value, leaves
from ...pipeline.file_chunks import ENCLOSED_NBYTES_MAX, Enclosed, Stretch
from ...runtime.engine import offload
from .archive_reader import ArchiveReader, WholeArchive
from .model_source import Model, SourceTensor, stamps_of

_METADATA_NBYTES_MAX = 1 << 30
_TAIL_NBYTES = 4096
"""Enough for the directory of a file with one tensor."""


async def read_items(driver: Driver, contents: FolderContents, names: Iterable[str]) -> Model:
    """Read the items with these names; ignore the others.

    Raises UnsupportedFormatError for a value that contains an object; DamagedError if an item
    contradicts ``.metadata``; NotFoundError and StorageError.
    """
    names = list(names)
    tensors = {name: contents.tensors[name] for name in names if name in contents.tensors}
    values = {name: contents.values[name] for name in names if name in contents.values}
    places = [
        *values.values(),
        *(place for stored in tensors.values() for _, place in stored.boxes),
    ]
    stamps = await stamps_of(driver, sorted({place.key for place in places}))
    _check_within(driver, places, {key: nbytes for key, (nbytes, _) in stamps.items()})
    found_values = await _read_values(driver, values)
    found = await _locate(driver, tensors)
    return Model(tuple(found), stamps, values=found_values, paths=contents.paths)


async def read_contents(driver: Driver) -> FolderContents:
    """Read ``.metadata``.

    Raises UnsupportedFormatError if it describes something that DCP does not write or names classes
    of objects; NotFoundError and StorageError.
    """
    info = await driver.stat(DCP_METADATA_KEY)
    try:
        if info.nbytes > _METADATA_NBYTES_MAX:
            raise ValueError(f"it has {info.nbytes:,} bytes")
        return await offload(read_metadata, await driver.get(DCP_METADATA_KEY))
    except ValueError as error:
        raise UnsupportedFormatError(
            f"this folder of torch's distributed checkpoint cannot be imported: {error}",
            uri=driver.uri,
            key=DCP_METADATA_KEY,
            advice="Load it with torch.distributed.checkpoint, and save the state with holdfast.",
        ) from error


def _check_within(driver: Driver, places: Iterable[FilePart], sizes: dict[str, int]) -> None:
    for place in places:
        if place.start + place.nbytes > sizes[place.key]:
            raise DamagedError(
                "the file is shorter than .metadata says", uri=driver.uri, key=place.key
            )


async def _read_values(driver: Driver, places: dict[str, FilePart]) -> dict[str, object]:

    async def read(name: str, place: FilePart) -> Value:
        archive = _archive(driver, place)
        try:
            value = await archive.value()
            await offload(check_plain, value)
        except (UnsupportedFormatError, ValueError) as error:
            raise no_plain_value(driver, place.key, name, error) from error
        return value

    found = await at_most(driver.traits.concurrency, map(read, places, places.values()))
    return dict(zip(places, found, strict=True))


def no_plain_value(driver: Driver, key: str, name: str, error: Exception) -> UnsupportedFormatError:
    """Build the error for a value in file ``key`` that :func:`check_plain` refuses."""
    reason = error.args[0] if error.args else error
    return UnsupportedFormatError(
        f"{name!r} is not a plain value: {reason}",
        uri=driver.uri,
        key=key,
        advice=f"Leave it out: --skip {name!r}, or skip=[{name!r}].",
    )


def check_plain(value: Value) -> None:
    """Raise ValueError unless a value consists of containers and small values only."""
    for path, leaf in leaves(value):
        if isinstance(leaf, StoredTensor):
            raise ValueError(f"it contains a tensor at {path or 'its place'}")
        if isinstance(leaf, Name):
            raise ValueError(f"it holds {leaf.text}")
        if isinstance(leaf, Record):
            raise ValueError(f"it holds an object of {leaf.name}")


async def _locate(driver: Driver, tensors: dict[str, StoredParts]) -> list[SourceTensor]:
    boxes = [
        (name, stored, box, place)
        for name, stored in tensors.items()
        for box, place in stored.boxes
    ]

    async def locate(number: int) -> Stretch:
        name, stored, box, place = boxes[number]
        archive = _archive(driver, place)
        tensor = _checked(archive, await archive.value(), name, stored.dtype, box)
        return (await archive.places({name: tensor}))[name]

    large = [
        number for number, (*_, place) in enumerate(boxes) if place.nbytes > ENCLOSED_NBYTES_MAX
    ]
    located = await at_most(driver.traits.concurrency, map(locate, large))
    found = dict(zip(large, located, strict=True))
    known: dict[bytes, Value] = {}
    with collector_paused():
        return [
            SourceTensor(
                name,
                stored.dtype,
                stored.shape,
                found.get(number) or _small_item(driver.uri, known, name, stored, (box, place)),
                box,
            )
            for number, (name, stored, box, place) in enumerate(boxes)
        ]


def _small_item(
    uri: str,
    known: dict[bytes, Value],
    name: str,
    stored: StoredParts,
    part: tuple[Box, FilePart],
) -> Enclosed:
    """Return the location of a box within its item, or raise DamagedError.

    The elements are found when the item is read. ``known`` caches pickles.
    """
    box, place = part
    nbytes = math.prod(box.lengths) * NEW_DTYPES[stored.dtype]
    where = _stretch(place)
    if nbytes > where.nbytes:
        raise DamagedError(
            f"the data of {name!r} is smaller than .metadata says", uri=uri, key=place.key
        )

    def begin(content: memoryview) -> int:
        archive = WholeArchive(uri, where, content)
        return archive.begin(name, _checked(archive, archive.value(known), name, stored.dtype, box))

    return Enclosed(where, nbytes, 0, begin)


def _checked(
    archive: ArchiveReader | WholeArchive, item: Value, name: str, dtype: str, box: Box
) -> StoredTensor:
    if not isinstance(item, StoredTensor) or (item.dtype, item.shape) != (dtype, box.lengths):
        raise archive.damaged(f"the data of {name!r} contradicts .metadata")
    return item


def _archive(driver: Driver, place: FilePart) -> ArchiveReader:
    return ArchiveReader(driver, _stretch(place), _TAIL_NBYTES)


def _stretch(place: FilePart) -> Stretch:
    return Stretch(place.key, place.start, place.nbytes)
