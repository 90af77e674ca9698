"""Compares two checkpoints, whatever their layouts: contents and values of tensors.

Tensors in chunks with equal digests are not read. The others are read from both sides, window by
window, so memory stays bounded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ....core.aio import side_by_side
from ....planner.windows import Window, windows
from ...pipeline.flat_reader import FlatRanges
from ...runtime.buffers import memory_for
from ...runtime.engine import offload, run
from ...runtime.executor import Pipeline, Stage
from ...runtime.progress import ProgressCallback, ProgressReporter
from ...runtime.scheduler import Budget
from .comparison import Pair, TensorDifference, ValueDifference, compare_manifests, kind_of
from .reader import Checkpoint, manifest_of, read_into
from .reader import open as open_checkpoint

if TYPE_CHECKING:
    from ...state.gaps import Gap


BUDGET_NBYTES = 512 << 20
_WINDOWS = 2
"""One is compared while the next is read."""
_WINDOW_NBYTES_MAX = 64 << 20
_PAGE_NBYTES = 4096

UriLike = str | os.PathLike[str]
Bytes = npt.NDArray[np.uint8]


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
