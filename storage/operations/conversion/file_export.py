"""The files of an export: which tensors they hold, and how one is written.

A file is written in windows, several at a time: read and verified, converted, written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....core.units import round_up
from ....drivers.contract import Driver
from ....errors import UsageError
from ....planner.image import CHUNK_NBYTES, PAGE_NBYTES
from ....planner.table import TensorTable
from ....planner.windows import Slice, Window, windows
from ...format.model_folder import ModelFile, ModelTensor
from ...format.torch_pickle import NEW_DTYPES
from ...pipeline.flat_reader import FlatRanges
from ...pipeline.image_writer import Opening
from ...runtime.buffers import HostBuffer, host_pool
from ...runtime.engine import CPU_THREADS, offload
from ...runtime.executor import Pipeline, Stage
from ...runtime.scheduler import Budget
from ..reading.reader import Checkpoint, manifest_of, read_into

Bytes = npt.NDArray[np.uint8]
_CHUNKS_READ = 2
"""Number of chunks that a chunk-sized window overlaps, if its tensors are not converted."""

_READS_MAX = 16
"""Windows read at the same time; each takes several requests."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a tensor: its row in the manifest, and its dtype and itemsize there.

    ``convert_to`` is the target dtype, or None. The tensor begins at byte ``start`` of the stored
    one.
    """

    row: int
    kind: tuple[str, int]
    convert_to: str | None
    start: int = 0


@dataclass(frozen=True, slots=True)
class LastFile:
    """A small file that describes the others. ``content()`` runs on any thread while the others
    are written."""

    key: str
    content: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files of an export.

    ``sources`` locates the tensors in ``files``. ``last`` is written last; readers need it to use
    the others. ``tensors`` counts tensors, tied ones once.
    """

    files: Sequence[ModelFile]
    sources: Mapping[str, Source]
    tensors: int
    tied: Mapping[str, str]
    last: LastFile | None = None

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.nbytes for file in self.files)


class ExportedTensors:
    """The selected tensors under ``new_names``, with their sources.

    ``tied`` maps the new name of a tied tensor to the new name of the first. Raises UsageError for
    tensors that differ per rank, and for dtypes that are not in ``known``.
    """

    def __init__(
        self,
        table: TensorTable,
        new_names: Mapping[str, str],
        dtype: str | None,
        known: Collection[str],
    ) -> None:
        self._dtype = dtype
        self._known = known
        rows = np.array([table.rows[name][0] for name in new_names], np.int64)
        for row in rows[table.owner[rows] >= 0].tolist():
            raise UsageError(
                f"tensor {table.names[row]!r} differs from rank to rank",
                advice="Leave it out (only), or read it with Checkpoint.read.",
            )
        alias = table.alias[rows]
        stored = np.where(alias < 0, rows, alias)
        kinds = [table.dtypes[code] for code in table.dtype[stored].tolist()]
        shapes = zip(table.shape[stored].tolist(), table.ndim[stored].tolist(), strict=True)
        self.tied: dict[str, str] = {}
        self.tensors: list[tuple[ModelTensor, Source]] = []
        by_stored_row: dict[int, str] = {}
        columns = zip(new_names.items(), stored.tolist(), kinds, shapes, strict=True)
        for (name, new_name), row, kind, (shape, ndim) in columns:
            first = by_stored_row.setdefault(row, new_name)
            if first != new_name:
                self.tied[new_name] = first
                continue
            written, itemsize, convert_to = self._written(name, kind)
            tensor = ModelTensor(new_name, written, itemsize, tuple(shape[:ndim]))
            self.tensors.append((tensor, Source(row, kind, convert_to)))

    @property
    def sources(self) -> dict[str, Source]:
        """Sources of the tensors, by new name."""
        return {tensor.name: source for tensor, source in self.tensors}

    def _written(self, name: str, kind: tuple[str, int]) -> tuple[str, int, str | None]:
        """Return the dtype and itemsize to write, and the dtype to convert to, if any."""
        stored_dtype, itemsize = kind
        dtype = stored_dtype
        if self._dtype is not None and "float" in stored_dtype:
            from ...state.dtypes import FLOATS, dtype_of, is_convertible

            dtype = self._dtype
            if not is_convertible(dtype_of(*kind), dtype_of(dtype, FLOATS[dtype])):
                raise UsageError(
                    f"tensor {name!r} is of dtype {stored_dtype}, which torch does not convert to "
                    f"{dtype}",
                    advice="Export it as it is (without a dtype), or leave it out (only).",
                )
        if dtype not in self._known:
            raise UsageError(
                f"tensor {name!r} is of dtype {dtype}, which this format cannot hold",
                advice="Leave it out (only).",
            )
        if dtype == stored_dtype:
            return dtype, itemsize, None
        return dtype, NEW_DTYPES[dtype], dtype


@dataclass(slots=True)
class _Held:
    """The memory of one window, and the elements to convert into it."""

    buffer: HostBuffer
    unconverted: list[tuple[Slice, Bytes]] = field(default_factory=list)

    @property
    def content(self) -> Bytes:
        return np.frombuffer(self.buffer.view, np.uint8)


@dataclass(eq=False)
class FileExport:
    """Exports one file in windows. Calls ``wrote(nbytes)`` after writing that many more bytes."""

    _checkpoint: Checkpoint
    _driver: Driver
    _file: ModelFile
    _sources: Mapping[str, Source]
    _budget_nbytes: int
    _wrote: Callable[[int], None]
    _held: dict[Window, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chunk_nbytes = manifest_of(self._checkpoint).chunk_nbytes
        self._window_nbytes = round_up(self._driver.traits.part_min_nbytes, CHUNK_NBYTES)
        self._pool = host_pool(self._window_nbytes)

    async def run(self) -> None:
        """Write the file, which is durable and visible on return. An error leaves nothing
        behind."""
        file = self._file
        lead = self._lead()
        cut = list(windows(file.sizes, self._window_nbytes, lead))
        opening = Opening(self._driver.create(file.key, file.nbytes))

        async def write(window: Window) -> None:
            upload = await opening.upload()
            await upload.write(window.start - lead, self._held[window].buffer.view[: window.nbytes])
            self._wrote(window.nbytes)

        in_order = self._driver.traits.part_order != "any"
        pipeline = Pipeline(
            [
                Stage("read", "read", self._read),
                Stage("convert", "cpu", self._convert),
                Stage("write", "write", write, in_order=in_order),
            ],
            self._budget(),
            release=self._release,
        )
        try:
            await pipeline.run(cut, [1] * len(cut))
            await (await opening.upload()).commit()
        except BaseException:
            await opening.drop()
            raise

    def _lead(self) -> int:
        """Return by how many bytes to shorten the first window, so that the others match image
        chunks.

        A window that matches a chunk is read directly into place and verified as a whole. 0 if that
        cannot work, or if the storage requires parts of equal size.
        """
        traits = self._driver.traits
        m = manifest_of(self._checkpoint)
        if traits.part_min_nbytes > 1 or traits.streams > 1 or not self._file.tensors:
            return 0
        source = self._sources[self._file.tensors[0].name]
        shards = np.flatnonzero(m.shards.tensor == source.row)
        if source.convert_to is not None or not len(shards):
            return 0
        first = self._file.pieces.index(self._file.tensors[0])
        stored = int(m.shards.start[shards[0]]) + source.start
        lead = (stored - sum(self._file.sizes[:first])) % m.chunk_nbytes
        return 0 if lead % PAGE_NBYTES else lead

    def _budget(self) -> Budget:
        """Return the budget, in jobs: each has a window, its read buffers and its unconverted
        elements."""
        traits = self._driver.traits
        writes = 1 if traits.part_order == "serial" else traits.concurrency
        job_nbytes = self._window_nbytes + _CHUNKS_READ * self._chunk_nbytes
        ratios = [
            self._sources[tensor.name].kind[1] / tensor.itemsize
            for tensor in self._file.tensors
            if self._sources[tensor.name].convert_to is not None
        ]
        job_nbytes += int(self._window_nbytes * max(ratios, default=0))
        free_nbytes = self._budget_nbytes - traits.upload_nbytes
        jobs = min(max(1, free_nbytes // job_nbytes), writes + _READS_MAX)
        return Budget(jobs, {"read": jobs, "cpu": CPU_THREADS, "write": writes})

    async def _read(self, window: Window) -> None:
        held = _Held(self._pool.take())
        self._held[window] = held
        wanted = await offload(self._wanted, window, held)
        await read_into(self._checkpoint, wanted, _CHUNKS_READ * self._chunk_nbytes)

    def _wanted(self, window: Window, held: _Held) -> list[FlatRanges]:
        as_they_are = []
        found = []
        for part in window.slices:
            piece = self._file.pieces[part.item]
            if isinstance(piece, bytes):
                held.buffer.view[part.at : part.at + part.nbytes] = piece[part.start : part.stop]
                continue
            source = self._sources[piece.name]
            if source.convert_to is None:
                start = source.start + part.start
                as_they_are.append((source.row, start, start + part.nbytes, part.at))
                continue
            start = source.start + part.start // piece.itemsize * source.kind[1]
            stop = source.start + part.stop // piece.itemsize * source.kind[1]
            there = np.empty(stop - start, np.uint8)
            held.unconverted.append((part, there))
            found.append(FlatRanges.of([(source.row, start, stop, 0)], there))
        return [*found, FlatRanges.of(as_they_are, held.content)]

    async def _convert(self, window: Window) -> None:
        if self._held[window].unconverted:
            await offload(self._convert_now, self._held[window])

    def _convert_now(self, held: _Held) -> None:
        from ...state.dtypes import convert

        into = held.content
        for part, elements in held.unconverted:
            tensor = self._file.pieces[part.item]
            assert isinstance(tensor, ModelTensor)
            source = self._sources[tensor.name]
            there = into[part.at : part.at + part.nbytes]
            assert source.convert_to is not None
            convert(elements, source.kind, there, source.convert_to, tensor.name)

    def _release(self, window: Window) -> None:
        held = self._held.pop(window, None)
        if held is not None:
            self._pool.give(held.buffer)
