"""The manifest maps boxes of tensors to bytes of images. Its appearance is the commit.

It is a safetensors file of columns (``columns.py``, ``tables.py``) with a JSON header, specified in
``docs/reference/format.md``. Ranks send *fragments* (``fragment.py``) to the rank that commits. No
path is stored: an image's key follows from the attempt and the rank.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ...core.decoded_json import Json, number_in, object_from, object_in, str_in
from ...core.forks.cached import cached_property
from ...errors import DamagedError, UnsupportedFormatError
from ...planner.columns import Ints, ranges, volumes
from ...planner.image import BLOCK_NBYTES, CHUNK_NBYTES, DIGEST_NBYTES, PAGE_NBYTES
from ...planner.table import ShardTable, TensorTable
from .columns import Columns, decode_columns, encode_columns, narrowed, parse_columns
from .extents import Extents, FileMap, FileRange, extent_conditions, extents_of
from .lineage import ROOT, is_branch
from .packed import COMPRESSIONS, Compression, index_nbytes
from .patches import PatchBases, patch_index_nbytes
from .tables import (
    NDIM_MAX,
    SHARD_COLUMNS,
    ImageTable,
    check_readable,
    image_table,
    ints_of,
    json_integer,
    shard_columns,
    shard_table,
    tensor_columns,
    tensor_table,
)
from .tree import Tree

MANIFEST_KEY = "manifest.safetensors"
ATTEMPT_PATTERN = r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}"
"""Regular expression for attempt ids."""
_PLAIN = 1
_COMPRESSED = 2
_BORROWED = 3
_PATCHED = 4
PATCH: Literal["patch"] = "patch"
"""Suffix of an image that is stored as a patch."""

Packing = Compression | Literal["patch"]
"""Form of a stored image that is no plain file."""
_ATTEMPT = re.compile(ATTEMPT_PATTERN)
_INDEX = re.compile(r"[0-9]{1,10}")
_CHUNK_NBYTES_MAX = 256 << 20
_BLOCKS_PER_CHUNK_MAX = 1 << 12


def image_key(attempt: str, rank: int, packing: Packing | None = None) -> str:
    """Return the key of the image of ``rank``.

    A packed image is not a safetensors file, so its name does not end like one.
    """
    if packing:
        suffix = f".{packing}"
    else:
        suffix = ""
    return f"data/{attempt}/{rank}.safetensors{suffix}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file with bytes of images. ``rank`` wrote it in ``attempt``, perhaps an earlier one."""

    key: str
    rank: int
    nbytes: int
    attempt: str


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
    """Per tensor, the number of its container in ``tree``."""
    shards: ShardTable
    images: ImageTable
    chunk_nbytes: int = CHUNK_NBYTES
    block_nbytes: int = BLOCK_NBYTES
    compression: Compression | None = None
    branch: str = ROOT
    """Branch of the run on which it was saved; see :mod:`.lineage`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the safetensors files from which it was imported."""
    extents: Extents | None = None
    """Where the blocks of the images lie, if an image is not simply a file; then ``compression`` is
    None."""
    increments: int = 0
    """Number of saves since the last whole one that have borrowed from each other."""
    bases: PatchBases | None = None
    """For a version of a weight channel: what its patches apply to. Unless it is stored whole too,
    the images are patches, and ``compression`` and ``extents`` are None."""

    @property
    def version(self) -> int:
        """Format version: 4 if images are patches, 3 with extents, 2 if compressed, else 1."""
        if self.is_patched:
            return _PATCHED
        if self.extents is not None:
            return _BORROWED
        if self.compression is None:
            return _PLAIN
        return _COMPRESSED

    @property
    def packing(self) -> Packing | None:
        """Form of the stored images; None if they are plain files."""
        return PATCH if self.is_patched else self.compression

    @property
    def is_patched(self) -> bool:
        """True if the images are stored as patches only."""
        return self.bases is not None and not self.bases.whole

    @property
    def is_plain(self) -> bool:
        """Whether each image is a file, byte for byte."""
        return self.version == _PLAIN

    @property
    def whole(self) -> Manifest:
        """The same checkpoint with each image in a file of its own, saved as a whole, and in no
        weight channel."""
        if self.extents is None and not self.increments and self.bases is None:
            return self
        images = self.images
        if self.is_patched:
            images = replace(images, stored_nbytes=None)
        return replace(self, extents=None, increments=0, bases=None, images=images)

    @cached_property
    def first_chunk(self) -> Ints:
        """(I + 1,): row in ``images.digests`` of each image's first chunk, then the number of
        rows."""
        counts = self.images.chunks(self.chunk_nbytes)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors, counting tied ones once."""
        return int(self.tensors.nbytes[self.tensors.alias < 0].sum())

    def image_key(self, image: int) -> str:
        """Return the key of the image in row ``image``, for the driver for images
        (``image_driver``)."""
        return image_key(self.attempt, int(self.images.rank[image]), self.packing)

    @cached_property
    def files(self) -> list[StoredFile]:
        """All files that hold bytes of images, in the order of the images or of ``extents``."""
        ranks = self.images.rank
        sizes = self.images.file_nbytes(self.block_nbytes)
        keys: Iterable[str]
        attempts = [self.attempt] * len(self.images)
        if self.extents is None:
            keys = map(self.image_key, range(len(self.images)))
        else:
            keys = self.extents.keys(f"data/{self.attempt}")
            ranks = self.extents.file_rank
            sizes = self.extents.file_nbytes
            writers = (self.attempt, *self.extents.lenders)
            attempts = [writers[lender] for lender in self.extents.file_lender.tolist()]
        rows = zip(keys, ranks.tolist(), sizes.tolist(), attempts, strict=True)
        return [StoredFile(*row) for row in rows]

    def file_ranges(self, image: int, start: int, stop: int) -> list[FileRange]:
        """Return where bytes [start, stop) of an image lie, in order. Ignores compression."""
        if self.file_map is None:
            return [FileRange(image, start, start, stop - start)]
        return self.file_map.ranges(image, start, stop)

    @cached_property
    def file_map(self) -> FileMap | None:
        """Map from images to files; None without ``extents``."""
        if self.extents is None:
            return None
        sizes = (self.images.hashed_nbytes, self.chunk_nbytes, self.block_nbytes)
        return self.extents.file_map(*sizes)

    @cached_property
    def stored_nbytes(self) -> int:
        """Bytes of all images as they are stored."""
        return int(self.images.file_nbytes(self.block_nbytes).sum())

    @cached_property
    def lent_nbytes(self) -> dict[str, int]:
        """Bytes of the images that lie in files of each lender, by its attempt."""
        if self.extents is None or self.file_map is None:
            return {}
        lender = self.extents.file_lender[self.file_map.file]
        of_lender = np.bincount(lender, self.file_map.nbytes, len(self.extents.lenders) + 1)
        return dict(zip(self.extents.lenders, of_lender[1:].astype(int).tolist(), strict=True))

    @property
    def own_nbytes(self) -> int:
        """Bytes of the images that were written for this checkpoint."""
        return self.stored_nbytes - sum(self.lent_nbytes.values())

    def encode(self) -> bytes:
        """Return the bytes of the file. Raises SaveError if no reader would accept them."""
        check_readable(self.tensors, self.tree)
        head: dict[str, object] = {
            "version": self.version,
            "attempt": self.attempt,
            "step": self.step,
            "world": self.world,
            "created_s": self.created_s,
            "dtypes": self.tensors.dtypes,
            "chunk_nbytes": self.chunk_nbytes,
            "block_nbytes": self.block_nbytes,
            "tree": self.tree.to_json(),
        }
        if self.compression is not None:
            head["compression"] = self.compression
        if self.bases is not None:
            head["patches"] = self.bases.to_json()
        if self.extents is not None:
            head["lenders"] = self.extents.lenders
        if self.increments:
            head["increments"] = self.increments
        if self.branch != ROOT:
            head["branch"] = self.branch
        if self.metadata:
            head["metadata"] = self.metadata
        text = json.dumps(head, separators=(",", ":"))
        return encode_columns(self._columns(), {"holdfast": text})

    def _columns(self) -> Columns:
        columns = {
            **tensor_columns(self.tensors, self.container),
            "tensor.shards": np.diff(self.shards.pointers(len(self.tensors))),
            **shard_columns(self.shards, self.images),
        }
        if self.extents is not None:
            columns |= self.extents.columns()
        return {name: narrowed(column) for name, column in columns.items()}

    @classmethod
    def decode(cls, data: bytes, what: str = "the manifest") -> Manifest:
        """Decode and check a manifest. Raises DamagedError; UnsupportedFormatError for another
        version."""
        made = cls.of_columns(*decode_columns(data, what), what)
        check(made, what)
        return made

    @classmethod
    def of_columns(cls, columns: Columns, metadata: Mapping[str, str], what: str) -> Manifest:
        """Build a manifest from its columns, unchecked. Raises the same errors as
        :meth:`decode`."""
        head = _head(metadata, what)
        try:
            return _from_columns(columns, head)
        except (KeyError, TypeError, ValueError, OverflowError, UnicodeDecodeError) as error:
            raise DamagedError(f"{what} is malformed: {error!r}") from error


def attempt_in(data: bytes, what: str = "the manifest") -> str:
    """Return the attempt named by the manifest in ``data``.

    Checks the checksum and the version, but not the tables. Raises DamagedError and
    UnsupportedFormatError.
    """
    _columns, metadata = decode_columns(data, what)
    attempt = _head(metadata, what).get("attempt")
    if not isinstance(attempt, str) or not _ATTEMPT.fullmatch(attempt):
        raise DamagedError(f"{what} contradicts itself: the attempt's name")
    return attempt


def _head(metadata: Mapping[str, str], what: str) -> dict[str, Json]:
    try:
        head = object_from(metadata.get("holdfast", ""))
    except ValueError as error:
        raise DamagedError(f"{what} has a malformed head: {error}") from error
    version = head.get("version")
    if version is None:
        raise DamagedError(f"{what} does not say its version")
    if type(version) is not int or not _PLAIN <= version <= _PATCHED:
        raise UnsupportedFormatError(
            f"{what} is of format version {version!r}; this release reads versions {_PLAIN} to "
            f"{_PATCHED}",
            advice="Read it with a newer release.",
        )
    return head


def _compression(head: Mapping[str, Json]) -> Compression | None:
    """Return the compression of the images.

    Raises KeyError if missing; UnsupportedFormatError if this release does not know it.
    """
    if head["version"] != _COMPRESSED:
        return None
    for known in COMPRESSIONS:
        if head["compression"] == known:
            return known
    raise UnsupportedFormatError(
        f"the images are compressed in a way that this release does not know: "
        f"{reprlib.repr(head['compression'])}",
        advice="Read it with a newer release.",
    )


def _extents(columns: Columns, head: Mapping[str, Json]) -> Extents | None:
    """Return the places of blocks, if the version has them. Raises KeyError and ValueError."""
    if head["version"] != _BORROWED:
        return None
    return extents_of(columns, head["lenders"])


def _bases(head: Mapping[str, Json]) -> PatchBases | None:
    """Return what patches apply to. Raises KeyError, TypeError and ValueError."""
    if head["version"] not in (_PLAIN, _PATCHED) or "patches" not in head:
        return None
    bases = PatchBases.from_json(head["patches"])
    if bases.whole != (head["version"] == _PLAIN):
        raise ValueError("the version does not say how the images are stored")
    return bases


def _from_columns(columns: Columns, head: Mapping[str, Json]) -> Manifest:
    tensors = tensor_table(columns, head["dtypes"])
    counts = ints_of(columns, "tensor.shards")
    rows = len(columns["shard.start"])
    # No count exceeds the expected sum, so the sum cannot have wrapped.
    if counts.shape != tensors.dtype.shape or counts.max(initial=0) > rows or counts.sum() != rows:
        raise ValueError("numbers of shards disagree")
    shards = shard_table(columns, np.repeat(np.arange(len(counts)), counts))
    compression = _compression(head)
    images = image_table(columns, compressed=head["version"] in (_COMPRESSED, _PATCHED))
    return Manifest(
        attempt=str_in(head["attempt"], "attempt"),
        step=None if head["step"] is None else json_integer(head["step"], "step"),
        world=json_integer(head["world"], "world"),
        created_s=number_in(head["created_s"], "created_s"),
        tree=Tree.from_json(head["tree"]),
        tensors=tensors,
        container=ints_of(columns, "tensor.container"),
        shards=shards,
        images=images,
        chunk_nbytes=json_integer(head["chunk_nbytes"], "chunk_nbytes"),
        block_nbytes=json_integer(head["block_nbytes"], "block_nbytes"),
        compression=compression,
        branch=str_in(head.get("branch", ROOT), "branch"),
        metadata={
            name: str_in(text, "metadata")
            for name, text in object_in(head.get("metadata", {}), "metadata").items()
        },
        extents=_extents(columns, head),
        increments=json_integer(head.get("increments", 0), "increments"),
        bases=_bases(head),
    )


def check(m: Manifest, what: str) -> None:
    """Raise DamagedError for contents that no save writes: rows that point nowhere, boxes
    outside tensors, bytes outside images."""
    for holds, problem in _conditions(m):
        if not holds:
            raise DamagedError(f"{what} contradicts itself: {problem}")


def _conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    """Yield pairs of a required condition and the problem if it is False.

    The order matters: a condition may rely on earlier ones.
    """
    yield from _header_conditions(m)
    yield from _shape_conditions(m)
    yield from _tensor_conditions(m)
    yield from _shard_conditions(m)
    yield from _image_conditions(m)
    yield from _name_conditions(m)
    if m.extents is not None:
        lenders = m.extents.lenders
        named = all(_ATTEMPT.fullmatch(lender) for lender in lenders)
        yield named and len({m.attempt, *lenders}) == len(lenders) + 1, "names of lenders"
        sizes = (m.images.hashed_nbytes, m.chunk_nbytes, m.block_nbytes)
        yield from extent_conditions(m.extents, *sizes)


def _header_conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    yield _ATTEMPT.fullmatch(m.attempt) is not None, "the attempt's name"
    yield is_branch(m.branch), "the branch's name"
    what = "numbers of the header"
    yield m.world > 0 and math.isfinite(m.created_s) and m.increments >= 0, what
    if m.bases is not None:
        refs = (m.bases.previous, m.bases.anchor)
        named = all(_ATTEMPT.fullmatch(ref.attempt) and ref.sequence > 0 for ref in refs)
        yield named and m.extents is None, "versions that it is a patch of"
    yield 0 < m.block_nbytes <= m.chunk_nbytes <= _CHUNK_NBYTES_MAX, what
    yield m.chunk_nbytes <= m.block_nbytes * _BLOCKS_PER_CHUNK_MAX, what
    yield m.chunk_nbytes % m.block_nbytes == m.block_nbytes % PAGE_NBYTES == 0, what


def _shape_conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    """Yield conditions on widths and lengths of columns: columns of one table have equal
    lengths."""
    t = m.tensors
    s = m.shards
    i = m.images
    n = len(t)
    if t.shape.ndim == 2:
        width = t.shape.shape[1]
    else:
        width = -1
    box_shape = (len(s.tensor), width)
    yield 0 <= width <= NDIM_MAX, "widths of columns"
    yield s.offsets.shape == s.lengths.shape == box_shape, "widths of columns"
    whole = all(len(column) == n for column in (t.names, t.ndim, t.shape, m.container))
    yield whole, "lengths of tensor columns"
    whole = all(column.shape == (len(s.tensor),) for column in (s.image, s.start))
    yield whole, "lengths of shard columns"
    flat = (t.ndim, t.alias, t.owner, t.dtype, m.container)
    yield all(column.shape == (n,) for column in flat), "shapes of tensor columns"
    yield all(column.shape == (len(i),) for column in (i.rank, i.hashed_nbytes)), "images"


def _tensor_conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    t = m.tensors
    n = len(t)
    width = t.shape.shape[1]
    yield bool((t.dtype < len(t.dtypes)).all()), "dtypes"
    yield all(0 < size <= 64 for _, size in t.dtypes), "dtypes"
    # By logarithms, which cannot wrap: strides and sizes in bytes fit in 63 bits.
    fits = bool((np.log2(np.maximum(t.shape, 1)).sum(axis=1) + 6 < 62).all())
    yield bool((t.ndim <= width).all()) and fits, "shapes of tensors"
    is_padding = np.arange(width) >= t.ndim[:, None]
    yield bool((t.shape[is_padding] == 1).all()), "padding of shapes"
    yield bool(((t.alias < n) & (t.owner < m.world)).all()), "aliases"
    tied = t.alias >= 0
    root = t.alias[tied]
    yield bool((t.alias[root] < 0).all() and (t.dtype[tied] == t.dtype[root]).all()), "aliases"
    yield bool((t.ndim[tied] == t.ndim[root]).all()), "shapes of aliases"
    yield bool((t.shape[tied] == t.shape[root]).all()), "shapes of aliases"
    yield bool((m.container < len(m.tree.containers)).all()), "containers"


def _shard_conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    t = m.tensors
    s = m.shards
    i = m.images
    yield bool((s.image < len(i)).all()), "images of shards"
    shape = t.shape[s.tensor]
    inside = (s.lengths > 0) & (s.lengths <= shape) & (s.offsets <= shape - s.lengths)
    yield bool(inside.all()), "boxes"
    behind_header = s.start >= PAGE_NBYTES
    inside = behind_header & (s.start <= i.hashed_nbytes[s.image] - s.nbytes(t))
    yield bool(inside.all()), "bytes of shards"
    yield bool((s.start % t.itemsize[s.tensor] == 0).all()), "alignment of shards"


def _image_conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    i = m.images
    yield len(np.unique(i.rank)) == len(i), "images"
    yield bool((i.rank < m.world).all()), "ranks of images"
    yield i.digests.dtype == np.uint8 and i.digests.ndim == 2, "digests"
    # No image has more chunks than there are digests, so the sum of chunks cannot have wrapped.
    yield bool((i.hashed_nbytes <= len(i.digests) * m.chunk_nbytes).all()), "chunks"
    yield i.digests.shape == (int(m.first_chunk[-1]), DIGEST_NBYTES), "chunks"
    yield _files_fit(m), "sizes of files"


def _name_conditions(m: Manifest) -> Iterator[tuple[bool, str]]:
    t = m.tensors
    n = len(t)
    yield _names_have_prefixes(m), "names"
    is_unique = len(t.rows) == n or len(set(zip(t.names, t.owner.tolist(), strict=True))) == n
    yield is_unique, "names that occur twice"


def check_complete(m: Manifest, what: str) -> None:
    """Raise DamagedError unless the shards of each tensor have as many elements as it (a tied one
    has no shards) and share no byte of an image. Whether their boxes overlap is checked elsewhere.

    This bounds a load's allocations by the size of the files. (A fragment is not complete.)
    """
    t = m.tensors
    s = m.shards
    volume = volumes(s.lengths)
    wraps = float(volume.sum(dtype=np.float64)) >= 2.0**62
    stored = np.diff(np.append(0, np.cumsum(volume))[s.pointers(len(t))])
    if wraps or (stored != np.where(t.alias < 0, volumes(t.shape), 0)).any():
        raise DamagedError(f"{what} contradicts itself: shards do not make tensors")
    _check_disjoint(m, what)


def _check_disjoint(m: Manifest, what: str) -> None:
    """Raise DamagedError if two shards share bytes.

    Images are laid end to end; their digests bound their sizes, so positions stay far below 63
    bits. Starts and ends are sorted independently: non-empty runs are disjoint exactly if the n-th
    end does not exceed the (n+1)-th start.
    """
    s = m.shards
    base = np.cumsum(m.images.hashed_nbytes) - m.images.hashed_nbytes
    start = base[s.image] + s.start
    starts = np.sort(start)
    ends = np.sort(start + s.nbytes(m.tensors))
    shared = np.flatnonzero(starts[1:] < ends[:-1])
    if len(shared):
        row = int(np.flatnonzero(start == starts[shared[0] + 1])[-1])
        raise DamagedError(
            f"{what} contradicts itself: a shard of {m.tensors.names[s.tensor[row]]!r} begins "
            f"inside another, at byte {s.start[row]:,} of {m.image_key(int(s.image[row]))}"
        )


def _files_fit(m: Manifest) -> bool:
    """Return whether every packed image has a possible size.

    The minimum is its unpacked parts; the maximum is reached if no block is packed.
    """
    i = m.images
    if m.packing is None or i.stored_nbytes is None:
        return m.packing is None and i.stored_nbytes is None
    pages_nbytes = i.nbytes(m.block_nbytes) - i.hashed_nbytes
    if m.bases is None or m.bases.whole:
        index = index_nbytes(i.hashed_nbytes, m.chunk_nbytes, m.block_nbytes)
    else:
        index = patch_index_nbytes(i.hashed_nbytes, m.chunk_nbytes, m.bases.count)
    least = pages_nbytes + index
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


@dataclass(frozen=True, eq=False)
class VerifiedManifest:
    """A manifest without shards; :meth:`with_shards_of` adds the wanted ones.

    For a manifest in shared memory that another rank of the host has checked: nothing is checked
    again. A job has millions of shards, so only those of the wanted tensors are decoded.
    """

    manifest: Manifest
    columns: Columns

    @classmethod
    def decode(cls, data: bytes | memoryview) -> VerifiedManifest:
        """Decode the manifest in ``data``, which is not copied and must not change."""
        columns, metadata = parse_columns(data, "the manifest")
        empty = {name: column[:0] for name, column in columns.items() if name.startswith("shard.")}
        empty["tensor.shards"] = np.zeros_like(columns["tensor.shards"])
        return cls(Manifest.of_columns(columns | empty, metadata, "the manifest"), columns)

    def with_shards_of(self, tensors: Ints) -> Manifest:
        """Return the manifest with the shards of these tensors only; ``tensors`` are rows, in
        any order."""
        rows = np.unique(tensors)
        counts = ints_of(self.columns, "tensor.shards")
        first = np.cumsum(counts) - counts
        row, at = ranges(first[rows], counts[rows])
        found = {name: column[at] for name, column in self.columns.items() if name in SHARD_COLUMNS}
        return replace(self.manifest, shards=shard_table(found, rows[row]))
