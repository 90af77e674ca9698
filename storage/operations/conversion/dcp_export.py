"""Plans an export to a folder of torch's distributed checkpoint (DCP).

Each item is stored in ``torch.save`` format as a part of a file ``holdfast-N.distcp``. A large
tensor is split into several items, because DCP's reader loads an item as a whole. DCP's own writer
creates ``.metadata``, the pickle with the items' locations.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ....core.garbage import collector_paused
from ....core.units import round_up
from ....planner.box import Box
from ...format.dcp_metadata import DCP_METADATA_KEY
from ...format.model_folder import ModelFile, ModelTensor, image_rank, joined
from ...format.part import Selection
from ...format.torch_archive import TORCH_DTYPES, alignment_of, torch_pieces
from ...runtime.engine import run
from ...state.compat import DcpPlace
from ...state.dtypes import dtype_of
from ...state.filling.targets import Wanted
from ..reading.reader import Checkpoint, manifest_of, read_wanted
from ..reading.selection import chosen, renamed
from .dcp_contents import Contents, serialized, tensor_metadata
from .file_export import ExportedTensors, ExportPlan, LastFile, Source

ITEM_NBYTES = 64 << 20
"""Target size of the items of a large tensor."""
_RANK = 0
"""Rank whose values are exported."""


def plan_dcp_folder(
    checkpoint: Checkpoint,
    only: Selection,
    rules: Mapping[str, str],
    dtype: str | None,
    file_nbytes: int,
) -> ExportPlan:
    """Plan the files for the tensors and values selected by ``only``, renamed by ``rules``.

    Reads the values. Raises UsageError, DamagedError and StorageError.
    """
    contents = Contents(manifest_of(checkpoint), _RANK)
    new_names = renamed(chosen(contents.paths, only), rules)
    tensor_names = {name: new for name, new in new_names.items() if contents.is_tensor(name)}
    value_names = [name for name in new_names if name not in tensor_names]
    with collector_paused():
        exported = ExportedTensors(contents.manifest.tensors, tensor_names, dtype, TORCH_DTYPES)
    values = _values(checkpoint, contents, value_names)
    folder = _Folder(file_nbytes)
    with collector_paused():
        for name, data in values.items():
            folder.add_value(new_names[name], data)
        for tensor, source in sorted(exported.tensors, key=lambda item: image_rank(item[0])):
            folder.add_tensor(tensor, source)
    for name, first in exported.tied.items():
        folder.tensors[name] = folder.tensors[first]
    paths = {
        new: contents.paths[name] if new == name else (new,) for name, new in new_names.items()
    }
    return ExportPlan(
        folder.files,
        folder.sources,
        len(exported.tensors),
        exported.tied,
        LastFile(DCP_METADATA_KEY, partial(_metadata_bytes, folder, paths, checkpoint.uri)),
    )


def _values(checkpoint: Checkpoint, contents: Contents, names: Sequence[str]) -> dict[str, bytes]:
    wanted = Wanted()
    values = {name: contents.value(name, wanted) for name in names}
    run(read_wanted(checkpoint, wanted))
    return {name: serialized(value).getvalue() for name, value in values.items()}


Keys = tuple[str | int, ...]


@dataclass(slots=True)
class _Folder:
    """Files filled with items, each at most ``file_nbytes`` unless a single item is larger."""

    file_nbytes: int
    sources: dict[str, Source] = field(default_factory=dict)
    values: dict[str, DcpPlace] = field(default_factory=dict)
    """Location of each value, by name."""
    tensors: dict[str, tuple[ModelTensor, list[tuple[Box, DcpPlace]]]] = field(default_factory=dict)
    """Items of each tensor with their locations, by name."""
    _pieces: list[list[bytes | ModelTensor]] = field(default_factory=lambda: [[]])
    _end: int = 0
    """End of the last file."""

    @property
    def files(self) -> list[ModelFile]:
        return [
            ModelFile(_key(number), joined(pieces)) for number, pieces in enumerate(self._pieces)
        ]

    def add_value(self, name: str, data: bytes) -> None:
        self.values[name] = self._placed([data], len(data))

    def add_tensor(self, tensor: ModelTensor, source: Source) -> None:
        items = []
        for box, start in _boxes(tensor):
            part = ModelTensor(f"{tensor.name}@{start}", tensor.dtype, tensor.itemsize, box.lengths)
            stored_start = start * source.kind[1]
            self.sources[part.name] = Source(
                source.row, source.kind, source.convert_to, stored_start
            )
            items.append((box, self._placed(*torch_pieces(part))))
        self.tensors[tensor.name] = (tensor, items)

    def _placed(self, pieces: Sequence[bytes | ModelTensor], nbytes: int) -> DcpPlace:
        """Append an item to the last file, or start a new file if it does not fit.

        The item is aligned so that the elements within it are aligned in the file.
        """
        start = round_up(self._end, alignment_of(nbytes))
        if start and start + nbytes > self.file_nbytes:
            self._pieces.append([])
            self._end = 0
            start = 0
        if start > self._end:
            self._pieces[-1].append(bytes(start - self._end))
        self._pieces[-1] += pieces
        self._end = start + nbytes
        return DcpPlace(_key(len(self._pieces) - 1), start, nbytes)


def _metadata_bytes(folder: _Folder, paths: Mapping[str, Keys], uri: str) -> bytes:
    """Return the pickle that DCP's reader loads; ``paths`` are the items' keys in the state."""
    with collector_paused():
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        results = []
        for name in paths:
            if name in folder.values:
                described[name] = BytesStorageMetadata()
                place = folder.values[name]
                results.append(WriteResult(MetadataIndex(name), place.length, place))
                continue
            tensor, items = folder.tensors[name]
            dtype = dtype_of(tensor.dtype, tensor.itemsize)
            boxes = [box for box, _ in items]
            described[name] = tensor_metadata(dtype, tensor.shape, boxes)
            for box, place in items:
                index = MetadataIndex(name, torch.Size(box.offsets))
                results.append(WriteResult(index, place.length, place))
        meta = StorageMeta(checkpoint_id=uri)
        metadata = Metadata(described, planner_data=dict(paths), storage_meta=meta)
    with tempfile.TemporaryDirectory() as scratch:
        _MetadataWriter(scratch, meta).finish(metadata, [results])
        return Path(scratch, DCP_METADATA_KEY).read_bytes()


class _MetadataWriter(FileSystemWriter):
    """DCP's writer, used for ``.metadata`` only."""

    def __init__(self, path: str | os.PathLike[str], meta: StorageMeta | None) -> None:
        super().__init__(path, sync_files=False)
        self._meta = meta

    def storage_meta(self) -> StorageMeta | None:
        return self._meta


def _key(number: int) -> str:
    return f"holdfast-{number}.distcp"


def _boxes(tensor: ModelTensor) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of whole rows into which a tensor is split, with their first element's
    number."""
    if not tensor.shape or tensor.nbytes <= ITEM_NBYTES:
        yield Box((0,) * len(tensor.shape), tensor.shape), 0
        return
    rows, *rest = tensor.shape
    row_numel = tensor.nbytes // tensor.itemsize // rows
    step = max(1, ITEM_NBYTES // (row_numel * tensor.itemsize))
    for row in range(0, rows, step):
        box = Box((row, *(0 for _ in rest)), (min(step, rows - row), *rest))
        yield box, row * row_numel
