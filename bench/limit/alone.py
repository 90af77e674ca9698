"""Our driver without the engine: no format, no checksum, no tensor.

Moves the same bytes in parts of the driver's preferred size and concurrency. Next to the limit it
shows whether the driver or the engine is slow. It is the limit itself if no other client speaks to
the storage.
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
        """Name, which says that the driver is ours."""
        return f"our driver of {self._scheme}:// alone"
