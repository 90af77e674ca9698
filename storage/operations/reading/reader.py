"""One committed checkpoint, opened for reading: its contents, slices of tensors, verification.

Needs neither torch.distributed nor, until a tensor is read, torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ....core.forks.cached import cached_property
from ....drivers.contract import Driver
from ....drivers.registry import open_driver
from ....errors import DamagedError, HoldfastError, ReplacedError, TelemetryError, UsageError
from ....planner.columns import Ints
from ...format.manifest import Manifest, image_key
from ...format.save_telemetry import SaveTelemetry, decode_telemetry, telemetry_key
from ...format.tree import format_path
from ...pipeline.flat_reader import FlatRanges, read_flat, read_ranges
from ...pipeline.mapping import image_driver
from ...pipeline.verifier import VerifyReport, verify_images
from ...protocol.current import is_current, read_manifest
from ...protocol.telemetry import get_telemetry
from ...runtime.buffers import memory_for
from ...runtime.engine import check_may_wait, close_later, offload, on_engine, run, start
from ...runtime.progress import ProgressCallback, ProgressReporter
from ..foreign_formats import explains
from ..location import UriLike

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ...format.part import Only, Selection
    from ...state.filling.targets import Wanted
    from .shares import Skip, Split


READ_BUDGET_NBYTES = 512 << 20

_of_parents: list[Driver] = []
"""In a forked child: the parent's drivers, which must be neither used nor closed."""

Index = slice | int | tuple[slice | int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    ``shards`` counts the boxes in which it is stored, ``ranks`` wrote them. ``owners``: ranks that
    each have their own tensor under this name; empty if it belongs to the whole job. ``alias_of``
    names the tensor it is tied to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shards: int
    ranks: tuple[int, ...]
    owners: tuple[int, ...]
    alias_of: str | None


class Checkpoint:
    """A committed checkpoint, created by :func:`open`; a context manager.

    A forked child may use it too, through its own connection. An unclosed checkpoint is closed when
    garbage-collected, with a ResourceWarning.
    """

    def __init__(
        self,
        driver: Driver,
        manifest: Manifest,
        manifest_nbytes: int,
        reopen: Callable[[], Driver] | None = None,
    ) -> None:
        """``reopen`` makes another driver of the same storage for a forked child; without it, a
        child cannot use the checkpoint."""
        self._opened = driver
        self._reopen = reopen
        self._images_made: Driver | None = None
        self._open_in: int | None = os.getpid()
        """Process that must close it; a forked child leaves inherited drivers alone."""
        self._warns = True
        self._manifest = manifest
        self.uri = driver.uri
        self.step = manifest.step
        self.world = manifest.world
        """Number of ranks that saved it."""
        self.created_s = manifest.created_s
        self.attempt = manifest.attempt
        self.manifest_nbytes = manifest_nbytes
        self.compression = manifest.compression
        """``"lz4"`` if images are compressed, else None."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = f"{len(self.tensors)} tensors, {self.nbytes:,} bytes, {self.world} ranks"
        return f"<Checkpoint {self.uri}: step {self.step}, {sizes}>"

    def close(self) -> None:
        """Close the storage. Idempotent. Does not wait when called on the engine's thread."""
        opened_in = self._open_in
        self._open_in = None
        if opened_in is None:
            return
        if opened_in != os.getpid():
            _of_parents.append(self._opened)
            return
        closed = start(self._opened.close())
        if not on_engine():
            closed.result()

    def close_when_collected(self) -> None:
        """Suppress the warning, for an owner that is never closed explicitly."""
        self._warns = False

    def __del__(self) -> None:
        """Close later. May run on any thread at any moment, so it takes no lock and never waits."""
        if getattr(self, "_open_in", None) != os.getpid() or sys.is_finalizing():
            return
        close_later(self._opened.close)
        if self._warns:
            warnings.warn(
                f"unclosed checkpoint {self.uri}", ResourceWarning, stacklevel=2, source=self
            )

    @property
    def _driver(self) -> Driver:
        if self._open_in not in (None, os.getpid()):
            self._open_in_child()
        return self._opened

    def _open_in_child(self) -> None:
        """Replace the driver after a fork: the parent's waits for its own threads."""
        if self._reopen is None:
            raise UsageError(
                "this checkpoint was opened in the parent process",
                uri=self.uri,
                advice="Open it in this process.",
            )
        _of_parents.append(self._opened)  # must not be closed here
        self._opened = self._reopen()
        self._images_made = None
        self._open_in = os.getpid()
        self._warns = False  # the parent closes it

    @property
    def _images(self) -> Driver:
        driver = self._driver  # first: a forked child replaces it
        if self._images_made is None:
            self._images_made = image_driver(driver, self._manifest)
        return self._images_made

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return self._manifest.tensor_nbytes

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, in the order of the state."""
        return {name: self._info(name, rows) for name, rows in self._manifest.tensors.rows.items()}

    def _info(self, name: str, rows: tuple[int, ...]) -> TensorInfo:
        m = self._manifest
        t = m.tensors
        row = rows[0]
        stored_row = t.stored_row(row)
        tied_to = t.names[stored_row] if stored_row != row else None
        first = int(self._pointers[stored_row])
        last = int(self._pointers[stored_row + 1])
        ranks = sorted({int(r) for r in m.images.rank[m.shards.image[first:last]]})
        owners = tuple(int(t.owner[r]) for r in rows if t.owner[r] >= 0)
        dtype, *_ = t.dtypes[t.dtype[row]]
        nbytes = int(t.nbytes[row])
        return TensorInfo(
            name, t.shape_of(row), dtype, nbytes, last - first, tuple(ranks), owners, tied_to
        )

    @cached_property
    def _pointers(self) -> Ints:
        return self._manifest.shards.pointers(len(self._manifest.tensors))

    def values(self, rank: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield (path, value) for all small values as saved by ``rank``. Paths look like
        ``state["optim"]["lr"]``."""
        paths = self._manifest.tree.paths()
        for v in self._manifest.tree.values:
            yield format_path((*paths[v.container], v.key)), v.of(rank)

    def read(
        self, name: str, index: Index | None = None, *, rows: slice | None = None, rank: int = 0
    ) -> torch.Tensor:
        """Read one tensor, or a slice of it, on the CPU.

        Examples: ``read("wq")``, ``read("wq", (slice(0, 128), 3))``, ``read("wq", rows=slice(0,
        128))``. Reads and verifies only the blocks that the slice touches.

        ``rank`` selects among tensors that differ per rank. Raises UsageError for an unknown name
        or an index that does not fit; DamagedError; StorageError.
        """
        from ...state.filling.targets import Wanted
        from .shares import Window, window

        if index is not None and rows is not None:
            raise UsageError("give index or rows, not both")
        tensors = self._manifest.tensors
        row = self._row(name, rank)
        if index is None:
            index = rows
        seen: Window = window(tensors.shape_of(row), index)
        wanted = Wanted()
        made = seen.add_to(wanted, row, tensors)
        start(self._fill(wanted)).result()
        return seen.view(made)

    def read_tree(self, only: Only | None = None, *, rank: int = 0) -> Any:
        """Read the state as ``rank`` saved it, or a part of it, on the CPU.

        Examples: ``read_tree("model")``, ``read_tree(("optim", 0))``; see ``only`` of
        :func:`~holdfast.load`. Raises UsageError if the part does not exist; DamagedError;
        StorageError.
        """
        from ...format.part import Part
        from ...state.filling.targets import Wanted
        from ..loading.fill import build_part

        wanted = Wanted()
        part = None if only is None else Part(only)
        state = build_part(self._manifest, rank, wanted, part, self.uri)
        start(self._fill(wanted)).result()
        return state

    def read_shares(
        self,
        only: Selection = (),
        *,
        rename: Mapping[str, str] | None = None,
        skip: Skip | None = None,
        rank: int = 0,
        world: int = 1,
        split: Split | None = None,
        budget_nbytes: int = READ_BUDGET_NBYTES,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) on the CPU, in the order of the state, as the ``load_weights`` of
        inference engines expects. Tensors are whole unless ``split`` divides them.

        ``only`` and ``rename`` as in :func:`~holdfast.export`. ``skip`` and ``split`` see the new
        names. ``skip(name)`` returns whether to leave a tensor out: a layer of another pipeline
        stage, an expert of another rank. Its bytes are not read.

        ``split`` gives the dimension along which a tensor is divided among ``world`` ranks;
        ``rank`` gets its share. It maps name patterns to dimensions, such as ``{"*.q_proj.weight":
        0}``, the first match applies; or it is a function of name and shape. Shares follow
        ``torch.chunk``: equal lengths, except that the last ones may be shorter or empty. Tensors
        without a dimension are whole on every rank. Each rank reads and verifies only its share.

        Tied tensors follow one another and share their memory, which is read once. Up to
        ``budget_nbytes`` of tensors, or a single larger one, are read ahead, one half while the
        other half is used.

        Raises UsageError immediately for patterns that match nothing, colliding names, dimensions
        that a tensor lacks, and tensors that differ per rank; later DamagedError and StorageError.
        """
        from .shares import read_in_groups, selected, shares_of

        tensors = self._manifest.tensors
        new_names = selected(tensors, only, rename or {}, skip)
        shares = shares_of(tensors, new_names, rank, world, split or {})
        return read_in_groups(tensors, shares, self._fill, budget_nbytes // 2)

    def read_bytes(
        self, name: str, start: int = 0, stop: int | None = None, *, rank: int = 0
    ) -> bytes:
        """Read bytes [start, stop) of a tensor's elements, in row-major order, little-endian.

        Does not need torch. Reads and verifies only the blocks that hold them. Raises UsageError
        for an unknown name or an invalid range; DamagedError; StorageError.
        """
        row = self._row(name, rank)
        nbytes = int(self._manifest.tensors.nbytes[row])
        if stop is None:
            stop = nbytes
        if not 0 <= start <= stop <= nbytes:
            raise UsageError(
                f"bytes {start}:{stop} are not within the {nbytes} of tensor {name!r}", uri=self.uri
            )
        return bytes(run(self._read_flat(row, start, stop)))

    async def _read_flat(self, row: int, start: int, stop: int) -> memoryview:
        async with self._unless_replaced():
            return await read_flat(
                self._images, self._manifest, row, start, stop, READ_BUDGET_NBYTES
            )

    @property
    def images(self) -> Mapping[int, int]:
        """Size of each image in bytes, by rank."""
        m = self._manifest
        return dict(
            zip(m.images.rank.tolist(), m.images.nbytes(m.block_nbytes).tolist(), strict=True)
        )

    def read_image(self, rank: int, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) of the decompressed image of ``rank``, without verification.

        Raises StorageError; DamagedError if the range exceeds the image, or data cannot be
        decompressed.
        """
        with memory_for(f"{stop - start:,} bytes of an image"):
            into = bytearray(stop - start)
        key = image_key(self.attempt, rank, self._manifest.compression)
        run(self._images.read(key, start, memoryview(into)))
        return bytes(into)

    def _row(self, name: str, rank: int) -> int:
        tensors = self._manifest.tensors
        row = tensors.find(name, rank)
        if row is None:
            raise UsageError(
                f"no tensor {name!r} in this checkpoint",
                uri=self.uri,
                advice="`holdfast show` lists its tensors.",
            )
        return tensors.stored_row(row)

    async def _fill(self, wanted: Wanted) -> None:
        from ..loading.fill import fill

        async with self._unless_replaced():
            await fill(self._images, self._manifest, wanted, READ_BUDGET_NBYTES)

    @contextlib.asynccontextmanager
    async def _unless_replaced(self) -> AsyncIterator[None]:
        """Raise ReplacedError for damage, if another save has replaced the checkpoint."""
        try:
            yield
        except DamagedError as error:
            if await is_current(self._driver, self.attempt):
                raise
            raise self._replaced() from error

    def _replaced(self) -> ReplacedError:
        return ReplacedError(
            "another save has replaced this checkpoint", uri=self.uri, advice="Open it again"
        )

    def telemetry(self) -> SaveTelemetry | None:
        """Return the timings of the save on every rank; None if none were recorded or stored.

        Raises TelemetryError if the stored timings cannot be read; StorageError.
        """
        return run(read_telemetry(self._driver, self.attempt))

    def verify(self, progress: ProgressCallback | None = None) -> VerifyReport:
        """Read every byte and check it against its checksum. Reports all damage.

        Raises only errors that prevent the check. ``progress(done_nbytes, total_nbytes)`` is called
        periodically on a separate thread; an exception from it aborts the check.
        """
        with ProgressReporter(progress) as reporter:
            return run(self._verify(reporter))

    async def _verify(self, reporter: ProgressReporter) -> VerifyReport:
        report = await verify_images(
            self._images, self._manifest, READ_BUDGET_NBYTES, reporter.report
        )
        if not report.ok and not await is_current(self._driver, self.attempt):
            raise self._replaced()
        return report


async def read_telemetry(driver: Driver, attempt: str) -> SaveTelemetry | None:
    """Return the telemetry of an attempt, like :meth:`Checkpoint.telemetry`."""
    data = await get_telemetry(driver, attempt)
    if data is None:
        return None
    try:
        return await offload(decode_telemetry, data)
    except TelemetryError as error:
        error.uri = driver.uri
        error.key = telemetry_key(attempt)
        raise


def manifest_of(checkpoint: Checkpoint) -> Manifest:
    """Return the manifest of an opened checkpoint, for other operations."""
    return checkpoint._manifest


async def read_wanted(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Fill the wanted tensors, verified. Raises like :func:`read_into`."""
    await checkpoint._fill(wanted)


async def read_into(
    checkpoint: Checkpoint, ranges: Sequence[FlatRanges], budget_nbytes: int
) -> None:
    """Fill ranges of tensors, verified. Raises DamagedError; ReplacedError if a save replaced the
    checkpoint; StorageError."""
    async with checkpoint._unless_replaced():
        await read_ranges(checkpoint._images, checkpoint._manifest, ranges, budget_nbytes)


@explains("uri", "storage_options")
def open(uri: UriLike, *, storage_options: Mapping[str, object] | None = None) -> Checkpoint:
    """Open the checkpoint committed at ``uri``.

    ``storage_options`` are options of the storage; options in the URI take precedence. Raises
    NotACheckpointError, DamagedError, UnsupportedFormatError, UriError and StorageError.
    """
    check_may_wait()
    reopen = partial(open_driver, uri, **(storage_options or {}))
    driver = reopen()
    try:
        manifest, data = start(read_manifest(driver)).result()
    except HoldfastError:
        start(driver.close()).result()
        raise
    return Checkpoint(driver, manifest, len(data), reopen)
