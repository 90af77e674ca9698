"""A Holdfast checkpoint as seen by torch's distributed checkpoint (DCP): its items by name.

DCP flattens a state into items, named by their dotted paths. It descends into dicts, and into lists
that contain tensors or dicts; a tuple is one item, and so is a list of numbers. An item is a tensor
or a value. Holdfast also names tensors by path, but descends into tuples and lists of numbers. This
module reassembles those.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ....planner.box import Box
from ...format.manifest import Manifest
from ...format.tree import Container, Key
from ...state.dtypes import dtype_of, empty
from ...state.filling.build import Items, viewers
from ...state.filling.targets import Wanted, typed_paths

OPAQUE_KEY = "holdfast.opaque"
"""Key that marks a value serialized by others: a dict with only this key, mapped to a byte
tensor."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that was serialized by others and that Holdfast does not decode."""

    content: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Item:
    """An item of DCP.

    It is one of: a tensor (``row``), a value (``value``: its row in the tree), a container of the
    tree that forms one value, or an opaque value whose bytes are in ``row``.
    """

    path: Path
    row: int = -1
    value: int = -1
    container: int = -1
    is_opaque: bool = False
    is_array: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.row >= 0 and not self.is_opaque and not self.is_array


class Contents:
    """The items of one checkpoint, as seen by ``rank``."""

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self.manifest = manifest
        self._rank = rank
        tree = manifest.tree
        self._seen_by = viewers(tree, typed_paths(tree), rank)
        self._prefixes = tree.prefixes()
        names = list(dict.fromkeys(manifest.tensors.names))
        self._rows_in: defaultdict[int, list[int]] = defaultdict(list)
        for row in manifest.tensors.find_all(names, rank).tolist():
            self._rows_in[int(manifest.container[row])].append(row)
        self._values_in: defaultdict[int, list[int]] = defaultdict(list)
        for number, value in enumerate(tree.values):
            self._values_in[value.container].append(number)
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for number, container in enumerate(tree.containers[1:], 1):
            self._children[container.parent].append(number)
        self._items = self._found()
        self.paths: Mapping[str, Path] = {name: item.path for name, item in self._items.items()}
        """The keys that lead to each item in the state, by item name."""

    def metadata(self, storage_meta: StorageMeta) -> Metadata:
        """Return the metadata from which DCP plans a load.

        Every tensor is a single chunk, however it is stored: Holdfast finds the stored boxes
        itself, and DCP plans faster with fewer chunks.
        """
        return Metadata(
            {name: self._metadata_of(item) for name, item in self._items.items()},
            planner_data=dict(self.paths),
            storage_meta=storage_meta,
        )

    def is_tensor(self, name: str) -> bool:
        """Return whether the item is a tensor."""
        return self._items[name].is_tensor

    def tensor_row(self, name: str) -> int:
        """Return the row that stores the tensor ``name``, which may be tied to another."""
        return self.manifest.tensors.stored_row(self._items[name].row)

    def value(self, name: str, wanted: Wanted) -> object:
        """Return the value ``name``. Its tensors are uninitialized and added to ``wanted``."""
        item = self._items[name]
        if item.is_opaque:
            return Opaque(self._new_tensor(item.row, wanted))
        if item.is_array:
            return self._new(item.row, wanted)
        if item.container >= 0:
            made, _ = self._assembled(item.container, wanted)
            return made
        return self.manifest.tree.values[item.value].of(self._rank)

    def is_opaque(self, name: str) -> bool:
        """Return whether the item is a value that was serialized by others."""
        return self._items[name].is_opaque

    def _found(self) -> Mapping[str, _Item]:
        paths = self._paths()
        is_value = self._values_of_containers()
        found: list[_Item] = []
        for number in range(len(paths)):
            if is_value[number]:
                found += self._outermost(number, paths[number], is_value)
                continue
            for row in self._rows_in[number]:
                name = self.manifest.tensors.names[row]
                path = (*paths[number], self._step(number, self._key(row)))
                found.append(_Item(path, row, is_array=name in self.manifest.tree.arrays))
            for value in self._values_in[number]:
                key = self.manifest.tree.values[value].key
                found.append(_Item((*paths[number], self._step(number, key)), value=value))
        return {".".join(map(str, item.path)): item for item in found}

    def _outermost(self, number: int, path: Path, is_value: list[bool]) -> list[_Item]:
        """Return the item that container ``number`` forms, unless it is within another such
        container."""
        if is_value[self._container(number).parent]:
            return []
        row = self._opaque_row(number)
        if row is not None:
            return [_Item(path, row, is_opaque=True)]
        return [_Item(path, container=number)]

    def _values_of_containers(self) -> list[bool]:
        """Return for each container whether DCP stores it within one value.

        This holds for tuples, for lists without tensors and dicts, and for everything inside those.
        """
        tree = self.manifest.tree
        found = [
            c.kind != "dict" or self._opaque_row(number) is not None
            for number, c in enumerate(tree.containers)
        ]
        for number, container in enumerate(tree.containers):
            if container.kind == "list" and any(map(self._is_plain, self._rows_in[number])):
                found[number] = False
        for number in range(len(found) - 1, 0, -1):
            parent = tree.containers[number].parent
            if not found[number] and tree.containers[parent].kind == "list":
                found[parent] = False
        found[0] = False
        for number, container in enumerate(tree.containers[1:], 1):
            found[number] |= found[container.parent]
        return found

    def _opaque_row(self, number: int) -> int | None:
        rows = self._rows_in[number]
        if len(rows) == 1 and self._key(rows[0]) == OPAQUE_KEY:
            return rows[0]
        return None

    def _is_plain(self, row: int) -> bool:
        return self.manifest.tensors.names[row] not in self.manifest.tree.arrays

    def _paths(self) -> list[Path]:
        paths: list[Path] = [()]
        for container in self.manifest.tree.containers[1:]:
            parent = container.parent
            paths.append((*paths[parent], self._step(parent, container.key)))
        return paths

    def _step(self, container: int, key: Key) -> str | int:
        """Return a key in DCP's notation: a str in dicts, an int in lists."""
        if self._container(container).kind == "dict" or container == 0:
            return str(key)
        assert isinstance(key, int)
        return key

    def _container(self, number: int) -> Container:
        return self.manifest.tree.containers[number]

    def _key(self, row: int) -> Key:
        container = int(self.manifest.container[row])
        text = self.manifest.tensors.names[row][len(self._prefixes[container]) :]
        return self.manifest.tree.tensor_key(container, text)

    def dtype(self, row: int) -> torch.dtype:
        """Return the dtype of the tensor in a row."""
        tensors = self.manifest.tensors
        return dtype_of(*tensors.dtypes[int(tensors.dtype[row])])

    def _metadata_of(self, item: _Item) -> TensorStorageMetadata | BytesStorageMetadata:
        if not item.is_tensor:
            return BytesStorageMetadata()
        row = self.manifest.tensors.stored_row(item.row)
        shape = self.manifest.tensors.shape_of(row)
        return tensor_metadata(self.dtype(row), shape, [Box((0,) * len(shape), shape)])

    def _new_tensor(self, row: int, wanted: Wanted) -> torch.Tensor:
        root = self.manifest.tensors.stored_row(row)
        tensors = self.manifest.tensors
        made = empty(tensors.shape_of(root), self.dtype(root), tensors.names[root])
        wanted.add_whole(root, made)
        return made

    def _new(self, row: int, wanted: Wanted) -> object:
        made = self._new_tensor(row, wanted)
        if self._is_plain(row):
            return made
        return made.numpy()

    def _assembled(self, number: int, wanted: Wanted) -> tuple[object, Items]:
        tree = self.manifest.tree
        items = Items()
        for row in self._rows_in[number]:
            items.own = True
            items.tensors.append((self._key(row), self._new(row, wanted)))
        kind = self._container(number).kind
        for each in self._values_in[number]:
            rank = self._seen_by[number]
            items.add_value(tree.values[each], rank, self.manifest.world, kind)
        for child in reversed(self._children[number]):
            items.add_container(self._container(child).key, *self._assembled(child, wanted))
        return items.assembled(tree, number), items


def tensor_metadata(
    dtype: torch.dtype, shape: Sequence[int], boxes: Sequence[Box]
) -> TensorStorageMetadata:
    """Return the metadata of a tensor that is stored in these boxes."""
    chunks = [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in boxes
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def serialized(value: object) -> io.BytesIO:
    """Return a value as the stream that DCP's planners expect."""
    if isinstance(value, Opaque):
        return io.BytesIO(value.content.numpy().tobytes())
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
