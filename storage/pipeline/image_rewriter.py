"""Rewrites images with another layout: whole tensors in the order of the state, in few large files.

Each chunk of a new image is read from the old ones, wherever its tensors' shards lie, verified, and
written as in a save. Compressed images are unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...core.units import ceil_div
from ...drivers.contract import Driver
from ...planner.columns import Ints
from ...planner.image import DIGEST_NBYTES, ImageLayout, lay_out
from ...planner.table import ShardTable
from ..format.manifest import Manifest
from ..format.tables import ImageTable
from ..runtime.buffers import HostBuffer, host_pool
from .chunks import Parts, fill_frame
from .flat_reader import FlatRanges, read_ranges
from .image_reader import ImageReader
from .image_writer import Callbacks, ImageWriter, WrittenImage, stored_image

_CHUNKS_READ = 2
"""Memory for the reads of one chunk, in chunks."""
_READS_MAX = 16
"""Chunks read at the same time; each takes several requests."""


@dataclass(frozen=True, slots=True)
class NewImages:
    """The layouts of images that are not written yet, and their manifest, with zero digests."""

    manifest: Manifest
    layouts: Sequence[ImageLayout]


def without_digests(m: Manifest) -> Manifest:
    """Return a manifest with zero digests, as before images are written."""
    return replace(m, images=replace(m.images, digests=np.zeros_like(m.images.digests)))


def lay_out_whole(m: Manifest, image_nbytes: int) -> NewImages:
    """Lay out the tensors of ``m`` whole, in the order of the state.

    Images hold about ``image_nbytes`` each, as equal as whole tensors allow. They are numbered like
    ranks, so there are no more of them than ranks saved.
    """
    t = m.tensors
    rows = np.flatnonzero((t.alias < 0) & (t.nbytes > 0))
    sizes = t.nbytes[rows]
    total_nbytes = int(sizes.sum())
    share_nbytes = max(image_nbytes, ceil_div(total_nbytes, m.world))
    count = max(1, ceil_div(total_nbytes, share_nbytes))
    share_nbytes = max(1, ceil_div(total_nbytes, count))
    number = (np.cumsum(sizes) - ceil_div(sizes, 2)) // share_nbytes  # by the middle of each tensor
    parts = np.split(rows, np.flatnonzero(np.diff(number)) + 1)
    layouts = [_layout_of(m, part) for part in parts if len(part)]
    numbers = np.arange(len(layouts))
    images = ImageTable(
        numbers,
        np.array([layout.hashed_end for layout in layouts], np.int64),
        np.zeros((sum(layout.chunks for layout in layouts), DIGEST_NBYTES), np.uint8),
    )
    shape = t.shape[rows]
    shards = ShardTable(
        rows,
        np.zeros_like(shape),
        shape,
        np.repeat(numbers, [len(layout.start) for layout in layouts]),
        np.concatenate([np.empty(0, np.int64), *(layout.start for layout in layouts)]),
    )
    return NewImages(replace(m.whole, shards=shards, images=images, compression=None), layouts)


def _layout_of(m: Manifest, rows: Ints) -> ImageLayout:
    t = m.tensors
    return lay_out(
        [t.names[row] for row in rows.tolist()],
        [t.dtypes[code][0] for code in t.dtype[rows].tolist()],
        t.shape[rows],
        t.ndim[rows],
        t.itemsize[rows],
        chunk_nbytes=m.chunk_nbytes,
        block_nbytes=m.block_nbytes,
    )


@dataclass
class ImageRewriter:
    """Writes ``images`` to ``destination``, under the name of ``attempt``, with the tensors that
    ``source`` reads.

    Calls ``sent(nbytes)`` after writing that many more bytes of an image. Used like an
    :class:`.image_copier.ImageCopier`.
    """

    source: ImageReader
    destination: Driver
    images: NewImages
    attempt: str
    budget_nbytes: int
    sent: Callable[[int], None]
    _written: dict[int, WrittenImage] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return [layout.nbytes for layout in self.images.layouts]

    @property
    def target(self) -> Manifest:
        """The manifest of the new images, once all are written."""
        m = self.images.manifest
        digests = [self._written[image].digests for image in range(len(m.images))]
        images = replace(m.images, digests=np.concatenate([m.images.digests[:0], *digests]))
        return replace(m, attempt=self.attempt, images=images)

    async def whole(self) -> list[int]:
        """Return the images that the destination already has. Their data is not read."""
        for image, layout in enumerate(self.images.layouts):
            there = await stored_image(self.destination, self._key(image), layout)
            if there is not None:
                self._written[image] = there
        return sorted(self._written)

    async def run(self, images: Sequence[int]) -> None:
        """Write these images, one after another; each is durable and visible on return.

        After an error, images committed earlier stay and nothing of the others is left. Raises
        DamagedError, with file, bytes and tensors; StorageError.
        """
        for image in images:
            self._written[image] = await self._write(image)

    async def _write(self, image: int) -> WrittenImage:
        layout = self.images.layouts[image]
        done_nbytes = 0

        def wrote(nbytes: int, _: int) -> None:
            nonlocal done_nbytes
            self.sent(nbytes - done_nbytes)
            done_nbytes = nbytes

        async def key() -> str:
            return self._key(image)

        m = self.images.manifest
        chunks = _TensorChunks(layout, self.source, m.shards.tensor[m.shards.image == image])
        callbacks = Callbacks(lambda: None, lambda: None, wrote=wrote)
        budget_nbytes = self.budget_nbytes // chunks.chunk_copies
        written = await ImageWriter(
            self.destination, layout, chunks, budget_nbytes, callbacks
        ).write(key)
        self.sent(layout.nbytes - layout.hashed_end)
        return written

    def _key(self, image: int) -> str:
        return replace(self.images.manifest, attempt=self.attempt).image_key(image)


class _TensorChunks:
    """A :class:`.chunks.ChunkSource` of the whole tensors in ``rows``, as ``layout`` orders them.

    A chunk being read takes the memory of ``chunk_copies``.
    """

    def __init__(self, layout: ImageLayout, source: ImageReader, rows: Ints) -> None:
        self.pool = host_pool(layout.chunk_nbytes)
        self.reads = min(source.driver.traits.concurrency, _READS_MAX)
        self.chunk_copies = 1 + _CHUNKS_READ * source.driver.traits.read_copies
        self._layout = layout
        self._source = source
        self._row = rows[layout.order]
        self._start = layout.start[layout.order]
        self._stop = self._start + source.manifest.tensors.nbytes[self._row]

    async def take(self, chunk: int, parts: Parts | None = None) -> HostBuffer:
        """Read a chunk; see :class:`.chunks.ChunkSource`. Raises like
        :func:`.flat_reader.read_ranges`."""
        start, stop = self._layout.chunk_range(chunk)
        buffer = self.pool.take()
        view = buffer.view[: stop - start]
        fill_frame(self._layout, view, start)
        source = self._source
        budget_nbytes = _CHUNKS_READ * self._layout.chunk_nbytes
        try:
            wanted = self._wanted(view, start, stop)
            await read_ranges(source.driver, source.manifest, [wanted], budget_nbytes)
        except BaseException:
            self.pool.give(buffer)
            raise
        return buffer

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _wanted(self, view: memoryview, start: int, stop: int) -> FlatRanges:
        """Return the parts of the tensors in bytes [start, stop) of the image."""
        first = self._stop.searchsorted(start, side="right")
        last = self._start.searchsorted(stop, side="left")
        tensor_start = self._start[first:last]
        begin = np.maximum(tensor_start, start)
        end = np.minimum(self._stop[first:last], stop)
        into = np.frombuffer(view, np.uint8)
        row = self._row[first:last]
        return FlatRanges(row, begin - tensor_start, end - tensor_start, begin - start, into)
