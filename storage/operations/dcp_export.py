"""Plans the export of a checkpoint to a folder of torch's distributed checkpoint (DCP).

Each item is a part of a file ``holdfast-0.distcp``, ``holdfast-1.distcp`` and so on, and is what
``torch.save`` makes of it. A large tensor is several items, because DCP's reader takes an item as a
whole. ``.metadata``, a pickle that says where items lie, is made by DCP's own writer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ...core.units import round_up
from ...planner.box import Box
from ..format.dcp_metadata import DCP_METADATA_KEY
from ..format.model_folder import ModelFile, ModelTensor, joined
from ..format.torch_archive import TORCH_DTYPES, torch_pieces
from ..runtime.engine import run
from ..state.compat import DcpPlace
from ..state.dtypes import dtype_of
from ..state.targets import Wanted
from .dcp_contents import Contents, serialized
from .exported_tensors import ExportedTensors, ExportPlan
from .file_export import Source
from .reader import Checkpoint, manifest_of, read_wanted
from .selection import chosen, renamed

__all__ = ["plan_dcp_folder"]

ITEM_NBYTES = 64 << 20
"""Tensors are cut into items of about this size."""
_ALIGNMENT = 64
_RANK = 0
"""Values are those of this rank."""


def plan_dcp_folder(
    checkpoint: Checkpoint,
    only: Sequence[str],
    rules: Mapping[str, str],
    dtype: str | None,
    file_nbytes: int,
) -> ExportPlan:
    """The files of a folder with the tensors and values that ``only`` chooses, under their names by
    ``rules``. Reads values. Raises UsageError, DamagedError, StorageError."""
    contents = Contents(manifest_of(checkpoint), _RANK)
    new_names = renamed(chosen(contents.paths, only), rules)
    tensor_names = {name: new for name, new in new_names.items() if contents.is_tensor(name)}
    value_names = [name for name in new_names if name not in tensor_names]
    exported = ExportedTensors(contents.manifest.tensors, tensor_names, dtype, TORCH_DTYPES)
    folder = _Folder(file_nbytes)
    for name, data in _values(checkpoint, contents, value_names).items():
        folder.add_value(new_names[name], data)
    for tensor, source in exported.tensors:
        folder.add_tensor(tensor, source)
    for name, first in exported.tied.items():
        folder.tie(name, first)
    folder.metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint.uri)
    folder.metadata.planner_data = {
        new: contents.paths[name] if new == name else (new,) for name, new in new_names.items()
    }
    return ExportPlan(
        folder.files,
        folder.sources,
        len(exported.tensors),
        exported.tied,
        (DCP_METADATA_KEY, folder.metadata_bytes()),
    )


def _values(checkpoint: Checkpoint, contents: Contents, names: Sequence[str]) -> dict[str, bytes]:
    """Values as DCP stores them."""
    wanted = Wanted()
    values = {name: contents.value(name, wanted) for name in names}
    run(read_wanted(checkpoint, wanted))
    return {name: serialized(value).getvalue() for name, value in values.items()}


@dataclass(slots=True)
class _Folder:
    """Files that are filled with items, each of at most ``file_nbytes`` unless a single one is
    larger, and what DCP is told of them."""

    file_nbytes: int
    sources: dict[str, Source] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    _pieces: list[list[bytes | ModelTensor]] = field(default_factory=lambda: [[]])
    _end: int = 0
    """Of the last file."""
    _places: dict[MetadataIndex, DcpPlace] = field(default_factory=dict)

    @property
    def files(self) -> list[ModelFile]:
        """All files."""
        return [
            ModelFile(_key(number), joined(pieces)) for number, pieces in enumerate(self._pieces)
        ]

    def add_value(self, name: str, data: bytes) -> None:
        """One more value, as it was serialized."""
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        self._places[MetadataIndex(name)] = self._placed([data])

    def add_tensor(self, tensor: ModelTensor, source: Source) -> None:
        """One more tensor."""
        chunks = []
        for box, start in _boxes(tensor):
            part = ModelTensor(f"{tensor.name}@{start}", tensor.dtype, tensor.itemsize, box.lengths)
            stored_start = start * source.kind[1]
            self.sources[part.name] = Source(
                source.row, source.kind, source.convert_to, stored_start
            )
            offsets = torch.Size(box.offsets)
            self._places[MetadataIndex(tensor.name, offsets)] = self._placed(torch_pieces(part))
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(box.lengths)))
        properties = TensorProperties(dtype=dtype_of(tensor.dtype, tensor.itemsize))
        self.metadata.state_dict_metadata[tensor.name] = TensorStorageMetadata(
            properties, torch.Size(tensor.shape), chunks
        )

    def tie(self, name: str, first: str) -> None:
        """Another name of the tensor ``first``."""
        stored = self.metadata.state_dict_metadata[first]
        assert isinstance(stored, TensorStorageMetadata)
        self.metadata.state_dict_metadata[name] = stored
        for chunk in stored.chunks:
            place = self._places[MetadataIndex(first, chunk.offsets)]
            self._places[MetadataIndex(name, chunk.offsets)] = place

    def metadata_bytes(self) -> bytes:
        """The file that DCP's reader unpickles."""
        results = [WriteResult(index, place.length, place) for index, place in self._places.items()]
        with tempfile.TemporaryDirectory() as scratch:
            _MetadataWriter(scratch, self.metadata.storage_meta).finish(self.metadata, [results])
            return Path(scratch, DCP_METADATA_KEY).read_bytes()

    def _placed(self, pieces: Sequence[bytes | ModelTensor]) -> DcpPlace:
        """Add an item to the last file, or to a new one, at a multiple of the alignment."""
        nbytes = ModelFile("", tuple(pieces)).nbytes
        start = round_up(self._end, _ALIGNMENT)
        if start and start + nbytes > self.file_nbytes:
            self._pieces.append([])
            self._end = 0
            start = 0
        if start > self._end:
            self._pieces[-1].append(bytes(start - self._end))
        self._pieces[-1] += pieces
        self._end = start + nbytes
        return DcpPlace(_key(len(self._pieces) - 1), start, nbytes)


class _MetadataWriter(FileSystemWriter):
    """DCP's writer, of ``.metadata`` alone."""

    def __init__(self, path: str | os.PathLike[str], meta: StorageMeta | None) -> None:
        super().__init__(path, sync_files=False)
        self._meta = meta

    def storage_meta(self) -> StorageMeta | None:
        """Where the checkpoint came from."""
        return self._meta


def _key(number: int) -> str:
    return f"holdfast-{number}.distcp"


def _boxes(tensor: ModelTensor) -> Iterator[tuple[Box, int]]:
    """The items that a tensor consists of: whole rows, and the number of the first element."""
    if not tensor.shape or tensor.nbytes <= ITEM_NBYTES:
        yield Box((0,) * len(tensor.shape), tensor.shape), 0
        return
    rows, *rest = tensor.shape
    row_numel = tensor.nbytes // tensor.itemsize // rows
    step = max(1, ITEM_NBYTES // (row_numel * tensor.itemsize))
    for row in range(0, rows, step):
        box = Box((row, *(0 for _ in rest)), (min(step, rows - row), *rest))
        yield box, row * row_numel
