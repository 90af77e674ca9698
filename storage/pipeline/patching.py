"""A publisher's copy of the image that it published last, and how the next one becomes a patch of
it.

A copy takes as much host memory as the image. The buffers of a captured image become the copy, and
those of the earlier copy hold the patches until these are written, so nothing is copied. Any
failure discards the copy. The next version is then stored whole, so no patch can have a base that
was not published.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...planner.image import PAGE_NBYTES, ImageLayout
from ..format.patches import (
    Bools,
    PatchBases,
    PatchIndex,
    VersionRef,
    encode_patch,
    patch_index_nbytes,
    units,
)
from ..runtime.buffers import HostBuffer, HostPool

_PATCHED_SHARE = 0.75
"""Share of a chunk's bytes above which it is stored plain instead of as patches."""


@dataclass(eq=False)
class PublishedImage:
    """The image that this rank published last; ``attempt``: "" if it has none.

    ``is_whole``: whether it was stored whole; ``chunks``: its bytes; ``since_anchor``: for
    each chunk one bit per unit that has changed since the anchor.
    """

    attempt: str = ""
    is_whole: bool = False
    layout: ImageLayout | None = None
    chunks: dict[int, HostBuffer] = field(default_factory=dict)
    since_anchor: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def is_base_of(self, layout: ImageLayout, previous: VersionRef | None) -> bool:
        """Return whether an image of ``layout`` can be a patch of this one, of ``previous``."""
        mine = self.layout
        if previous is None or mine is None or self.attempt != previous.attempt:
            return False
        return (
            mine.header == layout.header
            and mine.hashed_end == layout.hashed_end
            and np.array_equal(mine.start, layout.start)
        )

    def begin(self, pool: HostPool, layout: ImageLayout, bases: PatchBases | None) -> None:
        """Prepare for the next version. Keeps the bytes if that has ``bases``, for patches of them.
        Until :meth:`commit`, there is no copy."""
        self.attempt = ""
        self.is_whole = bases is None or bases.whole
        if bases is None:
            self.discard(pool)
        self.layout = layout

    def commit(self, attempt: str) -> None:
        """Make the written image the copy: it was published by ``attempt``."""
        self.attempt = attempt

    def discard(self, pool: HostPool) -> None:
        """Forget the copy."""
        self.attempt = ""
        self.layout = None
        self.since_anchor.clear()
        while self.chunks:
            pool.give(self.chunks.popitem()[1])


@dataclass(frozen=True, slots=True)
class Publication:
    """One rank's part in publishing a version: its ``image``, and the ``bases`` that all ranks try
    to make patches of; None for an anchor."""

    image: PublishedImage
    bases: PatchBases | None = None


class PatchPacking:
    """An image being stored as patches of the ``published`` one, which it replaces chunk by chunk.

    ``nbytes_max``: upper bound for its file; ``end``: end of the chunks placed so far. Chunks are
    exchanged in any order, on worker threads. A chunk's position is known once all earlier chunks
    have theirs.
    """

    def __init__(self, layout: ImageLayout, published: PublishedImage, bases: PatchBases) -> None:
        self._layout = layout
        self._published = published
        self._bases = bases
        self._count = bases.count
        self._sizes: dict[int, tuple[int, ...]] = {}
        index = patch_index_nbytes(layout.hashed_end, layout.chunk_nbytes, self._count)
        self.nbytes_max = layout.nbytes + int(index)
        self.end = 0

    def exchange(self, chunk: int, new: HostBuffer) -> HostBuffer:
        """Make ``new`` the published bytes of a chunk; return a buffer with the patches to write.
        Thread-safe for distinct chunks."""
        start, stop = self._layout.chunk_range(chunk)
        nbytes = stop - start
        published = self._published
        old = published.chunks[chunk]
        after = new.view[:nbytes]
        before = old.view[:nbytes]
        changed = units(after) != units(before)
        block = self._layout.block_nbytes
        patches = [encode_patch(after, changed, before, block)]
        changed = self._since_anchor(chunk, changed)
        if self._bases.to_anchor:
            patches.append(encode_patch(after, changed, None, block))
        if sum(map(len, patches)) > _PATCHED_SHARE * nbytes:
            before[:] = after
            self._sizes[chunk] = (nbytes, *[0] * (self._count - 1))
        else:
            end = 0
            for patch in patches:
                before[end : end + len(patch)] = patch
                end += len(patch)
            before[end : end + -end % PAGE_NBYTES] = bytes(-end % PAGE_NBYTES)
            self._sizes[chunk] = tuple(map(len, patches))
        published.chunks[chunk] = new
        return old

    def _since_anchor(self, chunk: int, changed: Bools) -> Bools:
        """Note which units have ``changed``; return which have done so since the anchor, if this
        version needs to know."""
        noted = self._published.since_anchor
        if self._bases.whole:
            noted.pop(chunk, None)
            return changed
        bits = np.packbits(changed)
        if chunk in noted:
            bits |= noted[chunk]
        noted[chunk] = bits
        if not self._bases.to_anchor:
            return changed
        return np.unpackbits(bits, count=len(changed)).view(np.bool_)

    def place(self, chunk: int) -> tuple[int, int]:
        """Return the file offset and size of a chunk's patches. Call in order of chunks."""
        start = self.end
        nbytes = sum(self._sizes[chunk])
        nbytes += -nbytes % PAGE_NBYTES
        self.end += nbytes
        return start, nbytes

    def index(self) -> bytes:
        """Return the trailing index of the file, once all chunks are placed."""
        sizes = [self._sizes[number] for number in sorted(self._sizes)]
        return PatchIndex.of(sizes, self._count).encode()
