"""Objects in memory, and uploads in parts, within a budget. Used from one event loop."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from ...errors import DamagedError, ExistsError, FullError, NotFoundError
from .requests import is_below


@dataclass(eq=False, slots=True)
class MemoryObject:
    """A whole object, which never changes. ``parts`` are its bytes in order, not copied. ``tag``
    identifies it among all objects of all stores."""

    parts: Sequence[memoryview]
    tag: str
    modified_s: float = field(default_factory=time.time)
    readers: int = 0
    is_visible: bool = True

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(map(len, self.parts))


@dataclass(slots=True)
class _Upload:
    key: str
    used_s: float
    parts: dict[int, memoryview] = field(default_factory=dict)
    """Received parts by start."""


class ObjectMemory:
    """Objects by key, and unfinished uploads by id. ``used_nbytes`` counts objects, also deleted
    ones that are being read, parts of uploads, and bodies being received."""

    def __init__(
        self, budget_nbytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Drop uploads that receive nothing for ``idle_s`` seconds of ``clock``."""
        self.used_nbytes = 0
        self.objects: dict[str, MemoryObject] = {}
        self.uploads: dict[str, _Upload] = {}
        self._budget_nbytes = budget_nbytes
        self._idle_s = idle_s
        self._clock = clock
        self._tags = (f'"{secrets.token_hex(8)}-{n}"' for n in itertools.count())
        self._changed = asyncio.Event()
        self._is_ending = False

    def check_room(self, nbytes: int) -> None:
        """Raise FullError unless the budget has room for ``nbytes`` more. Expired uploads make
        room."""
        self.expire()
        if self.used_nbytes + nbytes > self._budget_nbytes:
            raise FullError(
                f"{nbytes:,} bytes do not fit: {self.used_nbytes:,} of {self._budget_nbytes:,} are "
                f"in use"
            )

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[memoryview]:
        """Reserve memory for a body. If the block fails, the memory is free again, otherwise it
        belongs to the object or upload that the block gave it to. Raises FullError."""
        self.check_room(nbytes)
        try:
            memory = np.empty(nbytes, np.uint8).data
        except MemoryError as error:
            raise FullError(f"the host has no memory for {nbytes:,} bytes") from error
        self.used_nbytes += nbytes
        try:
            yield memory
        except BaseException:
            self.used_nbytes -= nbytes
            raise

    def check_free(self, key: str) -> None:
        """Raise ExistsError if the key is taken."""
        if key in self.objects:
            raise ExistsError("the object already exists", key=key)

    def put(self, key: str, *parts: memoryview) -> None:
        """Make the object of these parts visible, in place of any with the same key."""
        self.delete(key)
        self.objects[key] = MemoryObject(parts, next(self._tags))
        self._notify()

    def begin(self, upload_id: str, key: str) -> None:
        """Begin an upload. Beginning the same one again does nothing."""
        self.uploads.setdefault(upload_id, _Upload(key, self._clock()))

    def use(self, upload_id: str) -> None:
        """Note activity on an upload. Raises NotFoundError if it is over."""
        self._upload(upload_id).used_s = self._clock()

    def write(self, upload_id: str, start: int, part: memoryview) -> None:
        """Add a part, in place of any with the same start. Raises NotFoundError if the upload is
        over."""
        self.use(upload_id)
        replaced = self._upload(upload_id).parts.pop(start, b"")
        self.used_nbytes -= len(replaced)
        self._upload(upload_id).parts[start] = part

    def commit(self, upload_id: str, nbytes: int) -> None:
        """Make the object visible. Raises NotFoundError if the upload is over, and DamagedError,
        which drops it, unless its parts are exactly ``nbytes`` bytes."""
        upload = self._upload(upload_id)
        ends = [0]
        starts = sorted(upload.parts)
        for start in starts:
            ends.append(start + len(upload.parts[start]))
        if ends != [*starts, nbytes]:
            self.abort(upload_id)
            raise DamagedError(f"the parts do not make {nbytes:,} bytes", key=upload.key)
        del self.uploads[upload_id]
        self.put(upload.key, *(upload.parts[start] for start in starts))

    def abort(self, upload_id: str) -> None:
        """Drop an upload, if it is not over."""
        upload = self.uploads.pop(upload_id, None)
        if upload is not None:
            self.used_nbytes -= sum(map(len, upload.parts.values()))

    def expire(self) -> None:
        """Drop idle uploads."""
        before_s = self._clock() - self._idle_s
        for upload_id in [u for u, upload in self.uploads.items() if upload.used_s < before_s]:
            self.abort(upload_id)

    def delete(self, key: str) -> None:
        """Remove an object, if it exists. Readers still have it."""
        gone = self.objects.pop(key, None)
        if gone is not None:
            gone.is_visible = False
            self._free(gone)
            self._notify()

    def delete_all(self, prefix: str) -> None:
        """Remove all objects and unfinished uploads at or below a key; "" for all."""
        for key in self.below(prefix):
            self.delete(key)
        for upload_id, upload in [*self.uploads.items()]:
            if is_below(upload.key, prefix):
                self.abort(upload_id)

    def below(self, prefix: str) -> list[str]:
        """Return the keys of all objects at or below a key; "" for all."""
        return [key for key in self.objects if is_below(key, prefix)]

    @contextmanager
    def open(self, key: str) -> Iterator[MemoryObject]:
        """Pin an object for the block. Raises NotFoundError."""
        found = self.objects.get(key)
        if found is None:
            raise NotFoundError("no such object", key=key)
        found.readers += 1
        try:
            yield found
        finally:
            found.readers -= 1
            self._free(found)

    async def changed(self, key: str, tag: str | None, timeout_s: float) -> None:
        """Wait until the object has another tag than this; None: until there is one. Returns after
        ``timeout_s`` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._tag(key) == tag and not self._is_ending:
                    await self._changed.wait()

    def end_waits(self) -> None:
        """End all calls of :meth:`changed`, also later ones."""
        self._is_ending = True
        self._changed.set()

    def _tag(self, key: str) -> str | None:
        found = self.objects.get(key)
        return None if found is None else found.tag

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _free(self, gone: MemoryObject) -> None:
        if not gone.is_visible and not gone.readers:
            self.used_nbytes -= gone.nbytes
            gone.parts = ()

    def _upload(self, upload_id: str) -> _Upload:
        try:
            return self.uploads[upload_id]
        except KeyError as error:
            raise NotFoundError("no such upload") from error
