"""How a storage is asked for what is saved and loaded, in requests, and what they cost.

Object stores charge for requests, and limit them. Counted are those of images and manifests; the
protocol around them takes some twenty more in a save, whatever its size. No storage
is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.units import ceil_div
from ...drivers.contract import Traits
from ...drivers.objects.driver import ObjectDriver
from ...drivers.objects.parts import part_nbytes_for
from ...drivers.registry import driver_class, serving
from ...drivers.uri import Uri
from ...planner.image import CHUNK_NBYTES

__all__ = ["UploadShape", "upload_shape"]


@dataclass(frozen=True)
class UploadShape:
    """How a driver sends one object. ``part_nbytes``: of the parts of an object store's upload; an
    object that is no larger takes one request. 0 for a storage without such requests, which is
    written to chunk by chunk."""

    part_nbytes: int = 0

    def puts(self, nbytes: int) -> int:
        """Requests that write an object of ``nbytes``: one, or those of its parts, one that begins
        the upload and one that ends it. Of a storage without parts, writes."""
        if not nbytes:
            return 0
        if not self.part_nbytes:
            return ceil_div(nbytes, CHUNK_NBYTES)
        if nbytes <= self.part_nbytes:
            return 1
        return ceil_div(nbytes, part_nbytes_for(nbytes, self.part_nbytes)) + 2

    def looks(self, nbytes: int) -> int:
        """Requests that ask an object store for the size of such an image: the leader, before it
        commits, and after an upload in parts whoever has sent it."""
        if not nbytes or not self.part_nbytes:
            return 0
        return 2 if nbytes > self.part_nbytes else 1


def upload_shape(uri: Uri, traits: Traits) -> UploadShape:
    """How the driver for ``uri``, which has these traits, sends objects."""
    cls: object = driver_class(serving(uri))
    if isinstance(cls, type) and issubclass(cls, ObjectDriver):
        return UploadShape(traits.part_nbytes)
    return UploadShape()
