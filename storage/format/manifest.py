"""The manifest: which box of which tensor lies at which bytes of which image. Its appearance is the
commit.

It is a safetensors file of columns (``columns.py``) with a JSON header;
``docs/reference/format.md`` documents it so that a reader can be written from that page. What a
rank tells the committing one is a *fragment* (``fragment.py``). No path is stored: an image's key
follows from the attempt and the rank.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.forks.cached import cached_property
from ...core.units import ceil_div
from ...errors import DamagedError, SaveError, UnsupportedFormatError
from ...planner.columns import volumes
from ...planner.image import BLOCK_NBYTES, CHUNK_NBYTES, DIGEST_NBYTES, PAGE_NBYTES
from ...planner.table import ShardTable, TensorTable
from .columns import decode_columns, encode_columns, narrowed, parse_header
from .lineage import ROOT, is_branch
from .packed import COMPRESSIONS, Compression, index_nbytes
from .tree import Tree

__all__ = [
    "ATTEMPT_PATTERN",
    "MANIFEST_KEY",
    "ImageTable",
    "Manifest",
    "attempt_in",
    "check",
    "check_complete",
    "check_readable",
    "image_key",
    "image_table",
    "ints_of",
    "shard_columns",
    "tensor_columns",
    "tensor_table",
]

MANIFEST_KEY = "manifest.safetensors"
ATTEMPT_PATTERN = r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}"
"""A regular expression of the ids of attempts."""
_PLAIN, _COMPRESSED = 1, 2  # versions of the format
_ATTEMPT = re.compile(ATTEMPT_PATTERN)
_INDEX = re.compile(r"[0-9]{1,10}")
_CHUNK_NBYTES_MAX = 256 << 20
_BLOCKS_PER_CHUNK_MAX = 1 << 12
_NDIM_MAX = 256
_INT_MAX = 1 << 62

Ints = npt.NDArray[np.int64]


def image_key(attempt: str, rank: int, compression: Compression | None = None) -> str:
    """Where the image of ``rank`` lies, as a key. A compressed one is no safetensors file, and is
    not named like one."""
    return f"data/{attempt}/{rank}.safetensors" + (f".{compression}" if compression else "")


@dataclass(frozen=True)
class ImageTable:
    """Images, by columns (I,), and the digests of all their chunks (C, 16), image after image."""

    rank: Ints
    hashed_nbytes: Ints
    digests: npt.NDArray[np.uint8]
    stored_nbytes: Ints | None = None
    """Size of each file, if they are compressed."""

    def __len__(self) -> int:
        return len(self.rank)

    def chunks(self, chunk_nbytes: int) -> Ints:
        """Number of chunks per image."""
        return ceil_div(self.hashed_nbytes, chunk_nbytes)

    def nbytes(self, block_nbytes: int) -> Ints:
        """Size per image: what is hashed, and then a digest per block."""
        return self.hashed_nbytes + DIGEST_NBYTES * ceil_div(self.hashed_nbytes, block_nbytes)

    def file_nbytes(self, block_nbytes: int) -> Ints:
        """File size per image: that of the image, unless it is compressed."""
        return self.nbytes(block_nbytes) if self.stored_nbytes is None else self.stored_nbytes

    @classmethod
    def joined(cls, tables: Sequence[ImageTable]) -> ImageTable:
        """The images of all of these, in order. All are compressed, or none is."""
        stored = [table.stored_nbytes for table in tables if table.stored_nbytes is not None]
        return cls(
            np.concatenate([table.rank for table in tables]),
            np.concatenate([table.hashed_nbytes for table in tables]),
            np.concatenate([table.digests for table in tables]),
            np.concatenate(stored) if stored else None,
        )


@dataclass(frozen=True)
class Manifest:
    """One checkpoint, or one rank's part of it."""

    attempt: str
    step: int | None
    world: int
    created_s: float
    tree: Tree
    tensors: TensorTable
    container: Ints
    """Per tensor, the number of the container in ``tree`` that it is in."""
    shards: ShardTable
    images: ImageTable
    chunk_nbytes: int = CHUNK_NBYTES
    block_nbytes: int = BLOCK_NBYTES
    compression: Compression | None = None
    branch: str = ROOT
    """The branch of the run on which it was saved; see :mod:`.lineage`."""

    @property
    def version(self) -> int:
        """That of its format: 2 if it is compressed, else 1."""
        return _PLAIN if self.compression is None else _COMPRESSED

    @cached_property
    def first_chunk(self) -> Ints:
        """(I + 1,): the row in ``images.digests`` of each image's first chunk, and the number of
        rows."""
        return np.concatenate([[0], np.cumsum(self.images.chunks(self.chunk_nbytes))]).astype(
            np.int64
        )

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors together, tied ones once."""
        return int(self.tensors.nbytes[self.tensors.alias < 0].sum())

    def image_key(self, image: int) -> str:
        """Key of the image in row ``image``."""
        return image_key(self.attempt, int(self.images.rank[image]), self.compression)

    def encode(self) -> bytes:
        """The file's bytes. Raises SaveError for what no reader would accept."""
        check_readable(self.tensors, self.tree)
        head = {
            "version": self.version,
            "attempt": self.attempt,
            "step": self.step,
            "world": self.world,
            "created_s": self.created_s,
            "dtypes": self.tensors.dtypes,
            "chunk_nbytes": self.chunk_nbytes,
            "block_nbytes": self.block_nbytes,
            "tree": self.tree.to_json(),
        } | ({} if self.compression is None else {"compression": self.compression})
        if self.branch != ROOT:
            head["branch"] = self.branch
        return encode_columns(
            self._columns(), {"holdfast": json.dumps(head, separators=(",", ":"))}
        )

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        t, s = self.tensors, self.shards
        columns = tensor_columns(t, self.container) | {"tensor.shards": np.diff(s.pointers(len(t)))}
        columns |= shard_columns(s, self.images)
        return {name: narrowed(column) for name, column in columns.items()}

    @classmethod
    def decode(cls, data: bytes, what: str = "the manifest") -> Manifest:
        """The manifest in ``data``. Raises DamagedError, or UnsupportedFormatError for another
        version."""
        made = cls.of_columns(*decode_columns(data, what), what)
        check(made, what)
        return made

    @classmethod
    def of_columns(
        cls, columns: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], what: str
    ) -> Manifest:
        """The manifest that has these columns, unchecked. Raises as :meth:`decode` does."""
        head = _head(metadata, what)
        try:
            return _from_columns(columns, head)
        except (KeyError, TypeError, ValueError, OverflowError, UnicodeDecodeError) as error:
            raise DamagedError(f"{what} is malformed: {error!r}") from error


def attempt_in(data: bytes, what: str = "the manifest") -> str:
    """The attempt that the manifest in ``data`` names. Its checksum is checked, and that this
    release knows its version; what its tables say is not. Raises DamagedError,
    UnsupportedFormatError."""
    _columns, metadata = decode_columns(data, what)
    attempt = _head(metadata, what).get("attempt")
    if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
        raise DamagedError(f"{what} contradicts itself: the attempt's name")
    return attempt


def check_readable(tensors: TensorTable, tree: Tree) -> None:
    """Raises SaveError for what no reader would accept."""
    if tensors.shape.shape[1] > _NDIM_MAX:
        raise SaveError(f"a tensor has more than {_NDIM_MAX} dimensions")
    if tree.paths_too_long:
        raise SaveError(
            "the paths of the state's containers are too long, all together",
            advice="Use shorter keys, or nest less deeply.",
        )


def tensor_columns(tensors: TensorTable, container: Ints) -> dict[str, npt.NDArray[Any]]:
    """The columns of tensors and of their containers, by name."""
    t, names = tensors, [name.encode("utf-8", "surrogatepass") for name in tensors.names]
    columns: dict[str, npt.NDArray[Any]] = {
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


def ints_of(columns: Mapping[str, npt.NDArray[Any]], name: str) -> Ints:
    """A stored column. Raises KeyError, and ValueError where it does not fit."""
    column = columns[name]
    if column.dtype == np.uint64 and len(column) and column.max() > np.iinfo(np.int64).max:
        raise ValueError(f"column {name} overflows")
    return column.astype(np.int64)


def shard_columns(shards: ShardTable, images: ImageTable) -> dict[str, npt.NDArray[Any]]:
    """The columns of shards, but for their tensors, and those of images."""
    columns: dict[str, npt.NDArray[Any]] = {
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


def image_table(columns: Mapping[str, npt.NDArray[Any]], *, compressed: bool) -> ImageTable:
    """The images in columns that :func:`shard_columns` made. Raises KeyError and ValueError."""
    rank, hashed = (ints_of(columns, f"image.{name}") for name in ("rank", "hashed_nbytes"))
    stored = ints_of(columns, "image.stored_nbytes") if compressed else None
    return ImageTable(rank, hashed, columns["chunk.digest"], stored)


def tensor_table(columns: Mapping[str, npt.NDArray[Any]], dtypes: Any) -> TensorTable:
    """The tensors in columns that :func:`tensor_columns` made, and the header's dtypes. Raises
    KeyError and ValueError."""

    def optional(name: str) -> Ints:
        return (
            ints_of(columns, name)
            if name in columns
            else np.zeros(len(columns["tensor.dtype"]), np.int64)
        )

    return TensorTable(
        names=_names(columns["tensor.name"].tobytes(), ints_of(columns, "tensor.name_nbytes")),
        dtype=columns["tensor.dtype"].astype(np.uint8, casting="safe"),
        dtypes=tuple((str(name), _whole(itemsize)) for name, itemsize in dtypes),
        ndim=ints_of(columns, "tensor.ndim"),
        shape=ints_of(columns, "tensor.shape"),
        alias=optional("tensor.alias") - 1,
        owner=optional("tensor.owner") - 1,
    )


def _head(metadata: Mapping[str, str], what: str) -> dict[str, Any]:
    head = parse_header(metadata.get("holdfast", ""), what)
    version = head.get("version")
    if version is None:
        raise DamagedError(f"{what} does not say its version")
    if type(version) is not int or version not in (_PLAIN, _COMPRESSED):
        raise UnsupportedFormatError(
            f"{what} is of format version {version!r}; this release reads versions {_PLAIN} and "
            f"{_COMPRESSED}",
            advice="Read it with a newer release.",
        )
    return head


def _compression(head: Mapping[str, Any]) -> Compression | None:
    """How the images are compressed. Raises KeyError, and UnsupportedFormatError for what this
    release does not know."""
    if head["version"] == _PLAIN:
        return None
    for known in COMPRESSIONS:
        if head["compression"] == known:
            return known
    raise UnsupportedFormatError(
        f"the images are compressed in a way that this release does not know: "
        f"{reprlib.repr(head['compression'])}",
        advice="Read it with a newer release.",
    )


def _whole(value: Any) -> int:
    """A JSON integer, and nothing that merely can be made one."""
    if type(value) is not int or abs(value) > _INT_MAX:
        raise ValueError(f"{reprlib.repr(value)} is no integer of 62 bits")
    return value


def _from_columns(columns: Mapping[str, npt.NDArray[Any]], head: Mapping[str, Any]) -> Manifest:
    def ints(name: str) -> Ints:
        return ints_of(columns, name)

    tensors = tensor_table(columns, head["dtypes"])
    counts, rows = ints("tensor.shards"), len(columns["shard.start"])
    # None is larger than the sum, so that has not wrapped round.
    if counts.shape != tensors.dtype.shape or counts.max(initial=0) > rows or counts.sum() != rows:
        raise ValueError("numbers of shards disagree")
    shards = ShardTable(
        tensor=np.repeat(np.arange(len(counts)), counts),
        offsets=ints("shard.offsets"),
        lengths=ints("shard.lengths"),
        image=ints("shard.image"),
        start=ints("shard.start"),
    )
    compression = _compression(head)
    images = image_table(columns, compressed=compression is not None)
    return Manifest(
        attempt=str(head["attempt"]),
        step=None if head["step"] is None else _whole(head["step"]),
        world=_whole(head["world"]),
        created_s=float(head["created_s"]),
        tree=Tree.from_json(head["tree"]),
        tensors=tensors,
        container=ints("tensor.container"),
        shards=shards,
        images=images,
        chunk_nbytes=_whole(head["chunk_nbytes"]),
        block_nbytes=_whole(head["block_nbytes"]),
        compression=compression,
        branch=head.get("branch", ROOT),
    )


def _names(blob: bytes, nbytes: Ints) -> tuple[str, ...]:
    ends = np.cumsum(nbytes)
    fits = nbytes.ndim == 1 and nbytes.max(initial=0) <= len(
        blob
    )  # so the sums have not wrapped round
    if not fits or (ends[-1] if len(ends) else 0) != len(blob):
        raise ValueError("lengths of names disagree")
    cuts = [0, *ends.tolist()]
    return tuple(blob[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(cuts))


def check(m: Manifest, what: str) -> None:
    """Raise DamagedError for what no save writes: rows that point nowhere, boxes outside of
    tensors, bytes outside of images."""
    for holds, problem in _conditions(m):
        if not holds:
            raise DamagedError(f"{what} contradicts itself: {problem}")


def _conditions(m: Manifest) -> Any:
    t, s, i = m.tensors, m.shards, m.images
    n, width = len(t), t.shape.shape[1] if t.shape.ndim == 2 else -1
    yield _ATTEMPT.fullmatch(m.attempt) is not None, "the attempt's name"
    yield is_branch(m.branch), "the branch's name"
    yield (
        m.world > 0
        and math.isfinite(m.created_s)
        and 0
        < m.block_nbytes
        <= m.chunk_nbytes
        <= min(_CHUNK_NBYTES_MAX, m.block_nbytes * _BLOCKS_PER_CHUNK_MAX)
        and m.chunk_nbytes % m.block_nbytes == m.block_nbytes % PAGE_NBYTES == 0,
        "numbers of the header",
    )
    yield (
        0 <= width <= _NDIM_MAX and s.offsets.shape == s.lengths.shape == (len(s.tensor), width),
        "widths of columns",
    )
    yield (
        all(len(c) == n for c in (t.names, t.ndim, t.shape, m.container)),
        "lengths of tensor columns",
    )
    yield all(c.shape == (len(s.tensor),) for c in (s.image, s.start)), "lengths of shard columns"
    yield (
        all(c.shape == (n,) for c in (t.ndim, t.alias, t.owner, t.dtype, m.container)),
        "shapes of tensor columns",
    )
    yield (
        all(c.shape == (len(i),) for c in (i.rank, i.hashed_nbytes))
        and len(np.unique(i.rank)) == len(i),
        "images",
    )
    yield bool((i.rank < m.world).all()), "ranks of images"
    yield (
        bool((t.dtype < len(t.dtypes)).all()) and all(0 < size <= 64 for _, size in t.dtypes),
        "dtypes",
    )
    yield bool((t.ndim <= width).all()) and _product_fits(t), "shapes of tensors"
    yield bool(((t.shape == 1) | (np.arange(width) < t.ndim[:, None])).all()), "padding of shapes"
    yield bool(((t.alias < n) & (t.owner < m.world)).all()), "aliases"
    tied, root = t.alias >= 0, t.alias[t.alias >= 0]
    yield bool((t.alias[root] < 0).all() and (t.dtype[tied] == t.dtype[root]).all()), "aliases"
    yield (
        bool((t.ndim[tied] == t.ndim[root]).all() and (t.shape[tied] == t.shape[root]).all()),
        "shapes of aliases",
    )
    yield bool((m.container < len(m.tree.containers)).all()), "containers"
    yield bool((s.image < len(i)).all()), "images of shards"
    yield (
        bool(
            (
                (s.lengths > 0)
                & (s.lengths <= t.shape[s.tensor])
                & (s.offsets <= t.shape[s.tensor] - s.lengths)
            ).all()
        ),
        "boxes",
    )
    inside = (s.start >= PAGE_NBYTES) & (
        s.start <= i.hashed_nbytes[s.image] - s.nbytes(t)
    )  # behind the header
    yield bool(inside.all()), "bytes of shards"
    yield bool((s.start % t.itemsize[s.tensor] == 0).all()), "alignment of shards"
    yield i.digests.dtype == np.uint8 and i.digests.ndim == 2, "digests"
    yield bool((i.hashed_nbytes <= len(i.digests) * m.chunk_nbytes).all()), "chunks"
    yield (
        i.digests.shape == (int(m.first_chunk[-1]), DIGEST_NBYTES),
        "chunks",
    )  # whose sum has not wrapped round
    yield _files_fit(m), "sizes of files"
    yield _names_have_prefixes(m), "names"
    yield (
        len(t.rows) == n or len(set(zip(t.names, t.owner.tolist(), strict=True))) == n,
        "names that occur twice",
    )


def check_complete(m: Manifest, what: str) -> None:
    """Raise DamagedError unless there are as many elements as the tensors have, and no byte of an
    image is two shards'.

    So what a load allocates is bounded by files that must be there. (A fragment is not complete.)
    """
    t, s = m.tensors, m.shards
    volume = volumes(s.lengths)
    sums = np.append(0, np.cumsum(volume))[s.pointers(len(t))]
    if (
        float(volume.sum(dtype=np.float64)) >= 2.0**62
        or (np.diff(sums) != np.where(t.alias < 0, volumes(t.shape), 0)).any()
    ):
        raise DamagedError(f"{what} contradicts itself: shards do not make tensors")
    _check_disjoint(m, what)


def _check_disjoint(m: Manifest, what: str) -> None:
    """Raise DamagedError where two shards share bytes.

    Images are laid end to end, which their digests keep far below 63 bits. Then the starts are
    sorted, and so are the ends: runs that are not empty are apart exactly if the n-th of them has
    ended where the next one starts.
    """
    s = m.shards
    base = np.cumsum(m.images.hashed_nbytes) - m.images.hashed_nbytes
    start = base[s.image] + s.start
    starts, ends = np.sort(start), np.sort(start + s.nbytes(m.tensors))
    shared = np.flatnonzero(starts[1:] < ends[:-1])
    if len(shared):
        row = int(np.flatnonzero(start == starts[shared[0] + 1])[-1])
        raise DamagedError(
            f"{what} contradicts itself: a shard of {m.tensors.names[s.tensor[row]]!r} begins "
            f"inside another, at byte "
            f"{s.start[row]:,} of {m.image_key(int(s.image[row]))}"
        )


def _product_fits(t: TensorTable) -> bool:
    """Whether every tensor's strides and size in bytes fit 63 bits. In logarithms, where nothing
    wraps."""
    return bool((np.log2(np.maximum(t.shape, 1)).sum(axis=1) + 6 < 62).all())


def _files_fit(m: Manifest) -> bool:
    """Whether no compressed image is larger than it could be as it is, or smaller than what is
    never compressed."""
    i = m.images
    if m.compression is None or i.stored_nbytes is None:
        return m.compression is None and i.stored_nbytes is None
    least = (
        i.nbytes(m.block_nbytes)
        - i.hashed_nbytes
        + index_nbytes(i.hashed_nbytes, m.chunk_nbytes, m.block_nbytes)
    )
    if i.stored_nbytes.shape != least.shape:
        return False
    packed = i.stored_nbytes - least
    return bool(((packed >= 0) & (packed <= i.hashed_nbytes)).all())


def _names_have_prefixes(m: Manifest) -> bool:
    prefixes = m.tree.prefixes()
    kinds = [c.kind for c in m.tree.containers]
    for name, c in zip(m.tensors.names, m.container.tolist(), strict=True):
        prefix = prefixes[c]
        if not name.startswith(prefix):
            return False
        if kinds[c] != "dict" and _INDEX.fullmatch(name, len(prefix)) is None:
            return False
    return True
