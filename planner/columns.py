"""Arithmetic on columns of boxes: (n, D) arrays of offsets and lengths.

Rows are padded on the right with offset 0, length 1. This is the vectorized counterpart of ``box``:
every function loops over the few dimensions and never over the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..core.units import ceil_div, round_up

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def volumes(lengths: Ints) -> Ints:
    """Return the number of elements of each box: (n, D) -> (n,). A zero-dimensional box has one."""
    result = np.ones(len(lengths), dtype=np.int64)
    for dim in range(lengths.shape[1]):
        result *= lengths[:, dim]
    return result


def strides(lengths: Ints) -> Ints:
    """Return the row-major strides, in elements, of arrays with these lengths: (n, D) -> (n, D)."""
    result = np.ones(lengths.shape, dtype=np.int64)
    for dim in range(lengths.shape[1] - 1, 0, -1):
        np.multiply(result[:, dim], lengths[:, dim], out=result[:, dim - 1])
    return result


def flat_starts(offsets: Ints, within: Ints) -> Ints:
    """Return the row-major positions of ``offsets`` in arrays of lengths ``within``.

    Shapes: (n, D), (n, D) -> (n,).
    """
    result = np.zeros(len(offsets), dtype=np.int64)
    for dim in range(offsets.shape[1]):
        # Horner's scheme needs no array of strides.
        result *= within[:, dim]
        result += offsets[:, dim]
    return result


def contiguous(lengths: Ints, within: Ints) -> Bools:
    """Return whether a box of ``lengths`` is one run in an array of lengths ``within``: -> (n,)."""
    result = np.ones(len(lengths), dtype=np.bool_)
    full = np.ones(len(lengths), dtype=np.bool_)
    for dim in range(lengths.shape[1] - 1, -1, -1):
        result &= full | (lengths[:, dim] == 1)
        full &= lengths[:, dim] == within[:, dim]
    return result


def ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the values of all ``range(starts[i], starts[i] + counts[i])``, concatenated.

    The first result is the row i of each value, the second the values.
    """
    row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    return row, np.arange(len(row), dtype=np.int64) + (starts - before)[row]


def flat_boxes(shape: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Split elements [start, stop) of each row's array, in row-major order, into disjoint boxes.

    Shapes: (n, D), (n,), (n,) -> per box its row, its offsets, its lengths, and its first element
    in row-major order. Ascending by row and element; D is at least 1.

    A row has at most 2 * D - 1 boxes: from the innermost dimension on, up to the next whole slab;
    then whole slabs while they fit, from the outermost dimension on. ByteCheckpoint (Wan et al.,
    NSDI 2025) decomposes its irregular tensors in the same way. :func:`.box.flat_to_boxes` does so
    for one range.
    """
    step = strides(shape)
    slab = step * shape
    ndim = shape.shape[1]
    at = start
    found = []
    for dim in range(ndim - 1, 0, -1):
        up = round_up(at, np.maximum(slab[:, dim], 1))
        found.append((dim, at, np.where(up <= stop, up, at)))
        at = found[-1][2]
    for dim in range(ndim):
        whole = np.maximum(step[:, dim], 1)
        found.append((dim, at, np.maximum(stop // whole * whole, at)))
        at = found[-1][2]
    parts = [_slabs(shape, step, dim, first, end) for dim, first, end in found]
    row, offsets, lengths, first = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((first, row))
    return row[order], offsets[order], lengths[order], first[order]


def _slabs(
    shape: Ints, step: Ints, dim: int, first: Ints, end: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the non-empty boxes of whole indices of ``dim`` from element ``first`` to ``end``."""
    row = np.flatnonzero(end > first)
    first = first[row]
    offsets = first[:, None] // step[row] % shape[row]
    lengths = shape[row]
    lengths[:, :dim] = 1
    lengths[:, dim] = (end[row] - first) // step[row, dim]
    return row, offsets, lengths, first


def widen(columns: Ints, ndim: int, fill: int) -> Ints:
    """Return ``columns`` (n, D) padded on the right with ``fill`` to (n, ndim).

    Unchanged if D is ndim already. Raises ValueError if D is larger.
    """
    missing = ndim - columns.shape[1]
    if missing < 0:
        raise ValueError(f"columns have {columns.shape[1]} dimensions, more than {ndim}")
    if missing == 0:
        return columns
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill)


def padded(rows: Sequence[Sequence[int]], ndim: int, fill: int) -> Ints:
    """Return rows of integers padded on the right with ``fill``: -> (n, ndim).

    Raises ValueError if a row is longer than ``ndim``.
    """
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    result = np.full((len(rows), ndim), fill, dtype=np.int64)
    if counts.max(initial=0) > ndim:
        raise ValueError(f"a row of {counts.max()} integers is longer than {ndim}")
    values = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(counts.sum()))
    result[np.arange(ndim) < counts[:, None]] = values
    return result


def union(start: Ints, stop: Ints, gap_nbytes: int) -> tuple[Ints, Ints]:
    """Return the union of intervals, ascending, joining those at most ``gap_nbytes`` apart.

    With -1, intervals that only touch stay separate.
    """
    if not len(start):
        return start, stop
    order = np.argsort(start, kind="stable")
    start = start[order]
    reach = np.maximum.accumulate(stop[order])
    begins = np.append(True, start[1:] > reach[:-1] + gap_nbytes)
    return start[begins], reach[np.append(begins[1:], True)]


def cut(start: Ints, stop: Ints, chunk_nbytes: int) -> tuple[Ints, Ints]:
    """Return the intervals, cut at multiples of ``chunk_nbytes``."""
    first = start // chunk_nbytes
    interval, chunk = ranges(first, ceil_div(stop, chunk_nbytes) - first)
    return (
        np.maximum(start[interval], chunk * chunk_nbytes),
        np.minimum(stop[interval], (chunk + 1) * chunk_nbytes),
    )
