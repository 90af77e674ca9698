"""Compares two checkpoints, whatever their layouts: contents and values of tensors.

Tensors in chunks with equal digests are not read. The others are read from both sides, window by
window, so memory stays bounded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ....core.aio import side_by_side
from ....core.forks.cached import cached_property
from ....planner.columns import Ints
from ....planner.table import TensorTable
from ....planner.windows import Window, windows
from ...format.manifest import Manifest
from ...format.tree import ByRank, format_path
from ...pipeline.flat_reader import FlatRanges
from ...runtime.buffers import memory_for
from ...runtime.engine import offload, run
from ...runtime.executor import Pipeline, Stage
from ...runtime.progress import ProgressCallback, ProgressReporter
from ...runtime.scheduler import Budget
from ..location import UriLike
from .reader import Checkpoint, manifest_of, read_into
from .reader import open as open_checkpoint

if TYPE_CHECKING:
    from ...state.gaps import Gap


BUDGET_NBYTES = 512 << 20
_WINDOWS = 2
"""One is compared while the next is read."""
_WINDOW_NBYTES_MAX = 64 << 20
_PAGE_NBYTES = 4096

Bytes = npt.NDArray[np.uint8]


What = Literal["only in a", "only in b", "shape", "dtype", "values"]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs. ``rank`` is set if the tensor belongs to that rank only.

    ``what`` is "only in a", "only in b", "shape" (the dtype may differ too), "dtype" or "values".
    For values, ``differing`` counts elements with different bits, and ``max_abs`` is their largest
    absolute difference: NaN if only one of two elements is NaN, None if the dtype has no such
    difference.
    """

    name: str
    rank: int | None
    what: What
    a: TensorKind | None
    b: TensorKind | None
    differing: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A small value or container type that differs; each side encoded, None if absent."""

    path: str
    a: ByRank | None
    b: ByRank | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensors of equal name, shape and dtype, by their rows in both manifests; no aliases."""

    name: str
    rank: int | None
    a: int
    b: int


@dataclass(slots=True)
class Comparison:
    """Result of comparing manifests. ``equal`` counts tensors with equal digests; the values of
    those in ``unknown`` must be read."""

    differences: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    unknown: list[Pair] = field(default_factory=list)
    equal: int = 0


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Differences between the checkpoints ``a`` and ``b``, both redacted.

    ``equal_tensors`` are equal bit for bit, ``equal_by_digest`` of them without being read;
    ``read_nbytes`` of tensors were read on each side.
    """

    a: str
    b: str
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    equal_tensors: int
    equal_by_digest: int
    read_nbytes: int
    seconds: float

    @property
    def equal(self) -> bool:
        """True if both hold the same state, bit for bit."""
        return not self.tensors and not self.values


def diff(
    a: UriLike,
    b: UriLike,
    *,
    budget_nbytes: int = BUDGET_NBYTES,
    a_options: Mapping[str, object] | None = None,
    b_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """Compare the checkpoints ``a`` and ``b``: names, shapes, dtypes and values of tensors, and
    small values.

    Differences of layout, step, time and number of ranks are ignored. Tensors stored in the same
    boxes, in chunks with equal digests, are equal and not read. All others are read and verified on
    both sides, within ``budget_nbytes`` of host memory. ``a_options`` and ``b_options`` are storage
    options. ``progress(done_nbytes, total_nbytes)`` is called periodically on a separate thread,
    counting the tensor bytes to compare.

    Raises NotACheckpointError, DamagedError, UnsupportedFormatError, ReplacedError and
    StorageError.
    """
    began_s = time.perf_counter()
    with (
        open_checkpoint(a, storage_options=a_options) as ours,
        open_checkpoint(b, storage_options=b_options) as theirs,
        ProgressReporter(progress) as reporter,
    ):
        found = compare_manifests(manifest_of(ours), manifest_of(theirs))
        comparer = _Comparer(ours, theirs, found.unknown, budget_nbytes, reporter)
        run(comparer.run())
        different = comparer.differences()
        return DiffReport(
            ours.uri,
            theirs.uri,
            (*found.differences, *different),
            tuple(found.values),
            found.equal + len(found.unknown) - len(different),
            found.equal,
            comparer.total_nbytes,
            time.perf_counter() - began_s,
        )


class _Comparer:
    """Reads pairs of tensors in windows and compares their values, one window at a time."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        pairs: Sequence[Pair],
        budget_nbytes: int,
        reporter: ProgressReporter,
    ) -> None:
        self._sides = (a, b)
        self._tensors = manifest_of(a).tensors
        # Descending itemsize, so that no window cuts an element.
        self._pairs = sorted(pairs, key=lambda pair: -int(self._tensors.itemsize[pair.a]))
        self._sizes = [int(self._tensors.nbytes[pair.a]) for pair in self._pairs]
        self._budget_nbytes = budget_nbytes
        self._reporter = reporter
        self._gaps: dict[int, Gap] = {}
        self._read: dict[Window, tuple[Bytes, Bytes]] = {}
        self._done_nbytes = 0
        self.total_nbytes = sum(self._sizes)

    async def run(self) -> None:
        # Half of the budget is for the windows of both sides, the rest for the readers.
        share_nbytes = self._budget_nbytes // (4 * _WINDOWS) // _PAGE_NBYTES * _PAGE_NBYTES
        window_nbytes = max(_PAGE_NBYTES, min(share_nbytes, _WINDOW_NBYTES_MAX))
        cut = list(windows(self._sizes, window_nbytes))
        pipeline = Pipeline(
            [Stage("read", "io", self._read_both), Stage("compare", "cpu", self._compare)],
            Budget(_WINDOWS, {"io": 1, "cpu": 1}),
            release=self._release,
        )
        await pipeline.run(cut, [1] * len(cut))

    async def _read_both(self, window: Window) -> None:
        a, b = self._sides
        with memory_for(f"2 × {window.nbytes:,} bytes of tensors"):
            into = (np.empty(window.nbytes, np.uint8), np.empty(window.nbytes, np.uint8))
        self._read[window] = into
        budget_nbytes = self._budget_nbytes // 4
        await side_by_side(
            read_into(
                a, self._ranges(window, [pair.a for pair in self._pairs], into[0]), budget_nbytes
            ),
            read_into(
                b, self._ranges(window, [pair.b for pair in self._pairs], into[1]), budget_nbytes
            ),
        )

    def _release(self, window: Window) -> None:
        self._read.pop(window, None)

    def _ranges(self, window: Window, rows: Sequence[int], into: Bytes) -> list[FlatRanges]:
        slices = window.slices
        wanted = [(rows[part.item], part.start, part.stop, part.at) for part in slices]
        return [FlatRanges.of(wanted, into)]

    async def _compare(self, window: Window) -> None:
        await offload(self._compare_now, window)
        self._done_nbytes += window.nbytes
        self._reporter.report(self._done_nbytes, self.total_nbytes)

    def _compare_now(self, window: Window) -> None:
        a, b = self._read[window]
        if np.array_equal(a, b):
            return
        from ...state.gaps import Gap, gap_between

        for part in window.slices:
            row = self._pairs[part.item].a
            dtype, itemsize = self._tensors.dtypes[self._tensors.dtype[row]]
            where = slice(part.at, part.at + part.nbytes)
            gap = gap_between(a[where], b[where], dtype, itemsize)
            self._gaps[part.item] = self._gaps.get(part.item, Gap()) + gap

    def differences(self) -> list[TensorDifference]:
        found = []
        for item, gap in sorted(self._gaps.items()):
            if gap.differing:
                pair = self._pairs[item]
                kind = kind_of(self._tensors, pair.a)
                found.append(
                    TensorDifference(
                        pair.name, pair.rank, "values", kind, kind, gap.differing, gap.max_abs
                    )
                )
        return found


def compare_manifests(a: Manifest, b: Manifest) -> Comparison:
    """Compare two checkpoints by their manifests alone."""
    found = Comparison(values=list(_value_differences(a, b)))
    ours = _Side(a)
    theirs = _Side(b)
    for name in dict.fromkeys([*a.tensors.rows, *b.tensors.rows]):
        for rank, row_a, row_b in _pairs(ours.rows_by_owner(name), theirs.rows_by_owner(name)):
            kind_a = ours.kind(row_a)
            kind_b = theirs.kind(row_b)
            what = _difference_of(kind_a, kind_b)
            if what is not None:
                found.differences.append(TensorDifference(name, rank, what, kind_a, kind_b))
                continue
            assert row_a is not None
            assert row_b is not None
            pair = Pair(name, rank, ours.stored(row_a), theirs.stored(row_b))
            if _have_equal_digests(ours, pair.a, theirs, pair.b):
                found.equal += 1
            else:
                found.unknown.append(pair)
    return found


def kind_of(tensors: TensorTable, row: int) -> TensorKind:
    """Return the dtype and shape of a row."""
    return TensorKind(tensors.dtypes[tensors.dtype[row]][0], tensors.shape_of(row))


def _difference_of(a: TensorKind | None, b: TensorKind | None) -> What | None:
    if a is None:
        return "only in b"
    if b is None:
        return "only in a"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    return None


def _pairs(
    a: dict[int, int], b: dict[int, int]
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Yield (rank, row in a, row in b) of one name; the whole job (-1) matches each rank."""
    owners = sorted(a.keys() | b.keys())
    if owners[-1] >= 0 and a and b:
        owners = [owner for owner in owners if owner >= 0]
    for owner in owners:
        rank = None if owner < 0 else owner
        yield rank, a.get(owner, a.get(-1)), b.get(owner, b.get(-1))


class _Side:
    """One manifest with per-tensor lookups."""

    def __init__(self, manifest: Manifest) -> None:
        self.m = manifest
        self._owner: list[int] = manifest.tensors.owner.tolist()
        self._alias: list[int] = manifest.tensors.alias.tolist()

    def rows_by_owner(self, name: str) -> dict[int, int]:
        """Return the rows of a name by owning rank; -1 for the whole job."""
        return {self._owner[row]: row for row in self.m.tensors.rows.get(name, ())}

    def kind(self, row: int | None) -> TensorKind | None:
        return None if row is None else kind_of(self.m.tensors, row)

    def stored(self, row: int) -> int:
        return row if self._alias[row] < 0 else self._alias[row]

    @cached_property
    def _pointers(self) -> Ints:
        return self.m.shards.pointers(len(self.m.tensors))

    @cached_property
    def _nbytes(self) -> Ints:
        return self.m.shards.nbytes(self.m.tensors)

    def shards(self, row: int) -> Ints:
        first, last = self._pointers[row : row + 2].tolist()
        rows = np.arange(first, last)
        if len(rows) > 1:
            rows = rows[np.lexsort(self.m.shards.offsets[rows].T[::-1])]
        return rows

    def place(self, shard: int) -> tuple[int, bytes]:
        """Return a shard's offset in its first chunk, and the digests of its chunks."""
        m = self.m
        start = int(m.shards.start[shard])
        stop = start + int(self._nbytes[shard])
        image = int(m.shards.image[shard])
        base = int(m.first_chunk[image])
        first, within = divmod(start, m.chunk_nbytes)
        last = (stop - 1) // m.chunk_nbytes + 1
        return within, m.images.digests[base + first : base + last].tobytes()


def _have_equal_digests(a: _Side, row_a: int, b: _Side, row_b: int) -> bool:
    """Return whether digests of equal boxes at equal offsets prove two tensors equal."""
    if (a.m.chunk_nbytes, a.m.block_nbytes) != (b.m.chunk_nbytes, b.m.block_nbytes):
        return False
    ours = a.shards(row_a)
    theirs = b.shards(row_b)
    if len(ours) != len(theirs):
        return False
    n = int(a.m.tensors.ndim[row_a])
    for columns_a, columns_b in (
        (a.m.shards.offsets, b.m.shards.offsets),
        (a.m.shards.lengths, b.m.shards.lengths),
    ):
        if not np.array_equal(columns_a[ours, :n], columns_b[theirs, :n]):
            return False
    pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
    return all(a.place(x) == b.place(y) for x, y in pairs)


def _value_differences(a: Manifest, b: Manifest) -> Iterator[ValueDifference]:
    ours = _values(a)
    theirs = _values(b)
    for path in dict.fromkeys([*ours, *theirs]):
        value_a = ours.get(path)
        value_b = theirs.get(path)
        if value_a is None or value_b is None or _by_rank(value_a) != _by_rank(value_b):
            yield ValueDifference(path, value_a, value_b)


def _by_rank(value: ByRank) -> object:
    """Return a key that is equal for equal values, and for one shared in a job of another size."""
    # The text distinguishes 1, 1.0 and True.
    texts = [(ranks, json.dumps(encoded, sort_keys=True)) for ranks, encoded in value]
    return texts[0][1] if len(texts) == 1 else texts


def _values(m: Manifest) -> dict[str, ByRank]:
    """Return small values by path, and types of containers that are empty or not plain dicts."""
    tree = m.tree
    paths = tree.paths()
    found: dict[str, ByRank] = {}
    used = {c.parent for c in tree.containers} | set(m.container.tolist())
    used |= {value.container for value in tree.values}
    for number, c in enumerate(tree.containers):
        kind = tree.kinds.get(number, c.kind)
        if kind != "dict" or number not in used:
            found[f"type({format_path(paths[number])})"] = [([], kind)]
    for value in tree.values:
        found[format_path((*paths[value.container], value.key))] = value.by_rank
    return found
