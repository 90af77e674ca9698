"""The driver contract: what every kind of storage must do for Holdfast, and nothing more.

A driver is bound to one root (a folder, a bucket and prefix) and speaks in **keys** relative to it:
parts joined by ``/``, none of them empty, ``.`` or ``..``, no NUL, not absolute (see
:func:`check_key`). Methods are coroutines; one driver is used from one event loop, and by many
tasks at once.

Durability is part of the contract: :meth:`Upload.commit` and :meth:`Driver.put` return only when
the bytes are durable as that storage defines durable. Visibility too: an object is either absent or
whole. What failed leaves nothing visible.

Scope: a driver does I/O. It does not retry, limit, hash or cache contents; layers and the engine
do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.units import ceil_div
from ..errors import DamagedError, UriError

__all__ = [
    "SMALL_NBYTES_MAX",
    "AtMost",
    "Buffer",
    "Driver",
    "ObjectInfo",
    "PartOrder",
    "Traits",
    "Upload",
    "check_key",
    "check_small",
    "segments",
]

SMALL_NBYTES_MAX = 4 << 30
"""What :meth:`Driver.get` reads at most: the manifest of a hundred million shards. Larger ones are
no file of ours, and are not to fill the host's memory."""

Buffer = memoryview
"""One-dimensional, contiguous, of format ``B``."""


PartOrder = Literal["any", "ascending", "serial"]
"""``any``: in any order, and in parallel. ``ascending``: each write begins where the one that was
begun before it ends, and need not wait for it. ``serial``: likewise, one after the other."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a driver is good at. The scheduler and the planner read these; nobody asks for the
    driver's type."""

    part_nbytes: int
    """Preferred size of one write or read, in bytes."""
    part_min_nbytes: int
    """Least size of one write, but for the last of an upload; 1 where any size will do."""
    align_nbytes: int
    """Writes whose offset, length and memory address are multiples of this avoid a copy; 1 where
    nothing is gained."""
    concurrency: int
    """Operations in flight beyond which nothing is gained."""
    coalesce_nbytes: int
    """Two ranges closer than this are read faster as one."""
    part_order: PartOrder
    """In which order the parts of one upload are written: see :data:`PartOrder`."""
    exclusive_is_atomic: bool
    """Of several exclusive puts to one key exactly one succeeds, whichever hosts they come from."""
    shared: bool
    """Other hosts see the same objects."""
    hands_over: bool = False
    """What is read arrives in memory of the driver's library: :meth:`Driver.fetch` hands that over
    as it is, and :meth:`Driver.read` copies it."""
    streams: int = 1
    """An upload is fastest when this many contiguous segments of it, see :func:`segments`, are
    written at once: then ``part_order``, which is not ``serial``, holds within each of them. One
    after the other is as right, and slower."""

    bounded: bool = True
    """Room may run out: what dead savers have left is swept before a save writes anything, and else
    while it writes."""

    upload_nbytes: int = 0
    """What an upload holds of its own until it is committed, at most, besides what is being
    written: budgets count it."""

    @property
    def read_copies(self) -> int:
        """How often the bytes of a read lie in memory until it returns: in the caller's buffer, and
        where the driver's library has received them. Budgets count both."""
        return 2 if self.hands_over else 1


def segments(nbytes: int, traits: Traits) -> list[tuple[int, int]]:
    """(start, stop) of the segments of an upload of ``nbytes``: at most ``traits.streams``, about
    equally long, cut at multiples of ``traits.part_nbytes``; (0, 0) alone where there are no bytes.
    ``nbytes`` is the size that is declared: an upload that ends before it fills the first of them,
    and never begins those behind its end."""
    parts = ceil_div(nbytes, traits.part_nbytes)
    step = max(1, ceil_div(parts, traits.streams)) * traits.part_nbytes
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)] or [(0, 0)]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One visible object. ``modified_s`` is in seconds since the epoch, by the storage's own clock."""

    key: str
    nbytes: int
    modified_s: float


class Upload(ABC):
    """One object being written. Invisible and harmless until :meth:`commit` has returned."""

    @abstractmethod
    async def write(self, start: int, data: Buffer) -> None:
        """Take ``data`` as the object's bytes from ``start``. The caller keeps ``data`` unchanged
        until this returns.

        Every byte of the object is written exactly once, in the order that ``traits.part_order``
        asks for: the object is as long as was declared, or ends where :meth:`commit` will say.
        Raises a :class:`StorageError`.
        """

    @abstractmethod
    async def commit(self, nbytes: int | None = None) -> None:
        """Make the object durable and visible, whole, replacing one of the same key. Called once,
        after all writes.

        With ``nbytes`` it ends there: the size that was declared was only the most that it could
        have. None: as declared. Raises a StorageError where ``nbytes`` is more than that, or the
        bytes before it, and no others, have not been written each once; then nothing becomes
        visible.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Drop what was written; nothing stays visible. Safe to call at any time, more than once,
        and after a failed or cancelled :meth:`commit`; after a successful one it does nothing. Does
        not raise a StorageError."""


class AtMost(int):
    """The size of an upload that will probably end before it: what compression leaves is not known
    when it begins."""


class Driver(ABC):
    """Storage bound to one root. Raises :class:`holdfast.StorageError` and its kinds, each with
    URI, key and cause."""

    uri: str
    """The root, redacted: fit to be printed. Without options: some come from the environment, and
    may differ between ranks, which compare where they save to. :attr:`Uri.root` is just that."""
    traits: Traits
    """Known once the driver is open, before any I/O, and the same from then on. What only the
    server knows is promised by an option, with a default that is safe, or not at all."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Trials of the conformance kit, by name, that this storage cannot pass, and why. The kit
    prints them."""
    remote: ClassVar[bool] = True
    """Reached over a network by this driver itself. Then what fails for a while is tried again, and
    operations have a deadline, unless the options say otherwise. False: the operating system stands
    in between, and has tried already."""

    @abstractmethod
    async def read(self, key: str, start: int, into: Buffer) -> None:
        """Fill all of ``into`` with the object's bytes from ``start``.

        Raises NotFoundError without such an object, and DamagedError where it does not hold all of
        these bytes.
        """

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """The object's bytes from ``start``, in memory that the driver never touches again: it
        stays as it is for as long as somebody holds it, also after :meth:`close`. Nobody writes to
        it.

        Raises what :meth:`read` raises. Override it where ``traits.hands_over``; elsewhere it is
        ``read`` into new memory, and whoever has buffers to use again reads into those.
        """
        into = memoryview(bytearray(nbytes))
        await self.read(key, start, into)
        return into.toreadonly()

    @abstractmethod
    async def create(self, key: str, nbytes: int) -> Upload:
        """Begin an object of ``nbytes``, or of fewer where its commit says so. Two uploads to one
        key do not disturb each other: the last commit wins.

        Raises FullError where the storage can tell at once that there is no room; not for
        :class:`AtMost` so many.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes:
        """The whole of a small object. Raises NotFoundError, and DamagedError for one that is not
        small (:func:`check_small`), before it is read."""

    @abstractmethod
    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """Store a small object: atomic, durable on return, replacing what was there. Raises
        FullError where the storage is full, if it says so; a StorageError where it only says that
        it failed.

        With ``exclusive``: raises ExistsError where the key is taken, and then changes nothing.
        """

    @abstractmethod
    async def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object. Raises NotFoundError."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Every visible object at or below ``prefix`` (a key, or ``""`` for all), in no order. What
        is unfinished is not shown; a prefix that does not exist is empty. Cost grows with what lies
        below the prefix, not with the root."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove one object, durably on return. One that is not there is no error. Folders that are
        empty then may stay; nobody sees them."""

    @abstractmethod
    async def delete_all(self, prefix: str) -> None:
        """Remove every object at or below ``prefix`` (not empty), and what uploads to these keys
        left: temporary files, dangling parts, empty folders. Unfinished uploads go, too, also those
        that live. Nothing there is no error. Not atomic: what fails midway may be done again."""

    @abstractmethod
    async def sweep(self, prefix: str) -> None:
        """Remove what dead uploads to ``prefix``, and below it, left: temporary files, dangling
        parts, empty folders.

        Uploads that live, whichever process or host they belong to, are not harmed; where that
        cannot be told, what is left stays. Whoever goes by age goes by the storage's clock, not by
        this host's. ``prefix`` is not empty. Nothing there is no error.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of handles and threads, and drop uploads that are neither committed nor aborted.
        Safe to call twice.

        Afterwards every operation raises StorageError, but for :meth:`Upload.abort`, which does
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
