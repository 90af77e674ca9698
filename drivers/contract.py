"""The driver contract: what every kind of storage must do for Holdfast, and nothing more.

A driver is bound to one root (a folder, a bucket and prefix) and speaks in **keys** relative to it:
parts joined by ``/``, none of them empty, ``.`` or ``..``, no NUL, not absolute (see
:func:`check_key`). Methods are coroutines; one driver is used from one event loop, and by many
tasks at once.

Durability is part of the contract: :meth:`Upload.commit` and :meth:`Driver.put` return only when
the bytes are durable as that storage defines durable. Visibility too: an object is either absent or
whole. An operation that failed leaves nothing visible.

Scope: a driver does I/O. It does not retry, limit, hash or cache contents; layers and the engine
do.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.aio import to_the_end
from ..core.units import ceil_div
from ..errors import DamagedError, StorageDownError, UriError
from .pieces import cut

__all__ = [
    "SMALL_NBYTES_MAX",
    "AtMost",
    "Buffer",
    "Driver",
    "ObjectInfo",
    "PartOrder",
    "TakePiece",
    "Traits",
    "Upload",
    "UploadLostError",
    "check_key",
    "check_small",
    "segments",
]

SMALL_NBYTES_MAX = 4 << 30
"""What :meth:`Driver.get` reads at most: the manifest of a hundred million shards. Larger ones are
no file of ours, and are not to fill the host's memory."""

Buffer = memoryview
"""One-dimensional, contiguous, of format ``B``."""


TakePiece = Callable[[Buffer], None]
"""Is given a piece of a read, which it must not keep. Called on any thread but the event loop's;
does not raise."""


PartOrder = Literal["any", "ascending", "serial"]
"""``any``: in any order, and in parallel. ``ascending``: each write begins at the offset where the
write that was started before it ends, but does not wait for it. ``serial``: in the same order, one
after the other."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a driver is good at. The scheduler and the planner depend on these, never on the
    driver's type."""

    part_nbytes: int
    """Preferred size of one write or read, in bytes."""
    part_min_nbytes: int
    """Smallest size of one write, except the last of an upload; 1 if any size will do."""
    align_nbytes: int
    """Writes whose offset, length and memory address are multiples of this avoid a copy; 1 if
    alignment makes no difference."""
    concurrency: int
    """More operations in flight than this gain nothing."""
    coalesce_nbytes: int
    """Two ranges closer than this are read faster as one."""
    part_order: PartOrder
    """In which order the parts of one upload are written: see :data:`PartOrder`."""
    exclusive_is_atomic: bool
    """Of several exclusive puts to one key exactly one succeeds, whichever hosts they come from."""
    shared: bool
    """Other hosts see the same objects."""
    hands_over: bool = False
    """Reads are zero-copy by :meth:`Driver.fetch`: it returns the memory that the driver's library
    received the data in, while :meth:`Driver.read` copies it."""
    piece_nbytes: int = 0
    """Where the pieces of :meth:`Driver.read_pieces` end: at multiples of this in the object. Each
    is verified and copied while the processor's cache holds it, which is the fastest way to read. 0
    if it is not: then a read is one piece."""
    read_nbytes: int = 0
    """How much of an object is best read at once, if that is more than a chunk: of memory that is
    there already, and handed over (``hands_over``), long runs are copied faster than short ones.
    Memory budgets do not include it. 0: a chunk at most."""
    streams: int = 1
    """An upload is fastest when this many contiguous segments of it (:func:`segments`) are written
    at the same time. ``part_order``, which then is not ``serial``, applies within each segment.
    Writing one segment after the other is correct too, but slower."""

    bounded: bool = True
    """Space may run out, so leftovers of dead processes are swept before a save writes anything. If
    False, they are swept while it writes."""

    upload_nbytes: int = 0
    """The most memory that an upload holds until it is committed, besides the data being written.
    Memory budgets include it."""

    object_max_nbytes: int | None = None
    """The largest object that the storage takes; None: as large as there is space for. A rank
    whose image would be larger fails the save before it uses the storage."""

    @property
    def read_copies(self) -> int:
        """How many copies of the data a read holds until it returns: one in the caller's buffer,
        and perhaps one in memory of the driver's library. Memory budgets include both."""
        if self.hands_over:
            return 2
        return 1


def segments(nbytes: int, traits: Traits) -> list[tuple[int, int]]:
    """Return (start, stop) of each segment of an upload of ``nbytes``: at most ``traits.streams``,
    of about equal length, cut at multiples of ``traits.part_nbytes``; only (0, 0) if ``nbytes`` is
    0. ``nbytes`` is the declared size: an upload that ends earlier fills the segments in order, and
    never begins those behind its end."""
    parts = ceil_div(nbytes, traits.part_nbytes)
    step = max(1, ceil_div(parts, traits.streams)) * traits.part_nbytes
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)] or [(0, 0)]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One visible object. ``modified_s`` is in seconds since the epoch, by the storage's clock."""

    key: str
    nbytes: int
    modified_s: float


class Upload(ABC):
    """One object being written. Invisible and harmless until :meth:`commit` has returned."""

    @abstractmethod
    async def write(self, start: int, data: Buffer) -> None:
        """Write ``data`` at byte ``start`` of the object. The caller keeps ``data`` unchanged until
        this returns.

        Every byte of the object is written exactly once, in the order that ``traits.part_order``
        asks for. The object has the declared size, or ends where :meth:`commit` says.
        Raises a :class:`StorageError`.
        """

    @abstractmethod
    async def commit(self, nbytes: int | None = None) -> None:
        """Make the object durable and visible, whole, replacing one of the same key. Called once,
        after all writes.

        ``nbytes`` is the final size, at most the declared one; None means the declared one. Raises
        a StorageError if it is larger, or unless exactly the bytes before it have been written,
        each once; then nothing becomes visible.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Drop what was written; nothing stays visible. Safe to call at any time, more than once,
        and after a failed or cancelled :meth:`commit`; after a successful one it does nothing. Does
        not raise a StorageError."""


class UploadLostError(StorageDownError):
    """An upload that cannot go on, where one that begins anew probably can: the credentials were
    renewed in its middle, say. Raised by :meth:`Upload.write` and :meth:`Upload.commit`; the engine
    begins the image again where it still has all of it."""


class AtMost(int):
    """The size of an upload that will probably end earlier: the size after compression is not known
    when the upload begins."""


class Driver(ABC):
    """Storage bound to one root. Raises :class:`holdfast.StorageError` and its kinds, each with
    URI, key and cause."""

    uri: str
    """The root, redacted, so that it can be printed; this is :attr:`Uri.root`. It has no options:
    some come from the environment and may differ between ranks, and ranks compare this value."""
    traits: Traits
    """Known once the driver is open, before any I/O, and constant from then on. A trait that
    depends on the server is set by an option with a safe default, or not claimed at all."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Trials of the conformance kit, by name, that this storage cannot pass, and why. The kit
    prints them."""
    remote: ClassVar[bool] = True
    """Whether the driver itself uses the network. If it does, temporary failures are retried and
    operations have a deadline, unless options say otherwise. If not, the operating system is in
    between, and has retried already."""

    @abstractmethod
    async def read(self, key: str, start: int, into: Buffer) -> None:
        """Fill all of ``into`` with the object's bytes from ``start``.

        Raises NotFoundError without such an object, and DamagedError where it does not hold all of
        these bytes.
        """

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """Return the object's bytes from ``start``, in memory that the driver never writes to
        again: it stays unchanged for as long as there are references to it, also after
        :meth:`close`. The caller does not write to it either.

        Raises what :meth:`read` raises. Override it if ``traits.hands_over``. The default reads
        into new memory, so callers that reuse buffers use :meth:`read`.
        """
        into = memoryview(bytearray(nbytes))
        await self.read(key, start, into)
        return into.toreadonly()

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """Pass the object's bytes from ``start`` to ``take``, in order, piece by piece as they
        arrive. Pieces end at multiples of ``traits.piece_nbytes`` in the object, and the last one
        where the range ends.

        Raises what :meth:`read` raises; ``take`` may have got the first pieces by then, but never a
        part of one. It is not running, and not called again, once this has returned or raised, also
        when cancelled. If the object is replaced meanwhile, some pieces may be of the old one and
        some of the new one. Override it if ``traits.piece_nbytes``. The default fetches the whole
        range first.
        """
        data = await self.fetch(key, start, nbytes)
        if not nbytes:
            return

        def take_all() -> None:
            for piece in cut(data, start, self.traits.piece_nbytes):
                take(piece)

        await to_the_end(asyncio.get_running_loop().run_in_executor(None, take_all))

    @abstractmethod
    async def create(self, key: str, nbytes: int) -> Upload:
        """Begin an object of ``nbytes``, or of fewer if its commit says so. Two uploads to one key
        do not interfere: the last commit wins.

        Raises FullError if the storage can tell at once that there is not enough space, unless
        ``nbytes`` is :class:`AtMost`.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes:
        """Return the whole of a small object. Raises NotFoundError, and DamagedError, before
        reading it, for an object that is not small (:func:`check_small`)."""

    @abstractmethod
    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """Store a small object: atomic, durable on return, replacing one of the same key. Raises
        FullError if the storage reports that it is full, and a StorageError for other failures.

        With ``exclusive``, raises ExistsError if the key is taken, and then changes nothing.
        """

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object. Raises NotFoundError."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield every visible object at or below ``prefix`` (a key, or ``""`` for all), in any
        order. Unfinished uploads are left out; a prefix that does not exist is empty. The cost
        grows with the number of objects below the prefix, not below the root."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove one object, durably on return. It is no error if there is none. Folders that
        become empty may stay, because they are not visible."""

    @abstractmethod
    async def delete_all(self, prefix: str) -> None:
        """Remove every object at or below ``prefix`` (not empty), and the leftovers of uploads to
        these keys: temporary files, dangling parts, empty folders. Unfinished uploads are removed,
        too, even live ones. It is no error if there is nothing. Not atomic: a call that fails
        midway may be repeated."""

    @abstractmethod
    async def sweep(self, prefix: str) -> None:
        """Remove the leftovers of dead uploads to ``prefix`` and to keys below it: temporary files,
        dangling parts, empty folders.

        Live uploads of any process on any host are not harmed; if a driver cannot distinguish them,
        it leaves everything. A driver that decides by age uses the storage's clock, not this
        host's. ``prefix`` is not empty. It is no error if there is nothing.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release handles and threads, and drop uploads that are neither committed nor aborted.
        Safe to call twice.

        Afterwards every operation raises StorageError, except :meth:`Upload.abort`, which does
        nothing.
        """


_NO_NAMES = {"", ".", ".."}


def check_key(key: str, *, uri: str | None = None) -> str:
    """Return ``key`` if it is safe to use below a root, else raise UriError. Every driver calls
    this first."""
    if "\0" in key or not _NO_NAMES.isdisjoint(key.split("/")):
        raise UriError(f"key {key!r} is not a plain relative path", uri=uri, key=key)
    return key


def check_small(nbytes: int, uri: str, key: str) -> None:
    """Raise DamagedError for an object that is too large to be got as a whole. Every driver calls
    this before it reads."""
    if nbytes > SMALL_NBYTES_MAX:
        raise DamagedError(
            f"the object has {nbytes:,} bytes; one that is read as a whole has "
            f"{SMALL_NBYTES_MAX:,} at most",
            uri=uri,
            key=key,
        )
