"""Cutting what is written, in ascending order, into the parts of a multipart upload. Pure.

A part that one write fills whole is a view of the caller's memory: nothing is copied. A part that
several writes fill is put together in memory of its own, so that no write ever waits for bytes that
a later one brings.
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
"""What S3 and GCS take; Azure takes 50,000."""


class Part(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of one part. The sender keeps a reference to this very object until they are
    stored."""


def part_nbytes_for(nbytes: int, preferred_nbytes: int) -> int:
    """The size of all parts but the last of an object: a multiple of ``preferred_nbytes``, so that
    there are at most :data:`PARTS_MAX`."""
    multiple = ceil_div(nbytes, PARTS_MAX * preferred_nbytes)
    return max(1, multiple) * preferred_nbytes


@dataclass
class Cutter:
    """Cuts an object of ``nbytes``, or of fewer, into parts of ``part_nbytes``; the last may be
    shorter."""

    nbytes: int
    part_nbytes: int
    reached: int = 0
    """How far the object has been given to :meth:`cut`."""
    _gathered: npt.NDArray[np.uint8] | None = None

    def cut(self, data: Buffer) -> Iterator[Part]:
        """Take the next bytes of the object; give the parts that they complete, in order.

        A part is either a view of ``data`` or memory of its own, which makes no difference to the
        sender. Nothing is left to be given when the last byte has been cut.
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
        """What was cut and not given, of an object that ends here, before ``nbytes``: its last
        part."""
        rest = self._gathered
        self._gathered = None
        if rest is None:
            return None
        return rest[: self.reached % self.part_nbytes].view(Part)

    def _add(
        self, piece: npt.NDArray[np.uint8], offset: int, room: int
    ) -> npt.NDArray[np.uint8] | None:
        """The part that ``piece``, which belongs at ``offset`` of it, makes whole; None if it is
        still not."""
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
