"""The limit: what a driver does alone, with as many bytes in parts of its preferred size, as many
at a time as it says are useful. No format, no checksum, no tensor."""

from __future__ import annotations

from ...core.units import round_up
from ...drivers.uri import Uri
from ..alone.transfer import ALIGN_NBYTES, Transfer

__all__ = ["Alone"]

KEY = "alone"


class Alone(Transfer):
    """Writes and reads one object of ``nbytes``, rounded up to 4096, below ``place``."""

    def __init__(self, place: Uri, nbytes: int) -> None:
        super().__init__(place, KEY, round_up(nbytes, ALIGN_NBYTES))
