"""Layout of a Hugging Face model folder: safetensors files, plus an index if there are several.

Pure: computes texts and layouts; files are read and written elsewhere.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ...core import safetensors
from ...core.forks.cached import cached_property
from ...core.units import in_groups
from ...planner.image import PAGE_NBYTES

INDEX_KEY = "model.safetensors.index.json"
MODEL_FILE = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A whole tensor. ``dtype`` is torch's name."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, eq=False)
class ModelFile:
    """A file as consecutive pieces: literal bytes, and tensors whose bytes are filled in later."""

    key: str
    pieces: tuple[bytes | ModelTensor, ...]

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """Return the pieces that are tensors."""
        return tuple(piece for piece in self.pieces if isinstance(piece, ModelTensor))

    @cached_property
    def sizes(self) -> list[int]:
        """Return the size of each piece in bytes."""
        return [len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in self.pieces]

    @cached_property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return sum(self.sizes)


def joined(pieces: Iterable[bytes | ModelTensor]) -> tuple[bytes | ModelTensor, ...]:
    """Return the same bytes in fewer pieces: one between two tensors."""
    found: list[bytes | ModelTensor] = []
    for is_tensor, run in itertools.groupby(pieces, lambda piece: isinstance(piece, ModelTensor)):
        if is_tensor:
            found += run
        else:
            found.append(b"".join(piece for piece in run if isinstance(piece, bytes)))
    return tuple(found)


def image_rank(tensor: ModelTensor) -> int:
    """Return a sort key for the order of tensors in an image: whole pages first, then by itemsize.

    Files in this order are read from an image, and into one, in long runs. Small tensors between
    large ones would each cost a separate read.
    """
    if tensor.nbytes % PAGE_NBYTES == 0:
        return -PAGE_NBYTES
    return -tensor.itemsize


def model_files(
    tensors: Sequence[ModelTensor], file_nbytes: int, metadata: Mapping[str, str]
) -> list[ModelFile]:
    """Return the files that hold ``tensors`` in order, of dtypes in
    ``safetensors.EXPORTED_DTYPES``.

    A file holds at most ``file_nbytes`` of tensors, unless a single tensor is larger. Headers are
    whole pages and each file's tensors are in image order, which aligns every tensor to its
    elements. Raises ValueError if a header would exceed the readers' limit.
    """
    groups = list(in_groups(tensors, attrgetter("nbytes"), file_nbytes)) or [[]]
    files = []
    for number, group in enumerate(groups, 1):
        key = "model.safetensors"
        if len(groups) > 1:
            key = f"model-{number:05}-of-{len(groups):05}.safetensors"
        ordered = sorted(group, key=image_rank)
        header = _header(ordered, metadata)
        if len(header) - safetensors.LENGTH_NBYTES > safetensors.HEADER_NBYTES_MAX:
            raise ValueError(f"{len(ordered):,} tensors are too many for one file")
        files.append(ModelFile(key, (header, *ordered)))
    return files


def _header(tensors: Sequence[ModelTensor], metadata: Mapping[str, str]) -> bytes:
    entries = []
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        code, shape = safetensors.from_torch(tensor.dtype, tensor.shape)
        entries.append(safetensors.Entry(tensor.name, code, shape, start, stop))
        start = stop
    return safetensors.header(entries, metadata, PAGE_NBYTES)


def index_text(files: Sequence[ModelFile]) -> bytes:
    """Return the index of several files as JSON."""
    weight_map = {tensor.name: file.key for file in files for tensor in file.tensors}
    total_nbytes = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode()
