"""One committed checkpoint, opened for reading: what is in it, any slice of it, and whether it is
undamaged.

Needs no torch.distributed, and no torch until a tensor is read.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...core.forks.cached import cached_property
from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...errors import DamagedError, HoldfastError, ReplacedError, TelemetryError, UsageError
from ...planner.columns import Ints
from ..format.manifest import Manifest, image_key
from ..format.save_telemetry import SaveTelemetry, decode_telemetry, telemetry_key
from ..format.tree import format_path
from ..pipeline.flat_reader import FlatRanges, read_flat, read_ranges
from ..pipeline.unpacking import image_driver
from ..pipeline.verifier import VerifyReport, verify_images
from ..protocol.current import is_current, read_manifest
from ..protocol.telemetry import get_telemetry
from ..runtime.buffers import memory_for
from ..runtime.engine import check_may_wait, close_later, offload, on_engine, run, start
from ..runtime.progress import ProgressCallback, ProgressReporter
from .foreign import explains

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ..format.part import Only
    from ..state.targets import Wanted
    from .shares import Split

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "manifest_of",
    "open",
    "read_into",
    "read_telemetry",
    "read_wanted",
]

READ_BUDGET_NBYTES = 512 << 20

_of_parents: list[Driver] = []
"""In a forked child: drivers of its parent, which it neither uses nor closes."""

Index = slice | int | tuple[slice | int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint. ``shards`` counts the boxes in which it is stored, ``ranks``
    those that wrote them; ``owners`` are the ranks that each have a tensor of their own under this
    name (none: it is the whole job's); ``alias_of`` names the tensor that it is tied to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shards: int
    ranks: tuple[int, ...]
    owners: tuple[int, ...]
    alias_of: str | None


class Checkpoint:
    """A committed checkpoint. Made by :func:`open`; a context manager. A forked child may use it as
    well, by a connection of its own.

    One that is not closed is closed when it is collected, with a ResourceWarning.
    """

    def __init__(
        self,
        driver: Driver,
        manifest: Manifest,
        manifest_nbytes: int,
        reopen: Callable[[], Driver] | None = None,
    ) -> None:
        """``reopen`` makes another driver of the same storage, for a forked child; None: a child
        cannot use it."""
        self._opened = driver
        self._reopen = reopen
        self._images_made: Driver | None = None
        self._open_in: int | None = os.getpid()
        """The process that is to close it; a forked child leaves what it has inherited alone."""
        self._warns = True
        self._manifest = manifest
        self.uri = driver.uri
        self.step = manifest.step
        self.world = manifest.world
        """Ranks that saved it."""
        self.created_s = manifest.created_s
        self.attempt = manifest.attempt
        self.manifest_nbytes = manifest_nbytes
        self.compression = manifest.compression
        """``"lz4"`` where images are stored so, else None."""

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
        """Let go of the storage. Safe to call twice. Does not wait where that is impossible: on the
        engine's thread."""
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
        """For an owner that is never closed itself: do not warn."""
        self._warns = False

    def __del__(self) -> None:
        """Any thread may call this, at any moment: it takes no lock and waits for nothing."""
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
        """After a fork: the parent's driver waits for threads, and for an event loop, that are not
        in this process."""
        if self._reopen is None:
            raise UsageError(
                "this checkpoint was opened in the parent process",
                uri=self.uri,
                advice="Open it in this process.",
            )
        _of_parents.append(self._opened)  # not to be closed here
        self._opened = self._reopen()
        self._images_made = None
        self._open_in = os.getpid()
        self._warns = False  # the parent closes it

    @property
    def _images(self) -> Driver:
        driver = self._driver  # first: in a forked child it is another one
        if self._images_made is None:
            self._images_made = image_driver(driver, self._manifest)
        return self._images_made

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
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
        tied_to: str | None = None
        if stored_row != row:
            tied_to = t.names[stored_row]
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
        """All small values: (path as in ``state["optim"]["lr"]``, value), as ``rank`` saved
        them."""
        paths = self._manifest.tree.paths()
        for v in self._manifest.tree.values:
            yield format_path((*paths[v.container], v.key)), v.of(rank)

    def read(
        self, name: str, index: Index | None = None, *, rows: slice | None = None, rank: int = 0
    ) -> torch.Tensor:
        """One tensor, or a slice of it, on the CPU: ``read("wq")``, ``read("wq", (slice(0, 128),
        3))``, ``read("wq", rows=slice(0, 128))``. Reads only the blocks that the slice touches, and
        verifies them.

        ``rank`` chooses among tensors that each rank has of its own. Raises UsageError for a name
        that is not there or an index that does not fit; DamagedError; StorageError.
        """
        from ..state.targets import Wanted
        from .slices import Window, window

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
        """The state as ``rank`` saved it, on the CPU, or a part of it: ``read_tree("model")``,
        ``read_tree(("optim", 0))``, as ``only`` of :func:`~holdfast.load`.

        Raises UsageError for a part that is not there; DamagedError; StorageError.
        """
        from ..format.part import Part
        from ..state.targets import Wanted
        from .build_part import build_part

        part = None
        if only is not None:
            part = Part(only)
        wanted = Wanted()
        state = build_part(self._manifest, rank, wanted, part, self.uri)
        start(self._fill(wanted)).result()
        return state

    def read_shares(
        self,
        only: Sequence[str] = (),
        *,
        rank: int = 0,
        world: int = 1,
        split: Split | None = None,
        budget_nbytes: int = READ_BUDGET_NBYTES,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors by name, on the CPU, one after the other in the order of the state: those whose
        names match one of the patterns ``only``; none: all.

        ``split`` says along which dimension a tensor is divided among ``world`` ranks, of which
        ``rank`` gets its share: patterns of names with a dimension each, such as
        ``{"*.q_proj.weight": 0}``, of which the first that matches applies, or a function of a name
        and a shape. Shares are those of ``torch.chunk``: all of the same length but for the last
        ones, which may be shorter, or empty. What has no dimension is whole on every rank. Each
        rank reads its share alone, and verifies it.

        Up to ``budget_nbytes`` of tensors, or a single larger one, are read ahead; half of them
        while the other half is used.

        Raises UsageError, at once, for patterns that match nothing, dimensions that a tensor has
        not, and tensors that each rank has of its own; later DamagedError, StorageError.
        """
        from .shares import read_in_groups, shares_of

        tensors = self._manifest.tensors
        shares = shares_of(tensors, only, rank, world, split or {})
        return read_in_groups(tensors, shares, self._fill, budget_nbytes // 2)

    def read_bytes(
        self, name: str, start: int = 0, stop: int | None = None, *, rank: int = 0
    ) -> bytes:
        """Bytes [start, stop) of a tensor's elements in row-major order, little-endian; without
        torch. Reads only the blocks that hold them, and verifies them. Raises UsageError for a name
        or a range that is not there; DamagedError; StorageError."""
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
        try:
            return await read_flat(
                self._images, self._manifest, row, start, stop, READ_BUDGET_NBYTES
            )
        except DamagedError as error:
            await self._raise_if_replaced(error)
            raise

    @property
    def images(self) -> Mapping[int, int]:
        """Size of each image in bytes, by rank."""
        m = self._manifest
        return dict(
            zip(m.images.rank.tolist(), m.images.nbytes(m.block_nbytes).tolist(), strict=True)
        )

    def read_image(self, rank: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the image of ``rank``, unverified. Raises StorageError;
        DamagedError beyond its end, and where what is compressed cannot be unpacked."""
        with memory_for(f"{stop - start:,} bytes of an image"):
            into = bytearray(stop - start)
        key = image_key(self.attempt, rank, self._manifest.compression)
        run(self._images.read(key, start, memoryview(into)))
        return bytes(into)

    def _row(self, name: str, rank: int) -> int:
        """The row that holds a tensor, also if it is tied to another."""
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
        from .fill import fill

        try:
            await fill(self._images, self._manifest, wanted, READ_BUDGET_NBYTES)
        except DamagedError as error:
            await self._raise_if_replaced(error)
            raise

    async def _raise_if_replaced(self, error: Exception) -> None:
        if not await is_current(self._driver, self.attempt):
            raise ReplacedError(
                "another save has replaced this checkpoint", uri=self.uri, advice="Open it again"
            ) from error

    def telemetry(self) -> SaveTelemetry | None:
        """Where the time of the save went, on every rank; None where nothing was recorded, or
        stored. Raises TelemetryError where what is stored cannot be read; StorageError."""
        return run(read_telemetry(self._driver, self.attempt))

    def verify(self, progress: ProgressCallback | None = None) -> VerifyReport:
        """Read every byte and check it against its checksum. Reports all damage; raises only what
        keeps it from looking.

        ``progress(done_nbytes, total_nbytes)`` is called now and then, on a thread of its own. What
        it raises ends this.
        """
        with ProgressReporter(progress) as reporter:
            return run(self._verify(reporter))

    async def _verify(self, reporter: ProgressReporter) -> VerifyReport:
        report = await verify_images(
            self._images, self._manifest, READ_BUDGET_NBYTES, reporter.report
        )
        if not report.ok:
            await self._raise_if_replaced(
                DamagedError(f"{len(report.damages)} damages", uri=self.uri)
            )
        return report


async def read_telemetry(driver: Driver, attempt: str) -> SaveTelemetry | None:
    """As :meth:`Checkpoint.telemetry`, of the attempt that is the checkpoint."""
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
    """The manifest of an opened checkpoint, for other operations."""
    return checkpoint._manifest


async def read_wanted(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Fill the tensors that are wanted, verified. Raises as :func:`read_into`."""
    await checkpoint._fill(wanted)


async def read_into(
    checkpoint: Checkpoint, ranges: Sequence[FlatRanges], budget_nbytes: int
) -> None:
    """Fill ranges of tensors, verified. Raises DamagedError; ReplacedError where a save came
    between; StorageError."""
    try:
        await read_ranges(checkpoint._images, checkpoint._manifest, ranges, budget_nbytes)
    except DamagedError as error:
        await checkpoint._raise_if_replaced(error)
        raise


@explains("uri", "storage_options")
def open(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, object] | None = None
) -> Checkpoint:
    """Open the checkpoint committed at ``uri``. ``storage_options`` are options of the storage;
    those in the URI win.

    Raises NotACheckpointError, DamagedError, UnsupportedFormatError, UriError, StorageError.
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
