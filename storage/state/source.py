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
from .bits import address_of, as_bits, copy_memory, pack, typed
from .device import allocate_pinned, beside, devices_of
from .device_snapshot import Doubt
from .lazy import LazyCapture

__all__ = ["ImageSource"]

Ints = npt.NDArray[np.int64]


class ImageSource:
    """The bytes [0, layout.hashed_end) of one rank's image. Holds the tensors until it is dropped.

    ``parts`` says which boxes of which local tensors make the image, in the rows of
    ``layout.start``. ``allocate`` makes the memory that the image is best copied to; None: any
    memory will do.
    """

    def __init__(
        self,
        layout: ImageLayout,
        parts: Holdings,
        locals_: Sequence[torch.Tensor],
        ndim: Ints,
        lazy: LazyCapture | None = None,
    ) -> None:
        """``lazy`` copies tensors that may be written to meanwhile."""
        self._header = np.frombuffer(layout.header, np.uint8)
        self._data_end = layout.data_end
        order = layout.order
        numel = parts.lengths.prod(axis=1)[order]
        self._start = layout.start[order]
        self._stop = self._start + numel * parts.itemsize[order]
        self._rows: list[int] = parts.tensor[order].tolist()
        self._tensors = [locals_[row] for row in self._rows]
        self._devices = devices_of(self._tensors)
        self.allocate = allocate_pinned if self._devices else None
        self._itemsize: list[int] = parts.itemsize[order].tolist()
        self._ndim = ndim[order]
        self._lengths = parts.lengths[order]
        self._offsets = parts.local_offsets[order]
        self._first = [self._first_of(i, n) for i, n in enumerate(numel.tolist())]
        self._capture = lazy
        self._is_lazy = [lazy is not None and row in lazy for row in self._rows]
        self._tracked_from = [self._tracked_from_of(i) for i in range(len(self._tensors))]
        self._address = [self._address_of(i) for i in range(len(self._tensors))]

    def _first_of(self, i: int, numel: int) -> int | None:
        """The element with which part ``i`` begins, where it is one run of its tensor's memory."""
        tensor = self._tensors[i]
        if not tensor.is_contiguous():
            return None
        if tensor.numel() == numel:
            return 0
        run = contiguous_range(self._box(i), tensor.shape)
        if run is None:
            return None
        return run[0]

    def _address_of(self, i: int) -> int | None:
        """The address at which part ``i`` begins, where it is one run of host memory."""
        first = self._first[i]
        address = address_of(self._tensors[i])
        if address is None or first is None:
            return None
        return address + first * self._itemsize[i]

    def _tracked_from_of(self, i: int) -> int | None:
        """The byte of its tensor with which part ``i`` begins, where that is one run of tracked
        memory."""
        first = self._first[i]
        if self._capture is None or first is None or not self._is_lazy[i]:
            return None
        if not self._capture.is_tracked_only(self._rows[i]):
            return None
        return first * self._itemsize[i]

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
            padding = max(self._data_end, start)
            np.frombuffer(into.view, np.uint8)[padding - start : stop - start] = 0

    def _copy_parts(
        self, first: int, last: int, start: int, stop: int, into: HostBuffer
    ) -> list[Doubt]:
        """Returns what is to be settled before the copy is good."""
        doubts: list[Doubt] = []
        starts = self._start[first:last].tolist()
        stops = self._stop[first:last].tolist()
        base = into.address - start
        for i, part_start, part_stop in zip(range(first, last), starts, stops, strict=True):
            address = self._address[i]
            tracked_from = self._tracked_from[i]
            low = max(part_start, start)
            high = min(part_stop, stop)
            begin = low - part_start
            end = high - part_start
            if address is not None and not self._is_lazy[i]:
                copy_memory(base + low, address + begin, end - begin)
            elif tracked_from is not None:
                assert self._capture is not None
                self._capture.copy_tracked(
                    self._rows[i], tracked_from + begin, tracked_from + end, base + low
                )
            else:
                to = torch.frombuffer(into.view, dtype=torch.uint8)[low - start : high - start]
                if self._is_lazy[i]:
                    doubt = self._copy_lazily(i, begin, end, to)
                    doubts += [] if doubt is None else [doubt]
                else:
                    self._copy_now(i, begin, end, to)
        return doubts

    def _copy_now(self, i: int, begin: int, end: int, to: torch.Tensor) -> None:
        """Bytes [begin, end) of part ``i`` in row-major order. Image layouts and chunks cut between
        elements only."""
        itemsize = self._itemsize[i]
        first = self._first[i]
        tensor = self._tensors[i]
        if first is not None:
            run = tensor.view(-1)[first + begin // itemsize : first + end // itemsize]
            pack([as_bits(run)], to)
        else:
            boxes = self._boxes(i, begin, end)
            pack((as_bits(tensor[tuple(map(slice, box.offsets, box.stops))]) for box in boxes), to)

    def _copy_lazily(self, i: int, begin: int, end: int, to: torch.Tensor) -> Doubt | None:
        """The same, of a contiguous tensor that may be written to meanwhile."""
        assert self._capture is not None
        itemsize = self._itemsize[i]
        first = self._first[i]
        row = self._rows[i]
        if first is not None:
            offset = first * itemsize
            return self._capture.copy(row, offset + begin, offset + end, to)
        boxes = self._boxes(i, begin, end)
        strides = row_strides(self._tensors[i].shape)
        begins = [_dot(box.offsets, strides) for box in boxes]
        ends = [_dot([stop - 1 for stop in box.stops], strides) + 1 for box in boxes]
        start = min(begins)
        stop = max(ends)
        data, doubt = self._capture.staged(row, start * itemsize, stop * itemsize)
        elements = typed(data, itemsize, (stop - start,))
        origin = elements.storage_offset() - start
        windows = (
            elements.as_strided(box.lengths, strides, origin + at)
            for box, at in zip(boxes, begins, strict=True)
        )
        pack(windows, to)
        return doubt

    def _boxes(self, i: int, begin: int, end: int) -> list[Box]:
        """Bytes [begin, end) of part ``i``, as boxes of its local tensor."""
        part = self._box(i)
        itemsize = self._itemsize[i]
        found = flat_to_boxes(part.lengths, begin // itemsize, end // itemsize)
        return [box.shifted(part.offsets) for box in found]


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
