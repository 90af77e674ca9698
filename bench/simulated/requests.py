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
from ...errors import UsageError
from ...planner.image import CHUNK_NBYTES

__all__ = ["Prices", "Requests", "UploadShape", "parse_prices", "upload_shape"]


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


@dataclass(frozen=True)
class Requests:
    """``puts`` write, begin and end uploads; ``gets`` read, or ask for a size."""

    puts: int
    gets: int

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.puts + other.puts, self.gets + other.gets)

    def times(self, count: int) -> Requests:
        """So many times as many."""
        return Requests(self.puts * count, self.gets * count)


@dataclass(frozen=True)
class Prices:
    """Of one request, in USD."""

    put_usd: float
    get_usd: float

    def cost_usd(self, requests: Requests) -> float:
        """Of all of them."""
        return requests.puts * self.put_usd + requests.gets * self.get_usd


def parse_prices(text: str) -> Prices:
    """``put=5e-6,get=4e-7``: USD per request; what is not given is free. Raises UsageError."""
    found = dict.fromkeys(("put", "get"), 0.0)
    for item in text.split(","):
        name, is_there, value = item.partition("=")
        name = name.strip()
        usd = _usd(value)
        if not is_there or name not in found or usd is None:
            raise UsageError(
                f"--prices {text!r}: {item!r} is no price of a request",
                advice="Give USD per request, such as put=5e-6,get=4e-7.",
            )
        found[name] = usd
    return Prices(found["put"], found["get"])


def _usd(text: str) -> float | None:
    """None for what is no price of one request."""
    try:
        usd = float(text)
    except ValueError:
        return None
    if 0 <= usd < 1:
        return usd
    return None
