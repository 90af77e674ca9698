"""Storage requests of saves and loads.

Object stores charge for requests and limit their rate. This counts requests for images and
manifests. The save protocol adds about twenty, whatever the size. No storage is touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.units import ceil_div
from ...drivers.contract import Traits
from ...drivers.objects.driver import ObjectDriver
from ...drivers.objects.uploads import part_nbytes_for
from ...drivers.registry import driver_class, serving
from ...drivers.uri import Uri
from ...planner.image import CHUNK_NBYTES

__all__ = ["UploadShape", "upload_shape"]


@dataclass(frozen=True)
class UploadShape:
    """Parameters of a driver's uploads.

    ``part_nbytes`` is the part size of an object store's uploads; smaller objects take one request.
    It is 0 for a storage without such requests, which is written chunk by chunk.
    """

    part_nbytes: int = 0

    def puts(self, nbytes: int) -> int:
        """Return the requests that write an object of ``nbytes``: one, or its parts plus the start
        and the end of the upload. For a storage without parts, return the writes."""
        if not nbytes:
            return 0
        if not self.part_nbytes:
            return ceil_div(nbytes, CHUNK_NBYTES)
        if nbytes <= self.part_nbytes:
            return 1
        return ceil_div(nbytes, part_nbytes_for(nbytes, self.part_nbytes)) + 2

    def looks(self, nbytes: int) -> int:
        """Return the requests for the size of an image in an object store: one by the leader before
        it commits, and one by the sender after a multipart upload."""
        if not nbytes or not self.part_nbytes:
            return 0
        return 2 if nbytes > self.part_nbytes else 1


def upload_shape(uri: Uri, traits: Traits) -> UploadShape:
    """Return how the driver of ``uri``, with these traits, sends objects."""
    cls: object = driver_class(serving(uri))
    if isinstance(cls, type) and issubclass(cls, ObjectDriver):
        return UploadShape(traits.part_nbytes)
    return UploadShape()
