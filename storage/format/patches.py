"""Patches: images stored as their differences from earlier images, as ``docs/reference/format.md``
specifies. Pure; zstandard is imported at first use.

All dtypes are compared as 16-bit units. The patch of a chunk lists the units that
changed: the gaps between their positions, and either their differences modulo 2**16 from the base,
or their new values. Differences of trained weights are mostly 1 or -1, so they compress much
better; new values can be applied without knowing the base's. Numbers are split into byte planes and
compressed with zstd. Blocks with many changed units are stored plain.

A patch is not verified here: the result has digests in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from ...core.decoded_json import Json, object_in
from ...core.units import IntOrArray, ceil_div
from ...errors import UsageError
from ...planner.columns import Ints
from ...planner.image import DIGEST_NBYTES, PAGE_NBYTES
from .digest import digest
from .tables import json_integer

CHANNEL_HEAD_KEY = "newest.json"
"""Key of the head of a weight channel, beside the folders of its versions."""
UNIT = np.dtype("<u2")
PLAIN_SHARE = 0.25
"""Share of changed units above which a block is stored plain."""
_GAP_PLANES = 4
_VALUE_PLANES = UNIT.itemsize
_PLANES = _GAP_PLANES + _VALUE_PLANES
_HEAD = np.dtype("<u4")
_HEAD_NBYTES = 2 * _HEAD.itemsize
_LEVEL = 1
"""Level of zstd. Higher ones take longer and save less than 2 %."""

Bools = npt.NDArray[np.bool_]


def zstandard() -> ModuleType:
    """Return the module of zstd. Raises UsageError if it is not installed."""
    try:
        import zstandard as found
    except ImportError as error:
        raise UsageError(
            "weight channels need zstandard, which is not installed",
            advice="pip install zstandard",
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One version of a weight channel: its ``sequence`` number and ``attempt``."""

    sequence: int
    attempt: str


@dataclass(frozen=True, slots=True)
class PatchBases:
    """The bases of a version's patches. ``to_anchor``: it has patches to the anchor too;
    ``whole``: it is stored whole too, and so is an anchor itself."""

    previous: VersionRef
    anchor: VersionRef
    to_anchor: bool = False
    whole: bool = False

    @property
    def count(self) -> int:
        """Number of patches of each chunk."""
        return 1 + self.to_anchor

    def to_json(self) -> Mapping[str, object]:
        """Return the bases as they stand in the head of a manifest."""
        return {
            "previous": [self.previous.sequence, self.previous.attempt],
            "anchor": [self.anchor.sequence, self.anchor.attempt],
            "to_anchor": self.to_anchor,
            "whole": self.whole,
        }

    @classmethod
    def from_json(cls, given: Json) -> PatchBases:
        """Parse the bases. Raises KeyError, TypeError and ValueError."""
        said = object_in(given, "patches")
        flags = said["to_anchor"], said["whole"]
        if not all(isinstance(flag, bool) for flag in flags):
            raise TypeError("a flag is no truth value")
        return cls(_ref(said["previous"]), _ref(said["anchor"]), *map(bool, flags))


def _ref(given: Json) -> VersionRef:
    if not isinstance(given, list) or len(given) != 2 or not isinstance(given[1], str):
        raise TypeError("a base is no pair of a sequence number and an attempt")
    return VersionRef(json_integer(given[0], "sequence"), given[1])


def units(data: memoryview) -> npt.NDArray[np.uint16]:
    """Return ``data`` as 16-bit units. The view is writable if ``data`` is."""
    return np.frombuffer(data, UNIT)


def encode_patch(
    new: memoryview, changed: Bools, old: memoryview | None, block_nbytes: int
) -> bytes:
    """Return the patch of a chunk; b"" if nothing ``changed``, which says so for each unit.

    It contains differences from ``old``, or new values if that is None.
    """
    block_units = block_nbytes // UNIT.itemsize
    starts = range(0, len(changed), block_units)
    counts = [np.count_nonzero(changed[start : start + block_units]) for start in starts]
    if not any(counts):
        return b""
    plain = np.array(counts) > PLAIN_SHARE * block_units
    blocks = [
        slice(block * block_units, (block + 1) * block_units)
        for block in np.flatnonzero(plain).tolist()
    ]
    if blocks:
        changed = changed.copy()
    for block in blocks:
        changed[block] = False
    after = units(new)
    position = np.flatnonzero(changed)
    value = after[position]
    if old is not None:
        value -= units(old)[position]
    gap = np.diff(position, prepend=-1)
    planes = [*_planes(gap.astype("<u4")), *_planes(value)]
    packed = zstandard().ZstdCompressor(level=_LEVEL).compress(np.concatenate(planes).data)
    head = np.array([len(position), len(packed)], _HEAD).tobytes()
    bits = np.packbits(plain, bitorder="little").tobytes()
    return b"".join([head, bits, packed, *(after[block].tobytes() for block in blocks)])


def _planes(numbers: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.uint8]:
    """Return the bytes of (N,) numbers as (width, N) planes, the lowest byte first."""
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T)


def apply_patch(
    patch: memoryview, into: memoryview, block_nbytes: int, *, differences: bool
) -> None:
    """Apply the patch of a chunk to the base's bytes in ``into``.

    ``differences``: whether the patch contains those, or new values. Raises ValueError for a
    malformed patch; ``into`` may then be partly changed.
    """
    if not len(patch):
        return
    target = units(into)
    blocks = ceil_div(len(into), block_nbytes)
    begin = patch_head_nbytes(len(into), block_nbytes)
    if len(patch) < begin:
        raise ValueError("the patch is cut off")
    count, packed_nbytes = np.frombuffer(patch, _HEAD, 2).tolist()
    if count > len(target) or begin + packed_nbytes > len(patch):
        raise ValueError("the patch contradicts itself")
    plain = np.unpackbits(np.frombuffer(patch[_HEAD_NBYTES:begin], np.uint8), bitorder="little")
    _apply_sparse(patch[begin : begin + packed_nbytes], count, target, differences)
    position = begin + packed_nbytes
    for block in np.flatnonzero(plain[:blocks]).tolist():
        place = into[block * block_nbytes : (block + 1) * block_nbytes]
        if position + len(place) > len(patch):
            raise ValueError("a block of the patch is cut off")
        place[:] = patch[position : position + len(place)]
        position += len(place)
    if position != len(patch):
        raise ValueError("the patch is longer than its parts")


def _apply_sparse(
    packed: memoryview, count: int, target: npt.NDArray[np.uint16], differences: bool
) -> None:
    module = zstandard()
    try:
        raw = module.ZstdDecompressor().decompress(packed, max_output_size=max(1, count * _PLANES))
    except module.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(raw) != count * _PLANES:
        raise ValueError("the patch has another number of units than it says")
    if not count:
        return
    planes = np.frombuffer(raw, np.uint8).reshape(_PLANES, count)
    position = planes[0].astype(np.int64)
    for byte in range(1, _GAP_PLANES):
        long = np.flatnonzero(planes[byte])  # few gaps are that long
        position[long] += planes[byte][long].astype(np.int64) << 8 * byte
    np.cumsum(position, out=position)
    position -= 1
    if position[0] < 0 or position[-1] >= len(target):
        raise ValueError("the patch changes bytes outside of its chunk")
    value = planes[_GAP_PLANES + 1].astype(UNIT)
    value <<= 8
    value |= planes[_GAP_PLANES]
    if differences:
        value += target.take(position)
    target[position] = value


def patch_head_nbytes(nbytes: int, block_nbytes: int) -> int:
    """Return the size of the head of the patch of a chunk of ``nbytes``."""
    return _HEAD_NBYTES + ceil_div(ceil_div(nbytes, block_nbytes), 8)


def changed_nbytes(head: memoryview, nbytes: int, block_nbytes: int) -> int:
    """Return how many of the ``nbytes`` of a chunk its patch changes. Plain blocks count in
    full."""
    blocks = ceil_div(nbytes, block_nbytes)
    plain = np.unpackbits(np.frombuffer(head[_HEAD_NBYTES:], np.uint8), bitorder="little")
    at = np.flatnonzero(plain[:blocks])
    sizes = np.minimum((at + 1) * block_nbytes, nbytes) - at * block_nbytes
    return UNIT.itemsize * int(np.frombuffer(head, _HEAD, 1)[0]) + int(sizes.sum())


def patch_index_nbytes(hashed_nbytes: IntOrArray, chunk_nbytes: int, count: int) -> IntOrArray:
    """Return the size of the index of an image with ``count`` patches of each chunk, or a column of
    sizes for many images."""
    return _HEAD.itemsize * count * ceil_div(hashed_nbytes, chunk_nbytes) + DIGEST_NBYTES


@dataclass(frozen=True, eq=False)
class PatchIndex:
    """The places of the patches in the file of an image.

    ``sizes``: (C, K) bytes of the patches of each chunk to its K bases. A chunk whose first patch
    has the size of the chunk is stored plain. ``starts``: (C + 1,) file offsets of the patches of
    each chunk, then the end of the last.
    """

    sizes: Ints
    starts: Ints

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], count: int) -> PatchIndex:
        """Build the index from the sizes of the patches, (C, K)."""
        table = np.array(sizes, np.int64).reshape(-1, count)
        stops = np.cumsum(padded(table.sum(axis=1)))
        return cls(table, np.concatenate([[0], stops]).astype(np.int64))

    def encode(self) -> bytes:
        """Return the bytes of the index."""
        body = self.sizes.astype(_HEAD).tobytes()
        return body + digest(body)

    @classmethod
    def decode(cls, data: memoryview, chunks: int, count: int) -> PatchIndex:
        """Decode an index. Raises ValueError if it is damaged."""
        body = data[:-DIGEST_NBYTES]
        if digest(body) != data[-DIGEST_NBYTES:]:
            raise ValueError("it does not match its own checksum")
        sizes = np.frombuffer(body, _HEAD).astype(np.int64).reshape(chunks, count)
        return cls.of(sizes.tolist(), count)


def padded(nbytes: Ints) -> Ints:
    """Return the bytes that patches of these sizes take in a file: whole pages, for direct I/O."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
