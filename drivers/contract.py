"""The driver contract: everything Holdfast requires of a storage backend.

A driver is bound to one root (a folder, or a bucket and prefix) and addresses objects by **keys**
relative to it: non-empty parts joined by ``/``; never absolute, no ``.`` or ``..``, no NUL (see
:func:`check_key`). Methods are coroutines. One driver is used from one event loop, by many tasks at
once.

:meth:`Upload.commit` and :meth:`Driver.put` return only when the bytes are durable, as that storage
defines durable. An object is either absent or whole, and a failed operation leaves nothing visible.

Scope: a driver does I/O. Retries, limits, checksums and caching belong to the layers and the
engine.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NoReturn

from ..core.aio import to_the_end
from ..core.units import ceil_div
from ..errors import DamagedError, StorageDownError, StorageError, UriError
from .pieces import cut
from .watching import news, poll

__all__ = [
    "SMALL_NBYTES_MAX",
    "AtMost",
    "Buffer",
    "CopyTraits",
    "Driver",
    "ObjectInfo",
    "PartOrder",
    "ReadOnly",
    "TakePiece",
    "Traits",
    "Upload",
    "UploadLostError",
    "check_key",
    "check_name",
    "check_small",
    "segments",
]

SMALL_NBYTES_MAX = 4 << 30
"""Maximum size that :meth:`Driver.get` reads: the manifest of a hundred million shards. A larger
object is not ours, and must not fill the host's memory."""

Buffer = memoryview
"""One-dimensional, contiguous, format ``B``."""


TakePiece = Callable[[Buffer], None]
"""Callback that receives one piece of a read and must not keep a reference to it. Called on any
thread except the event loop's. Must not raise."""


PartOrder = Literal["any", "ascending", "serial"]
"""Order of the writes to one upload.

``any``: any order, in parallel. ``ascending``: each write starts at the offset where the previously
started write ends, but need not wait for it. ``serial``: ascending, one after the other.
"""


@dataclass(frozen=True, slots=True)
class CopyTraits:
    """How a storage copies ranges of its objects into uploads (:meth:`Upload.copy`)."""

    min_nbytes: int = 1
    """Minimum size of a copy, and of the last write before a copy, in bytes. The copy that ends the
    object may be smaller."""
    align_nbytes: int = 1
    """Copies begin and end at multiples of this, in both objects."""
    object_max_nbytes: int | None = None
    """Largest object with copies; None if as large as any."""
    shares: bool = False
    """Copies share the space of their source until either is deleted or replaced."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities and preferences of a driver. The scheduler and the planner rely on these, never
    on the driver's type."""

    part_nbytes: int
    """Preferred size of one write or read, in bytes."""
    part_min_nbytes: int
    """Minimum size of a write, except for the last one of an upload; 1 if there is none."""
    align_nbytes: int
    """Writes whose offset, length and memory address are multiples of this avoid a copy; 1 if
    alignment makes no difference."""
    concurrency: int
    """Number of operations in flight beyond which throughput no longer grows."""
    coalesce_nbytes: int
    """Largest gap, in bytes, that is cheaper to read through than to skip."""
    part_order: PartOrder
    """Required order of the writes to one upload; see :data:`PartOrder`."""
    exclusive_is_atomic: bool
    """Exactly one of several concurrent exclusive puts to a key succeeds, even across hosts."""
    shared: bool
    """Other hosts see the same objects."""
    hands_over: bool = False
    """:meth:`Driver.fetch` is zero-copy: it returns the memory into which the driver's library
    received the data. :meth:`Driver.read` copies it."""
    piece_nbytes: int = 0
    """Piece size of :meth:`Driver.read_pieces`: pieces end at multiples of this offset in the
    object. Each piece is verified and copied while it is in the CPU cache, which is the fastest way
    to read. 0 if the driver reads each range as a single piece."""
    streams: int = 1
    """Number of contiguous segments of an upload (:func:`segments`) to write concurrently for best
    throughput. If above 1, ``part_order`` is not ``serial`` and applies within each segment.
    Writing the segments one after the other is correct but slower."""

    bounded: bool = True
    """Space may run out, so leftovers of dead processes are swept before a save writes anything. If
    False, they are swept during the save."""

    upload_nbytes: int = 0
    """Maximum memory an upload holds until it is committed, besides the data being written. Counted
    in memory budgets."""

    object_max_nbytes: int | None = None
    """Largest object the storage accepts; None if limited only by free space. A rank whose image
    would be larger fails the save before it touches the storage."""

    copies: CopyTraits | None = None
    """How uploads copy from objects of the same storage; None if they cannot."""

    links: bool = False
    """An object can get further keys (:meth:`Driver.link`)."""

    in_process: bool = False
    """Only this process sees the objects; so no other process can write them for it."""

    @property
    def read_copies(self) -> int:
        """Number of copies of the data that a read holds until it returns: the caller's buffer,
        plus the library's memory if it hands that over. Memory budgets count both."""
        if self.hands_over:
            return 2
        return 1


def segments(nbytes: int, traits: Traits) -> list[tuple[int, int]]:
    """Return the (start, stop) of each segment of an upload of ``nbytes``.

    There are at most ``traits.streams`` segments, about equally long and cut at multiples of
    ``traits.part_nbytes``; a single (0, 0) if ``nbytes`` is 0. ``nbytes`` is the declared size: an
    upload that ends earlier fills the segments in order and never starts those past its end.
    """
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
    """An object being written. Invisible and harmless until :meth:`commit` returns."""

    @abstractmethod
    async def write(self, start: int, data: Buffer) -> None:
        """Write ``data`` at byte ``start`` of the object. The caller leaves ``data`` unchanged
        until this returns.

        Every byte of the object is written exactly once, in the order required by
        ``traits.part_order``. The object ends at its declared size, or where :meth:`commit` says.
        Raises StorageError.
        """

    async def copy(self, start: int, source: Driver, key: str, key_start: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes of the object ``key`` of ``source``, from byte ``key_start``, to
        byte ``start`` of this object, within the storage.

        Counts as a write of these bytes, in the same order; see :class:`CopyTraits` for its limits.
        Only for uploads made by :meth:`Driver.compose` of a driver whose
        :meth:`Driver.copies_from` accepts ``source``. The object copied from does not change:
        Holdfast writes each once. Raises NotFoundError if there is no such object, DamagedError if
        it does not contain all these bytes, and another StorageError; the same bytes may then be
        written instead, in one write, even if later ones have been written meanwhile. Once this
        returns, the object copied from may be deleted.
        """
        raise NotImplementedError

    @abstractmethod
    async def commit(self, nbytes: int | None = None) -> None:
        """Make the whole object durable and visible, replacing any object with the same key. Called
        once, after all writes.

        ``nbytes`` is the final size, at most the declared size, which is the default. Raises
        StorageError, and leaves nothing visible, if ``nbytes`` is larger or if the bytes written
        are not exactly those below it, each once.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Drop everything written; nothing stays visible. Safe to call at any time, more than once,
        and after a failed or cancelled :meth:`commit`. Does nothing after a successful one. Never
        raises StorageError."""


class UploadLostError(StorageDownError):
    """An upload that cannot continue, although a new one probably would succeed: for example, the
    credentials were renewed midway. Raised by :meth:`Upload.write` and :meth:`Upload.commit`. The
    engine restarts the image if it still has all of it."""


class AtMost(int):
    """Size of an upload that will probably end earlier, because its compressed size is not known in
    advance."""


class Driver(ABC):
    """Storage bound to one root. Raises :class:`holdfast.StorageError` or a subclass, each with
    URI, key and cause."""

    uri: str
    """Redacted root, safe to print (:attr:`Uri.root`). Leaves out the options: ranks compare this
    value, and some options come from the environment and may differ between ranks."""
    traits: Traits
    """Capabilities, constant from the moment the driver is open and known before any I/O. A trait
    that depends on the server is set by an option with a safe default, or not claimed."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Conformance trials that this storage cannot pass, by name, each with the reason. The kit
    prints them."""
    remote: ClassVar[bool] = True
    """True if the driver itself uses the network. Then, by default, temporary failures are retried
    and operations have a deadline. Otherwise the operating system has already retried."""

    @abstractmethod
    async def read(self, key: str, start: int, into: Buffer) -> None:
        """Fill all of ``into`` with the object's bytes from ``start``.

        Raises NotFoundError if there is no such object, DamagedError if it does not contain all
        these bytes, and another HoldfastError for a negative ``start``.
        """

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """Return ``nbytes`` bytes of the object from ``start``, in memory that nobody modifies.

        The driver never writes to that memory again, so it stays unchanged as long as it is
        referenced, even after :meth:`close`. The caller must not write to it either.

        Raises the errors of :meth:`read`. Override it if ``traits.hands_over``. The default reads
        into new memory, so callers that reuse buffers use :meth:`read`.
        """
        into = memoryview(bytearray(nbytes))
        await self.read(key, start, into)
        return into.toreadonly()

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """Pass the object's bytes from ``start`` to ``take``, in order, in pieces as they arrive.
        Pieces end at multiples of ``traits.piece_nbytes`` in the object; the last one ends with the
        range.

        Raises the errors of :meth:`read`. By then ``take`` may have received the first pieces, but
        never a partial one. Once this method has returned, raised or been cancelled, ``take`` is
        not running and is not called again. If the object is replaced during the read, the pieces
        may be a mixture of old and new. Override it if ``traits.piece_nbytes`` is set. The default
        fetches the whole range first.
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
        """Start an upload of ``nbytes``, or fewer if its commit says so. Two uploads to one key do
        not interfere; the last commit wins.

        Raises FullError if the storage can already tell that space is insufficient, unless
        ``nbytes`` is :class:`AtMost`.
        """

    def copies_from(self, source: Driver) -> bool:
        """Return whether uploads can copy from objects of ``source``, another driver: of the same
        storage, with the same credentials. Does no I/O, so a copy may still fail. True only if
        ``traits.copies`` is set."""
        return False

    async def compose(self, key: str, nbytes: int) -> Upload:
        """Start an upload like :meth:`create`, which may also copy (:meth:`Upload.copy`). Override
        it if such uploads differ from others."""
        return await self.create(key, nbytes)

    def links_from(self, source: Driver) -> bool:
        """Return whether objects of ``source``, another driver, can get keys here. Does no I/O, so
        a link may still fail. True only if ``traits.links`` is set."""
        return False

    async def link(self, key: str, source: Driver, source_key: str) -> None:
        """Make the object ``source_key`` of ``source`` visible as ``key`` too, durably on return.

        The object is stored once, and until its last key is deleted or replaced; neither key
        affects the other. Linking the same object to the same key again does nothing. Only for a
        source that :meth:`links_from` accepts. Raises NotFoundError if there is no such object,
        ExistsError if ``key`` is another object, and another StorageError.
        """
        raise NotImplementedError

    @abstractmethod
    async def get(self, key: str) -> bytes:
        """Return the whole content of a small object. Raises NotFoundError; raises DamagedError
        before reading if the object is not small (:func:`check_small`)."""

    async def watch(self, key: str, known: bytes | None, timeout_s: float) -> bytes | None:
        """Wait until the content of a small object differs from ``known``, and return it. ``known``
        is None if the caller knows of no such object. An object that is deleted counts as
        unchanged until it is there again.

        Returns None if there is nothing new ``timeout_s`` seconds later, or a little later: the
        last look is not cut short. A timeout of 0 looks once. Raises the errors of :meth:`get`
        except NotFoundError. Cancelling it is as prompt as cancelling a :meth:`get`. The default
        polls; override it if the storage can send less for an object that has not changed.
        """
        return await poll(lambda: news(partial(self.get, key), known), timeout_s)

    @abstractmethod
    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """Store a small object, replacing any with the same key. Atomic, and durable on return.
        Raises FullError if the storage reports that it is full, and StorageError for other
        failures.

        With ``exclusive``, raises ExistsError and changes nothing if the key is taken.
        """

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Return the size and modification time of one object. Raises NotFoundError."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield every visible object at or below ``prefix`` (a key, or ``""`` for all), in any
        order. Omits unfinished uploads. A prefix that does not exist is empty. The cost grows with
        the number of objects below the prefix, not below the root."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove one object, durably on return. A missing object is not an error. Folders that
        become empty may stay, because they are not visible."""

    @abstractmethod
    async def delete_all(self, prefix: str) -> None:
        """Remove every object at or below ``prefix`` and the leftovers of uploads to these keys:
        temporary files, dangling parts, empty folders. Also removes unfinished uploads, even live
        ones.

        ``prefix`` is not empty. It is not an error if nothing exists. Not atomic: a call that fails
        midway may be repeated.
        """

    @abstractmethod
    async def sweep(self, prefix: str) -> None:
        """Remove the leftovers of dead uploads at or below ``prefix``: temporary files, dangling
        parts, empty folders.

        Must not harm live uploads of any process on any host; a driver that cannot tell them apart
        removes nothing. A driver that decides by age uses the storage's clock, not the host's.
        ``prefix`` is not empty. It is not an error if nothing exists.
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


def check_name(
    key: str,
    *,
    uri: str,
    is_reserved: Callable[[str], bool],
    encode: Callable[[str], object] = str.encode,
) -> str:
    """Return ``key`` like :func:`check_key`. Also raise UriError if it cannot be encoded, or one of
    its parts is a name that the driver gives to other files."""
    if any(map(is_reserved, check_key(key, uri=uri).split("/"))):
        message = "names of this form are reserved for unfinished uploads and removed files"
        raise UriError(message, uri=uri, key=key)
    try:
        encode(key)
    except UnicodeEncodeError as error:
        raise UriError(f"key {key!r} cannot be encoded", uri=uri, key=key) from error
    return key


def check_small(nbytes: int, uri: str, key: str) -> None:
    """Raise DamagedError if an object is too large to read as a whole. Every driver calls this
    before it reads."""
    if nbytes > SMALL_NBYTES_MAX:
        raise DamagedError(
            f"the object has {nbytes:,} bytes; to be read as a whole, it may have "
            f"{SMALL_NBYTES_MAX:,} at most",
            uri=uri,
            key=key,
        )


class ReadOnly:
    """Mixin for drivers that can only read. Rejects every writing method with a StorageError whose
    message is ``reading_only``. List it before the driver base class."""

    uri: str
    reading_only: ClassVar[str]

    async def _refuse(self, key: str, *_: object, **how: object) -> NoReturn:
        check_key(key, uri=self.uri)
        raise StorageError(self.reading_only, uri=self.uri, key=key, advice="Save to another URI.")

    create = put = delete = _refuse

    async def delete_all(self, prefix: str) -> NoReturn:
        await self._refuse(prefix)

    sweep = delete_all
