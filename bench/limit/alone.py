"""What our driver does without the engine: as many bytes in parts of its preferred size, as many at
a time as it says are useful. No format, no checksum, no tensor.

Beside the limit it says whether the driver or the engine costs; where no other client speaks to a
storage, it is the limit.
"""

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
        self._scheme = place.scheme
        self.prepare()

    @property
    def name(self) -> str:
        """Says that it is ours."""
        return f"our driver of {self._scheme}:// alone"
