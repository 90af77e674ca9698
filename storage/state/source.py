"""An image as a source of bytes: any byte range of it, copied out of the tensors when asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...planner.box import Box, contiguous_range, flat_to_boxes, row_strides
from ...planner.image import ImageLayout
from ...planner.saving import Holdings
from ..runtime.buffers import HostBuffer
from .bits import address_of, as_bits, copy_memory, typed
from .device import allocate_pinned, beside, devices_of
from .device_snapshot import Doubt
from .lazy import LazyCapture

__all__ = ["ImageSource"]

Ints = npt.NDArray[np.int64]


class ImageSource:
    """The bytes [0, layout.hashed_end) of one rank's image. Holds the tensors until it is dropped.
    ``allocate`` makes the memory that it is best copied to; None: any will do.

    ``parts`` says which boxes of which local tensors make the image, in the rows of
    ``layout.start``.
    """

    def __init__(
        self,
        layout: ImageLayout,
        parts: Holdings,
        locals_: Sequence[torch.Tensor],
        ndim: Ints,
        lazy: LazyCapture | None = None,
    ) -> None:
        """``lazy`` knows how to copy tensors that may be written to meanwhile."""
        self._header = np.frombuffer(layout.header, np.uint8)
        self._data_end = layout.data_end
        order = layout.order
        numel = parts.lengths.prod(axis=1)[order]
        self._start = layout.start[order]
        self._stop = self._start + numel * parts.itemsize[order]
        self._rows = parts.tensor[order].tolist()
        self._tensors = [locals_[row] for row in self._rows]
        self._devices = devices_of(self._tensors)
        self.allocate = allocate_pinned if self._devices else None
        self._itemsize, self._ndim = parts.itemsize[order], ndim[order]
        self._lengths, self._offsets = parts.lengths[order], parts.local_offsets[order]
        self._first = [self._first_of(i, n) for i, n in enumerate(numel.tolist())]
        self._lazy = [lazy if lazy is not None and row in lazy else None for row in self._rows]
        self._capture = lazy
        self._tracked_from = [self._tracked_from_of(i) for i in range(len(self._tensors))]
        self._address = [self._address_of(i) for i in range(len(self._tensors))]

    def _first_of(self, i: int, numel: int) -> int | None:
        """The element with which part ``i`` begins, where it is one run of its tensor's memory."""
        tensor = self._tensors[i]
        if not tensor.is_contiguous():
            return None
        if tensor.numel() == numel:
            return 0
        span = contiguous_range(self._box(i), tensor.shape)
        return None if span is None else span[0]

    def _address_of(self, i: int) -> int | None:
        address, first = address_of(self._tensors[i]), self._first[i]
        return (
            None if address is None or first is None else address + first * int(self._itemsize[i])
        )

    def _tracked_from_of(self, i: int) -> int | None:
        """The byte of its tensor with which part ``i`` begins, where that is one run of host
        memory."""
        lazy, first = self._lazy[i], self._first[i]
        if lazy is None or first is None or not lazy.is_tracked_only(self._rows[i]):
            return None
        return first * int(self._itemsize[i])

    def _box(self, i: int) -> Box:
        n = int(self._ndim[i])
        return Box(tuple(self._offsets[i, :n].tolist()), tuple(self._lengths[i, :n].tolist()))

    def copy(self, start: int, stop: int, into: HostBuffer) -> None:
        """Copy bytes [start, stop) to the beginning of ``into``."""
        if start < len(self._header):
            header = self._header[start:stop]
            np.frombuffer(into.view, np.uint8)[: len(header)] = header
        first = int(self._stop.searchsorted(start, side="right"))
        last = int(self._start.searchsorted(stop, side="left"))
        with beside(self._devices):
            doubts = self._copy_parts(first, last, start, stop, into)
            if self._capture is not None:
                self._capture.settle(doubts)
        if stop > self._data_end:
            np.frombuffer(into.view, np.uint8)[
                max(self._data_end, start) - start : stop - start
            ] = 0

    def _copy_parts(
        self, first: int, last: int, start: int, stop: int, into: HostBuffer
    ) -> list[Doubt]:
        """Returns what is to be settled before the copy is good."""
        doubts: list[Doubt | None] = []
        starts, stops = self._start[first:last].tolist(), self._stop[first:last].tolist()
        base = into.address - start
        for i, a, b in zip(range(first, last), starts, stops, strict=True):
            address, lo, hi = self._address[i], max(a, start), min(b, stop)
            if self._lazy[i] is None and address is not None:
                copy_memory(base + lo, address + lo - a, hi - lo)
                continue
            if (first_byte := self._tracked_from[i]) is not None:
                assert self._capture is not None
                self._capture.copy_tracked(
                    self._rows[i], first_byte + lo - a, first_byte + hi - a, base + lo
                )
                continue
            to = torch.frombuffer(into.view, dtype=torch.uint8)[lo - start : hi - start]
            if self._lazy[i] is None:
                self._copy_strided(i, lo - a, hi - a, to)
            else:
                doubts.append(self._copy_lazily(i, lo - a, hi - a, to))
        return [doubt for doubt in doubts if doubt is not None]

    def _copy_lazily(self, i: int, lo: int, hi: int, to: torch.Tensor) -> Doubt | None:
        """Bytes [lo, hi) of part ``i``, a part of a contiguous tensor."""
        lazy, row, first, itemsize = (
            self._lazy[i],
            self._rows[i],
            self._first[i],
            int(self._itemsize[i]),
        )
        assert lazy is not None
        if first is not None:
            return lazy.copy(row, first * itemsize + lo, first * itemsize + hi, to)
        part = self._box(i)
        boxes = [
            box.shifted(part.offsets)
            for box in flat_to_boxes(part.lengths, lo // itemsize, hi // itemsize)
        ]
        strides = row_strides(self._tensors[i].shape)
        begins = [_dot(box.offsets, strides) for box in boxes]
        ends = [_dot([end - 1 for end in box.stops], strides) + 1 for box in boxes]
        start, stop = min(begins), max(ends)
        data, doubt = lazy.staged(row, start * itemsize, stop * itemsize)
        elements = typed(data, itemsize, (stop - start,))
        position = 0
        for box, begin in zip(boxes, begins, strict=True):
            nbytes = box.volume * itemsize
            window = elements.as_strided(
                box.lengths, strides, elements.storage_offset() + begin - start
            )
            typed(to[position : position + nbytes], itemsize, box.lengths).copy_(
                window, non_blocking=True
            )
            position += nbytes
        return doubt

    def _copy_strided(self, i: int, lo: int, hi: int, to: torch.Tensor) -> None:
        """Bytes [lo, hi) of part ``i`` in row-major order. Image layouts and chunks cut between
        elements only."""
        itemsize, part, position, first = int(self._itemsize[i]), self._box(i), 0, self._first[i]
        if first is not None:
            run = self._tensors[i].view(-1)[first + lo // itemsize : first + hi // itemsize]
            typed(to, itemsize, run.shape).copy_(as_bits(run), non_blocking=True)
            return
        for box in flat_to_boxes(part.lengths, lo // itemsize, hi // itemsize):
            inner = box.shifted(part.offsets)
            window = self._tensors[i][
                tuple(slice(a, b) for a, b in zip(inner.offsets, inner.stops, strict=True))
            ]
            nbytes = box.volume * itemsize
            typed(to[position : position + nbytes], itemsize, box.lengths).copy_(
                as_bits(window), non_blocking=True
            )
            position += nbytes


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
