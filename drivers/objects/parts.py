"""Splits data written in ascending order into the parts of a multipart upload. Pure.

A part filled by a single write is a view of the caller's memory, without a copy. A part filled by
several writes is assembled in its own memory, so that no write waits for the bytes of a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.units import ceil_div
from ..contract import Buffer

__all__ = ["PARTS_MAX", "Cutter", "Part", "part_nbytes_for"]

PARTS_MAX = 10_000
"""Limit of S3 and GCS. Azure allows 50,000."""


class Part(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of one part. The sender references this very object until they are stored."""


def part_nbytes_for(nbytes: int, preferred_nbytes: int) -> int:
    """Return the size of all parts but the last: the smallest multiple of ``preferred_nbytes`` that
    needs at most :data:`PARTS_MAX` parts."""
    multiple = ceil_div(nbytes, PARTS_MAX * preferred_nbytes)
    return max(1, multiple) * preferred_nbytes


@dataclass
class Cutter:
    """Splits an object of at most ``nbytes`` into parts of ``part_nbytes``; the last may be
    shorter."""

    nbytes: int
    part_nbytes: int
    reached: int = 0
    """Number of bytes passed to :meth:`cut`."""
    _gathered: npt.NDArray[np.uint8] | None = None

    def cut(self, data: Buffer) -> Iterator[Part]:
        """Take the next bytes of the object and yield the parts they complete, in order.

        A part is a view of ``data`` or its own memory; the sender treats both alike. After the last
        of ``nbytes`` is cut, nothing remains.
        """
        taken = 0
        while taken < len(data):
            start = self.reached - self.reached % self.part_nbytes
            room = min(start + self.part_nbytes, self.nbytes) - self.reached
            piece = np.frombuffer(data[taken : taken + room], np.uint8)
            whole = self._add(piece, self.reached - start, room)
            taken += len(piece)
            self.reached += len(piece)
            if whole is not None:
                yield whole.view(Part)

    def rest(self) -> Part | None:
        """Return the unfinished last part of an object that ends here, before ``nbytes``; None if
        nothing is left over."""
        rest = self._gathered
        self._gathered = None
        if rest is None:
            return None
        return rest[: self.reached % self.part_nbytes].view(Part)

    def _add(
        self, piece: npt.NDArray[np.uint8], offset: int, room: int
    ) -> npt.NDArray[np.uint8] | None:
        """Add ``piece`` at ``offset`` of the current part and return the part if it is now
        complete."""
        full_nbytes = offset + room
        if offset == 0 and len(piece) == room == self.part_nbytes:
            return piece
        if self._gathered is None:
            self._gathered = np.empty(full_nbytes, np.uint8)
        np.copyto(self._gathered[offset : offset + len(piece)], piece)
        if len(piece) < room:
            return None
        whole = self._gathered
        self._gathered = None
        return whole
