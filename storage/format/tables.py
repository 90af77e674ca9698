"""The tables of tensors, shards and images as columns, shared by manifests and fragments.

``manifest`` and ``fragment`` add their own columns and headers; ``columns`` encodes columns as
bytes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...core.decoded_json import Json, int_in, rows_in, str_in
from ...core.units import ceil_div
from ...errors import SaveError
from ...planner.columns import Ints
from ...planner.image import DIGEST_NBYTES
from ...planner.table import ShardTable, TensorTable
from .columns import Column, Columns
from .tree import Tree

NDIM_MAX = 256
_INT_MAX = 1 << 62
SHARD_COLUMNS = ("shard.offsets", "shard.lengths", "shard.image", "shard.start")
"""Columns of shards, except for their tensors."""


@dataclass(frozen=True)
class ImageTable:
    """Images, by columns (I,), and the digests of all their chunks (C, 16), image after image."""

    rank: Ints
    hashed_nbytes: Ints
    digests: npt.NDArray[np.uint8]
    stored_nbytes: Ints | None = None
    """File sizes, if the images are compressed."""

    def __len__(self) -> int:
        return len(self.rank)

    def chunks(self, chunk_nbytes: int) -> Ints:
        return ceil_div(self.hashed_nbytes, chunk_nbytes)

    def nbytes(self, block_nbytes: int) -> Ints:
        """Return the size per image: the hashed bytes, then a digest per block."""
        return self.hashed_nbytes + DIGEST_NBYTES * ceil_div(self.hashed_nbytes, block_nbytes)

    def file_nbytes(self, block_nbytes: int) -> Ints:
        """Return the file size per image: the image's size, unless compressed."""
        if self.stored_nbytes is None:
            return self.nbytes(block_nbytes)
        return self.stored_nbytes

    @classmethod
    def of(
        cls,
        rank: int,
        hashed_nbytes: int,
        digests: npt.NDArray[np.uint8],
        stored_nbytes: int | None = None,
    ) -> ImageTable:
        """Return the table of one image; an empty one for a rank that writes no chunk."""
        n = int(len(digests) > 0)
        stored = None if stored_nbytes is None else np.full(n, stored_nbytes, np.int64)
        return cls(np.full(n, rank, np.int64), np.full(n, hashed_nbytes, np.int64), digests, stored)

    @classmethod
    def joined(cls, tables: Sequence[ImageTable]) -> ImageTable:
        """Concatenate tables. Either all are compressed or none is."""
        stored = [table.stored_nbytes for table in tables if table.stored_nbytes is not None]
        return cls(
            np.concatenate([table.rank for table in tables]),
            np.concatenate([table.hashed_nbytes for table in tables]),
            np.concatenate([table.digests for table in tables]),
            np.concatenate(stored) if stored else None,
        )


def check_readable(tensors: TensorTable, tree: Tree) -> None:
    """Raise SaveError for a state that no reader would accept."""
    if tensors.shape.shape[1] > NDIM_MAX:
        raise SaveError(f"a tensor has more than {NDIM_MAX} dimensions")
    if tree.paths_too_long:
        raise SaveError(
            "the paths of the state's containers are too long in total",
            advice="Use shorter keys, or nest less deeply.",
        )


def tensor_columns(tensors: TensorTable, container: Ints) -> dict[str, Column]:
    """Return the columns of tensors and of their containers, by name."""
    t = tensors
    names = [name.encode("utf-8", "surrogatepass") for name in t.names]
    columns: dict[str, Column] = {
        "tensor.name": np.frombuffer(b"".join(names), np.uint8),
        "tensor.name_nbytes": np.fromiter(map(len, names), np.int64, len(names)),
        "tensor.dtype": t.dtype,
        "tensor.ndim": t.ndim,
        "tensor.shape": t.shape,
        "tensor.container": container,
    }
    if (t.alias >= 0).any():
        columns["tensor.alias"] = t.alias + 1
    if (t.owner >= 0).any():
        columns["tensor.owner"] = t.owner + 1
    return columns


def tensor_table(columns: Columns, dtypes: Json) -> TensorTable:
    """Build the tensor table from :func:`tensor_columns`; ``dtypes`` comes from the header.

    Raises KeyError, TypeError and ValueError.
    """

    def optional(name: str) -> Ints:
        if name in columns:
            return ints_of(columns, name)
        return np.zeros(len(columns["tensor.dtype"]), np.int64)

    return TensorTable(
        names=_names(columns["tensor.name"].tobytes(), ints_of(columns, "tensor.name_nbytes")),
        dtype=columns["tensor.dtype"].astype(np.uint8, casting="safe"),
        dtypes=tuple(
            (str_in(name, "dtypes"), json_integer(itemsize, "dtypes"))
            for name, itemsize in rows_in(dtypes, 2, "dtypes")
        ),
        ndim=ints_of(columns, "tensor.ndim"),
        shape=ints_of(columns, "tensor.shape"),
        alias=optional("tensor.alias") - 1,
        owner=optional("tensor.owner") - 1,
    )


def shard_columns(shards: ShardTable, images: ImageTable) -> dict[str, Column]:
    """Return the columns of shards, except for their tensors, and of images."""
    columns: dict[str, Column] = {
        "shard.image": shards.image,
        "shard.start": shards.start,
        "shard.offsets": shards.offsets,
        "shard.lengths": shards.lengths,
        "image.rank": images.rank,
        "image.hashed_nbytes": images.hashed_nbytes,
        "chunk.digest": images.digests,
    }
    if images.stored_nbytes is not None:
        columns["image.stored_nbytes"] = images.stored_nbytes
    return columns


def shard_table(columns: Columns, tensor: Ints) -> ShardTable:
    """Build the shard table from :func:`shard_columns`. Raises KeyError and ValueError."""
    return ShardTable(tensor, *(ints_of(columns, name) for name in SHARD_COLUMNS))


def image_table(columns: Columns, *, compressed: bool) -> ImageTable:
    """Build the image table from :func:`shard_columns`. Raises KeyError and ValueError."""
    return ImageTable(
        rank=ints_of(columns, "image.rank"),
        hashed_nbytes=ints_of(columns, "image.hashed_nbytes"),
        digests=columns["chunk.digest"],
        stored_nbytes=ints_of(columns, "image.stored_nbytes") if compressed else None,
    )


def ints_of(columns: Columns, name: str) -> Ints:
    """Return a column as int64. Raises KeyError if missing, ValueError on overflow."""
    column = columns[name]
    if column.dtype == np.uint64 and len(column) and column.max() > np.iinfo(np.int64).max:
        raise ValueError(f"column {name} overflows")
    return column.astype(np.int64)


def json_integer(value: Json, what: str) -> int:
    """Return a JSON integer of at most 62 bits; nothing is converted. Raises ValueError."""
    number = int_in(value, what)
    if abs(number) > _INT_MAX:
        raise ValueError(f"{what} is {reprlib.repr(value)}, no integer of 62 bits")
    return number


def _names(blob: bytes, nbytes: Ints) -> tuple[str, ...]:
    # No name is longer than all names together, so the sums cannot have wrapped.
    if nbytes.ndim != 1 or nbytes.max(initial=0) > len(blob):
        raise ValueError("lengths of names disagree")
    ends = [0, *np.cumsum(nbytes).tolist()]
    if ends[-1] != len(blob):
        raise ValueError("lengths of names disagree")
    return tuple(blob[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(ends))
