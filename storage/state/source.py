"""An image as a source of bytes: copies any byte range of it out of the tensors on demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...core.units import round_up
from ...planner.box import Box, flat_to_boxes
from ...planner.columns import contiguous
from ...planner.image import BLOCK_NBYTES, ImageLayout
from ...planner.saving import Holdings
from ..format.digest import page_with
from ..runtime.buffers import HostBuffer
from .bits import Place, address_of, copy_memory, pack, typed
from .capture.device_snapshot import Doubt
from .capture.lazy import LazyCapture
from .capture.process_memory import GoneError, gather, gather_segments
from .capture.unwritten import Places
from .device import allocate_pinned, beside, devices_of, pack_windows

Ints = npt.NDArray[np.int64]

WINDOW_NBYTES = 1 << 20
"""Bytes that are hashed at a time without being taken. Less than is disarmed after a read, so they
can be read again (:mod:`.capture.host_snapshot`)."""
GATHERED_NBYTES_MAX = 8 << 20
"""Parts up to this size are copied together. A longer one is faster alone, bypassing the
processor's cache."""


class ImageSource:
    """The bytes [0, layout.hashed_end) of one rank's image. Keeps the tensors alive.

    ``parts`` lists the boxes of local tensors that make up the image, in the rows of
    ``layout.start``. ``allocate`` returns the memory best suited to receive the image; None if any
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
        """Prepare the copies. ``lazy`` copies tensors that may be written to meanwhile."""
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
        self._local_start: list[int] = parts.local_start[order].tolist()
        self._local_shape = parts.local_shape[order]
        is_run = contiguous(self._lengths, self._local_shape).tolist()
        self._first: list[int | None] = [
            start if run and tensor.is_contiguous() else None
            for start, run, tensor in zip(self._local_start, is_run, self._tensors, strict=True)
        ]
        """First element of each part that is one run of its tensor's memory."""
        self._capture = lazy
        self._is_lazy = [lazy is not None and row in lazy for row in self._rows]
        self._tracked_from = [self._tracked_from_of(i) for i in range(len(self._tensors))]
        self._address = [self._address_of(i) for i in range(len(self._tensors))]
        addresses = zip(self._address, self._is_lazy, strict=True)
        self._plain = np.array([0 if lazily else at or 0 for at, lazily in addresses], np.int64)
        """Addresses of the parts that need nothing but a plain copy; else 0."""
        tracked = zip(self._address, self._tracked_from, strict=True)
        places = np.array([0 if start is None else at or 0 for at, start in tracked], np.int64)
        self.places = Places(self._start, self._stop, places)
        if lazy is not None:
            lazy.unwritten.epoch.places = self.places
        is_tracked = np.array([start is not None for start in self._tracked_from], bool)
        is_gathered = (self._plain > 0) & (self._stop - self._start <= GATHERED_NBYTES_MAX)
        self._is_gathered = is_gathered | is_tracked

    def _address_of(self, i: int) -> int | None:
        first = self._first[i]
        address = address_of(self._tensors[i])
        if address is None or first is None:
            return None
        return address + first * self._itemsize[i]

    def _tracked_from_of(self, i: int) -> int | None:
        """Return the part's first byte in its tensor, if the part is one run of tracked memory."""
        first = self._first[i]
        if self._capture is None or first is None or not self._is_lazy[i]:
            return None
        if not self._capture.host.has_segments(self._rows[i]):
            return None
        return first * self._itemsize[i]

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

    def proven(self) -> list[tuple[int, int]]:
        """Return whole blocks of the image that are those of the save before, as ranges of
        bytes."""
        if self._capture is None:
            return []
        whole = [
            (round_up(begin, BLOCK_NBYTES), end // BLOCK_NBYTES * BLOCK_NBYTES)
            for begin, end in self._capture.unwritten.proven(self.places)
        ]
        return [(begin, end) for begin, end in whole if begin < end]

    def page(
        self, page: bytes, start: int, ranges: Sequence[tuple[int, int]], spare: HostBuffer
    ) -> bytes:
        """Return ``page`` of the chunk at ``start`` with the present digests of the blocks in
        these ranges. Copies them to ``spare``; they can be copied again. Raises as
        :meth:`copy`."""
        for first, stop in ranges:
            for begin in range(first, stop, WINDOW_NBYTES):
                end = min(begin + WINDOW_NBYTES, stop)
                window = spare.part(begin - start, end - start)
                self.copy(begin, end, window)
        inner = [(first - start, stop - start) for first, stop in ranges]
        return page_with(page, inner, spare.view, BLOCK_NBYTES)

    def _copy_parts(
        self, first: int, last: int, start: int, stop: int, into: HostBuffer
    ) -> list[Doubt]:
        """Copy the parts and return the doubts to be settled before the copy is valid."""
        doubts: list[Doubt] = []
        base = into.address - start
        left = self._gather_runs(first, last, start, stop, base)
        starts = self._start[left].tolist()
        stops = self._stop[left].tolist()
        for i, part_start, part_stop in zip(left.tolist(), starts, stops, strict=True):
            address = self._address[i]
            low = max(part_start, start)
            high = min(part_stop, stop)
            begin = low - part_start
            end = high - part_start
            if address is not None and not self._is_lazy[i]:
                copy_memory(base + low, address + begin, end - begin)
            else:
                to = torch.frombuffer(into.view, dtype=torch.uint8)[low - start : high - start]
                if self._is_lazy[i]:
                    doubt = self._copy_lazily(i, begin, end, to)
                    doubts += [] if doubt is None else [doubt]
                else:
                    self._copy_now(i, begin, end, to)
        return doubts

    def _gather_runs(self, first: int, last: int, start: int, stop: int, base: int) -> Ints:
        """Copy runs of parts together, and return the parts that are left.

        Each run takes one call that does not hold the GIL. Copying each part alone would have to
        retake the GIL every time. Next to a trainer in Python, that takes longer than the copies
        and delays the trainer, too.
        """
        parts = slice(first, last)
        is_done = self._is_gathered[parts] & (self._start[parts] >= start)
        is_done &= self._stop[parts] <= stop
        ends = np.flatnonzero(np.diff(is_done, prepend=False, append=False))
        for begin, end in ends.reshape(-1, 2).tolist():
            run = slice(first + begin, first + end)
            is_done[begin:end] = self._gather(run, base) if end - begin > 1 else False
        return first + np.flatnonzero(~is_done)

    def _gather(self, run: slice, base: int) -> bool:
        """Copy parts that are adjacent in the image; return whether that was possible.

        The system may refuse it, possibly for some kinds of memory only.
        """
        begins = self._start[run]
        sizes = self._stop[run] - begins
        to = base + int(begins[0])
        tracked: list[tuple[int, int, int]] = []
        try:
            if self._capture is None:
                gather(self._plain[run], sizes, to)
            else:
                segments = self._segments(self._capture, run, sizes.tolist(), tracked)
                gather_segments(segments, to)
        except (GoneError, OSError):
            return False
        if self._capture is not None:
            self._capture.check(tracked)
        return True

    def _segments(
        self,
        capture: LazyCapture,
        run: slice,
        sizes: Sequence[int],
        tracked: list[tuple[int, int, int]],
    ) -> list[tuple[int, int]]:
        """Return where to read the parts in ``run``, and add those to be checked to ``tracked``."""
        plain = self._plain[run].tolist()
        segments: list[tuple[int, int]] = []
        for i, address, nbytes in zip(range(run.start, run.stop), plain, sizes, strict=True):
            start = self._tracked_from[i]
            if start is None:
                segments.append((address, nbytes))
            else:
                part = (self._rows[i], start, start + nbytes)
                tracked.append(part)
                segments += capture.host.segments(*part)
        return segments

    def _copy_now(self, i: int, begin: int, end: int, to: torch.Tensor) -> None:
        """Copy bytes [begin, end) of part ``i`` in row-major order.

        Image layouts and chunks cut between elements only.
        """
        itemsize = self._itemsize[i]
        first = self._first[i]
        tensor = self._tensors[i]
        if first is not None:
            run = tensor.view(-1)[first + begin // itemsize : first + end // itemsize]
            windows = [run]
        else:
            place = self._place(i)
            boxes = self._boxes(i, begin, end)
            windows = [place.window(tensor, box.offsets, box.lengths) for box in boxes]
        pack_windows(windows, to)

    def _copy_lazily(self, i: int, begin: int, end: int, to: torch.Tensor) -> Doubt | None:
        """Copy like :meth:`_copy_now`, from a contiguous tensor that may be written to
        meanwhile."""
        assert self._capture is not None
        itemsize = self._itemsize[i]
        first = self._first[i]
        row = self._rows[i]
        if first is not None:
            offset = first * itemsize
            return self._capture.copy(row, offset + begin, offset + end, to)
        boxes = self._boxes(i, begin, end)
        place = self._place(i)
        begins = [place.element(box.offsets) for box in boxes]
        ends = [place.element([stop - 1 for stop in box.stops]) + 1 for box in boxes]
        start = min(begins)
        stop = max(ends)
        data, doubt = self._capture.staged(row, start * itemsize, stop * itemsize)
        elements = typed(data, itemsize, (stop - start,))
        staged = Place(place.start - start, place.within)
        pack((staged.window(elements, box.offsets, box.lengths) for box in boxes), to)
        return doubt

    def _boxes(self, i: int, begin: int, end: int) -> list[Box]:
        itemsize = self._itemsize[i]
        lengths = self._lengths[i, : self._ndim[i]].tolist()
        return flat_to_boxes(lengths, begin // itemsize, end // itemsize)

    def _place(self, i: int) -> Place:
        return Place(self._local_start[i], tuple(self._local_shape[i, : self._ndim[i]].tolist()))
