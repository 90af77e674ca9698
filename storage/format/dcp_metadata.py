"""Reader for the ``.metadata`` file of a torch distributed checkpoint (DCP) folder.

Lists the tensors and values of the checkpoint, and the file and byte range of each part. The file
is a pickle of dataclasses; :mod:`.torch_pickle` reads it without running any of it. Unknown classes
are refused. Nothing in the file is trusted: a part must lie within its tensor, and its file within
the folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.garbage import collector_paused
from ...planner.box import Box
from .torch_pickle import COUNT_MAX, NEW_DTYPES, Record, Value, counts, dtype_in, read_pickle

DCP_METADATA_KEY = ".metadata"
DCP_FILE = re.compile(r"holdfast-[0-9]+\.distcp")
"""File names that our export writes. DCP's own writer uses others."""

Path = tuple[str | int, ...]

_METADATA = "torch.distributed.checkpoint.metadata."
_PLANNER = "torch.distributed.checkpoint.planner."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_FIELDS = {
    _METADATA + "BytesStorageMetadata": (),
    _METADATA + "ChunkStorageMetadata": ("offsets", "sizes"),
    _METADATA + "Metadata": (
        "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version",
        "all_local_plans",  # written by Megatron; repeats the other fields
    ),
    _METADATA + "MetadataIndex": ("fqn", "offset", "index"),
    _METADATA + "TensorStorageMetadata": ("properties", "size", "chunks"),
    _STORAGE_INFO: ("relative_path", "offset", "length", "transform_descriptors"),
}  # fmt: skip
"""Allowed fields of each dataclass."""
_PROPERTIES = _METADATA + "TensorProperties"
_LAYOUT = "torch.serialization._get_layout"
_MEMORY_FORMAT = _METADATA + "_MEM_FORMAT_ENCODING"
_KNOWN = {
    *_FIELDS,
    _PROPERTIES,
    _LAYOUT,
    _MEMORY_FORMAT,
    _METADATA + "StorageMeta",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    # Megatron also stores the plans of all ranks, which are not needed here.
    _PLANNER + "BytesIOWriteData",
    _PLANNER + "SavePlan",
    _PLANNER + "TensorWriteData",
    _PLANNER + "WriteItem",
    _PLANNER + "WriteItemType",
}
_MEMORY_FORMATS = (0, 1, 2)
"""Contiguous, channels last, preserve. None affects values: each part records its own strides."""
_FILE_NAME = re.compile(r"(?!\.\.?$)[^/\\\0]+")


@dataclass(frozen=True, slots=True)
class FilePart:
    """``nbytes`` bytes at offset ``start`` of file ``key`` in the folder."""

    key: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A tensor and its boxes, each with its location. ``dtype`` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, FilePart], ...]


@dataclass(frozen=True, slots=True)
class FolderContents:
    """Tensors and values by name. ``paths`` holds the keys that lead to an item in the state,
    for items whose path the planner recorded."""

    tensors: Mapping[str, StoredParts]
    values: Mapping[str, FilePart]
    paths: Mapping[str, Path]


@collector_paused()
def read_metadata(data: bytes) -> FolderContents:
    """Return the contents of the folder. Raises ValueError naming the unknown or impossible
    part."""
    root = read_pickle(data, _KNOWN.__contains__)
    fields = _fields(root, _METADATA + "Metadata")
    places = _places(fields.get("storage_data"))
    tensors: dict[str, StoredParts] = {}
    values: dict[str, FilePart] = {}
    for name, item in _dict(fields.get("state_dict_metadata")).items():
        if not isinstance(name, str):
            raise ValueError(f"an item is named {name!r:.100}")
        if isinstance(item, Record) and item.name == _METADATA + "BytesStorageMetadata":
            _fields(item, item.name)
            values[name] = _place_of(places, name, None)
        else:
            tensors[name] = _tensor(name, item, places)
    return FolderContents(tensors, values, _paths(fields.get("planner_data")))


_Places = Mapping[tuple[str, tuple[int, ...] | None], FilePart]


def _places(storage_data: Value) -> _Places:
    if not isinstance(storage_data, dict):
        raise ValueError("it does not locate its items")
    places = {}
    for index, info in storage_data.items():
        key = _fields(index, _METADATA + "MetadataIndex")
        name = key.get("fqn")
        offset = key.get("offset")
        if not isinstance(name, str):
            raise ValueError("a part has no name")
        if offset is not None:
            offset = counts(offset)
        places[name, offset] = _file_part(name, _fields(info, _STORAGE_INFO))
    return places


def _file_part(name: str, info: Mapping[Value, Value]) -> FilePart:
    if info.get("transform_descriptors"):
        raise ValueError(f"{name!r} is written through an unknown extension")
    file = info.get("relative_path")
    if not isinstance(file, str) or _FILE_NAME.fullmatch(file) is None:
        raise ValueError(f"{name!r} is in {file!r:.200}, which is not a file in its folder")
    start, nbytes = counts((info.get("offset"), info.get("length")))
    return FilePart(file, start, nbytes)


def _tensor(name: str, item: Value, places: _Places) -> StoredParts:
    fields = _fields(item, _METADATA + "TensorStorageMetadata")
    dtype = _dtype(name, _state(fields.get("properties"), _PROPERTIES))
    shape = counts(fields.get("size"))
    if math.prod(shape) * NEW_DTYPES[dtype] >= COUNT_MAX:
        raise ValueError(f"{name!r} is larger than any tensor")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise ValueError(f"{name!r} has no list of parts")
    boxes = [_box(name, chunk, shape) for chunk in chunks]
    placed = tuple((box, _place_of(places, name, box.offsets)) for box in boxes)
    return StoredParts(dtype, shape, placed)


def _dtype(name: str, properties: Value) -> str:
    """Return torch's name of the dtype, the first of a tensor's properties.

    Raises ValueError unless the other properties describe a plain tensor.
    """
    if not isinstance(properties, tuple) or len(properties) != 5:
        raise ValueError(f"{name!r} has unknown properties")
    dtype, layout, requires_grad, memory_format, pin_memory = properties
    text = dtype_in(dtype)
    if text is None:
        raise ValueError(f"{name!r} has an unknown dtype")
    if _argument(layout, _LAYOUT) != "torch.strided":
        raise ValueError(f"{name!r} has the layout {_argument(layout, _LAYOUT)!r:.100}")
    if _argument(memory_format, _MEMORY_FORMAT) not in _MEMORY_FORMATS:
        raise ValueError(f"{name!r} has an unknown memory format")
    if type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise ValueError(f"{name!r} has unknown properties")
    return text


def _argument(value: Value, name: str) -> Value:
    """Return the single argument of the record ``name``, or None for any other value."""
    if isinstance(value, Record) and value.name == name and len(value.arguments) == 1:
        return value.arguments[0]
    return None


def _box(name: str, chunk: Value, shape: tuple[int, ...]) -> Box:
    fields = _fields(chunk, _METADATA + "ChunkStorageMetadata")
    offsets = counts(fields.get("offsets"))
    lengths = counts(fields.get("sizes"))
    if not len(offsets) == len(lengths) == len(shape) or any(
        offset + length > size for offset, length, size in zip(offsets, lengths, shape, strict=True)
    ):
        raise ValueError(f"a part of {name!r} lies outside it")
    return Box(offsets, lengths)


def _place_of(places: _Places, name: str, offset: tuple[int, ...] | None) -> FilePart:
    place = places.get((name, offset))
    if place is None:
        raise ValueError(f"it does not locate a part of {name!r} lies")
    return place


def _paths(planner_data: Value) -> Mapping[str, Path]:
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and all(type(key) in (str, int) for key in path)
    }


def _state(value: Value, name: str) -> Value:
    if not isinstance(value, Record):
        raise ValueError(f"it has a {type(value).__name__} in the place of a {name}")
    if value.name != name:
        raise ValueError(f"it has a {value.name} in the place of a {name}")
    if value.arguments:
        raise ValueError(f"a {name} has constructor arguments")
    return value.state


def _fields(value: Value, name: str) -> Mapping[Value, Value]:
    """Return the fields of a dataclass. Raises ValueError naming an unknown field."""
    state = _state(value, name)
    if state is None and not _FIELDS[name]:
        return {}
    if not isinstance(state, dict):
        raise ValueError(f"a {name} has no fields")
    for key in state:
        if key not in _FIELDS[name]:
            raise ValueError(f"a {name} has the field {key!r:.100}, which is not known")
    return state


def _dict(value: Value) -> Mapping[Value, Value]:
    if not isinstance(value, dict):
        raise ValueError("it lists no items")
    return value
