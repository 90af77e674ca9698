"""Storage behind a network: an object store, and HDFS. Acknowledged requests are durable. Others
may have been executed.

A request travels, takes effect at one moment, and its answer travels back. It may be refused. It
may be executed while its answer is lost. It may be executed *late*, after its sender has given up,
unless the key was written since. It may be executed *twice*, acknowledged and *forgotten*, or never
answered. In an *outage* all requests of a host fail for a while; some of them are executed. A
listing comes in pages, and may be stale if the store's listings may. HDFS writes a temporary file,
closes it, and renames it. An abandoned file, complete or not, keeps its hidden temporary name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from holdfast.drivers.contract import (
    Buffer,
    CopyTraits,
    Driver,
    ObjectInfo,
    TakePiece,
    Traits,
    Upload,
    check_key,
)
from holdfast.drivers.pieces import piece_ends
from holdfast.drivers.ranges import Ranges
from holdfast.errors import (
    BusyError,
    DamagedError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

from .engine import PIECE_NBYTES
from .loop import check_alive
from .schedule import Fault

T = TypeVar("T")
PAGE = 5
"""Entries per page of a listing."""
BEHIND_S = 30.0
"""Longest time for which a stale listing may miss a change."""
QUIET_S = 3600.0
HIDDEN = ".tmp-"


class Server:
    """Objects and unfinished uploads. Methods are effects: they happen at one moment.

    ``changed(key)`` is called after each visible change.
    """

    def __init__(
        self, now_s: Callable[[], float], changed: Callable[[str], None], *, behind: bool
    ) -> None:
        self.now_s, self.changed, self.behind = now_s, changed, behind
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.before: dict[str, tuple[tuple[bytes, float] | None, float]] = {}
        """The former value of each key, and the time of its last change."""
        self.uploads: dict[int, dict[int, bytes]] = {}
        self.count = 0

    def take_over(self, other: Server) -> None:
        """Copy the state of ``other``; no request is in flight."""
        self.objects, self.before, self.count = dict(other.objects), dict(other.before), other.count
        self.uploads = {number: dict(parts) for number, parts in other.uploads.items()}

    def store(self, key: str, data: bytes | None) -> None:
        """Write an object, or remove it (None)."""
        if data is None and key not in self.objects:
            return
        self.before[key] = (self.objects.get(key), self.now_s())
        if data is None:
            del self.objects[key]
        else:
            self.objects[key] = (data, self.now_s())
        self.changed(key)

    def put(self, key: str, data: bytes, exclusive: bool) -> None:
        """Write an object. Raises KeyError if the put is exclusive and the key is taken."""
        if exclusive and key in self.objects:
            raise KeyError(key)
        self.store(key, data)

    def listed(self, prefix: str, stale: bool) -> dict[str, tuple[bytes, float]]:
        """Return the objects that a listing shows. A ``stale`` one lacks the newest changes."""
        shown = dict(self.objects)
        if stale:
            for key, (was, at_s) in self.before.items():
                if self.now_s() - at_s < BEHIND_S:
                    shown.pop(key, None)
                    if was is not None:
                        shown[key] = was
        return {key: entry for key, entry in sorted(shown.items()) if key.startswith(prefix)}


class ObjectDriver(Driver):
    """One process's access to a server, below ``root`` (a key prefix that ends with a slash)."""

    remote: ClassVar[bool] = True

    def __init__(
        self,
        world: Any,
        server: Server,
        root: str,
        *,
        exclusive: bool,
        copies: CopyTraits | None = None,
        links: bool = False,
    ) -> None:
        self._world, self._server, self._root = world, server, root
        self.uri = "sim://" + root.rstrip("/")
        self.traits = Traits(
            part_nbytes=4096, part_min_nbytes=1, align_nbytes=1, concurrency=4, coalesce_nbytes=0, part_order="any",
            exclusive_is_atomic=exclusive, shared=True, bounded=False, piece_nbytes=PIECE_NBYTES,
            copies=copies, links=links,
        )  # fmt: skip

    async def request(self, name: str, key: str, effect: Callable[[], T]) -> T:
        """Make one request: travel there, take effect, and travel back."""
        world = self._world
        fault: Fault | None = world.operation(name, self._root + key)
        await world.after(world.delay_s() + world.cut_s())
        check_alive()
        was_out = world.is_out
        if was_out and world.chance() < 0.7:
            raise StorageDownError("no way there", uri=self.uri, key=key)
        result = self._done(fault, key, effect) if fault is not None else effect()
        if fault is not None and fault.kind == "twice":
            await world.after(world.delay_s())
            effect()
        if fault is not None and fault.kind == "hang":
            await world.after(fault.value)
        await world.after(world.delay_s() + world.cut_s())
        if was_out or world.is_out:
            raise StorageDownError("no way back", uri=self.uri, key=key)
        return result

    def _done(self, fault: Fault, key: str, effect: Callable[[], T]) -> T:
        where = {"uri": self.uri, "key": key}
        if fault.kind == "refused":
            raise StorageDownError("refused, for now", **where)
        if fault.kind == "busy":
            raise BusyError("slow down", retry_after_s=1.0, **where)
        if fault.kind == "full":
            raise FullError("no room", **where)
        if fault.kind == "late":
            self._later(self._root + key, effect)
            raise StorageDownError("no answer", **where)
        if fault.kind == "forgets":
            return None
        result = effect()
        if fault.kind == "unsure":
            raise StorageDownError("the answer is lost", **where)
        return result

    def _later(self, key: str, effect: Callable[[], Any]) -> None:
        """Take effect after the sender has given up, unless the key is written in between."""
        sent_s, server = self._server.now_s(), self._server

        def overdue() -> None:
            if server.before.get(key, (None, -1.0))[1] < sent_s:
                try:
                    effect()
                except (KeyError, StorageError):
                    return  # no sender is left to be told

        self._world.as_nobody(self._world.delay_s() * 40, overdue)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        def effect() -> bytes:
            data = self._found(key)
            if not 0 <= start <= start + len(into) <= len(data):
                raise DamagedError(f"object ends at byte {len(data)}", uri=self.uri, key=key)
            return data[start : start + len(into)]

        into[:] = await self.request("read", check_key(key), effect)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`. Between two pieces, the object may be replaced and the
        connection lost."""
        ends = piece_ends(start, nbytes, self.traits.piece_nbytes)
        for begin, end in pairwise(ends):
            piece = memoryview(bytearray(end - begin))
            await self.read(key, begin, piece)
            if nbytes:
                take(piece)

    async def get(self, key: str) -> bytes:
        return await self.request("get", check_key(key), lambda: self._found(key))

    async def stat(self, key: str) -> ObjectInfo:
        def effect() -> ObjectInfo:
            return ObjectInfo(
                key,
                len(self._found(key)),
                self._world.wall_s(self._server.objects[self._root + key][1]),
            )

        return await self.request("stat", check_key(key), effect)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        path = self._root + check_key(key)
        if exclusive and not self.traits.exclusive_is_atomic:  # check, then put
            taken = await self.request("stat", key, lambda: path in self._server.objects)
            if taken:
                raise ExistsError("the key is taken", uri=self.uri, key=key)
            exclusive = False
        try:
            await self.request("put", key, lambda: self._server.put(path, data, exclusive))
        except KeyError as error:
            raise ExistsError("the key is taken", uri=self.uri, key=key) from error

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        stale = self._server.behind and self._world.chance() < 0.5
        last = ""

        def effect() -> list[ObjectInfo]:
            shown = self._server.listed(self._root, stale)
            keys = [
                key for key in shown if key.removeprefix(self._root) > last and HIDDEN not in key
            ]
            wanted = [k.removeprefix(self._root) for k in keys]
            wanted = [k for k in wanted if not prefix or k == prefix or k.startswith(prefix + "/")]
            return [
                ObjectInfo(
                    k, len(shown[self._root + k][0]), self._world.wall_s(shown[self._root + k][1])
                )
                for k in wanted[:PAGE]
            ]

        while page := await self.request("list", prefix, effect):
            for info in page:
                yield info
            if len(page) < PAGE:
                return
            last = page[-1].key

    async def delete(self, key: str) -> None:
        await self.request(
            "delete", check_key(key), lambda: self._server.store(self._root + key, None)
        )

    async def delete_all(self, prefix: str) -> None:
        below = f"{self._root}{check_key(prefix)}/"
        shown = await self.request(
            "list", prefix, lambda: list(self._server.listed(below, stale=False))
        )
        for key in shown:
            await self.request(
                "delete",
                key.removeprefix(self._root),
                lambda key=key: self._server.store(key, None),
            )

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Abandoned parts are invisible and affect nobody."""

    async def close(self) -> None:
        return None

    async def create(self, key: str, nbytes: int) -> Upload:
        server = self._server

        def effect() -> int:
            server.count += 1
            server.uploads[server.count] = {}
            return server.count

        return _ObjectUpload(
            self, check_key(key), nbytes, await self.request("create", key, effect)
        )

    def copies_from(self, source: Driver) -> bool:
        return self.traits.copies is not None and isinstance(source, ObjectDriver)

    def links_from(self, source: Driver) -> bool:
        return self.traits.links and isinstance(source, ObjectDriver)

    async def link(self, key: str, source: Any, source_key: str) -> None:
        path = self._root + check_key(key)

        def effect() -> None:
            data = source.lend(source_key)
            if self._server.objects.get(path, (data,))[0] is not data:
                raise ExistsError("the key is taken", uri=self.uri, key=key)
            self._server.store(path, data)

        await self.request("link", key, effect)

    def lend(self, key: str) -> bytes:
        """Return an object for an upload that copies from it, or for a link."""
        data = self._found(key)
        self._world.copied(self._root + key)
        return data

    def _found(self, key: str) -> bytes:
        try:
            return self._server.objects[self._root + key][0]
        except KeyError:
            raise NotFoundError("no such object", uri=self.uri, key=key) from None


class _ObjectUpload(Upload):
    def __init__(self, driver: ObjectDriver, key: str, nbytes: int, number: int) -> None:
        self._driver, self._key, self._number = driver, key, number
        self._server = driver._server
        self._nbytes = nbytes

    async def write(self, start: int, data: Buffer) -> None:
        content = bytes(data)
        await self._driver.request(
            "write", self._key, lambda: self._parts().__setitem__(start, content)
        )

    async def copy(self, start: int, source: Any, key: str, key_start: int, nbytes: int) -> None:
        copies = self._driver.traits.copies
        assert copies is not None
        assert nbytes >= copies.min_nbytes, "too small a copy"

        def effect() -> None:
            data = source.lend(key)
            if key_start + nbytes > len(data):
                raise DamagedError(f"object ends at byte {len(data)}", uri=source.uri, key=key)
            self._parts()[start] = data[key_start : key_start + nbytes]

        await self._driver.request("copy", self._key, effect)

    async def commit(self, nbytes: int | None = None) -> None:
        await self._driver.request("commit", self._key, lambda: self._complete(nbytes))

    async def abort(self) -> None:
        self._server.uploads.pop(self._number, None)

    def _parts(self) -> dict[int, bytes]:
        try:
            return self._server.uploads[self._number]
        except KeyError:
            raise StorageError("no such upload", uri=self._driver.uri, key=self._key) from None

    def _complete(self, nbytes: int | None) -> None:
        parts = self._parts()
        ranges = Ranges(self._nbytes, uri=self._driver.uri, key=self._key)
        for start, data in parts.items():
            ranges.add(start, len(data))
        ranges.check_complete(nbytes)
        self._server.store(
            self._driver._root + self._key, b"".join(parts[start] for start in sorted(parts))
        )
        if not self._driver._world.answers_again:
            del self._server.uploads[self._number]


class HdfsDriver(ObjectDriver):
    """Writes parts in order into a temporary file, and renames it when it is complete."""

    def __init__(self, world: Any, server: Server, root: str) -> None:
        super().__init__(world, server, root, exclusive=True)
        self.traits = Traits(
            part_nbytes=4096, part_min_nbytes=1, align_nbytes=1, concurrency=4, coalesce_nbytes=0,
            part_order="ascending", exclusive_is_atomic=True, shared=True,
        )  # fmt: skip

    def hidden(self, key: str) -> str:
        """Return a new temporary name in the folder of ``key``."""
        self._server.count += 1
        folder, slash, name = key.rpartition("/")
        return f"{self._root}{folder}{slash}{HIDDEN}{name}.{self._server.count}"

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        path = self.hidden(check_key(key))
        await self.request("create", key, lambda: self._server.store(path, b""))
        await self.request("write", key, lambda: self._append(path, data, 0))
        try:
            await self.rename(path, key, exclusive=exclusive)
        except KeyError as error:
            await self.request("delete", key, lambda: self._server.store(path, None))
            raise ExistsError("the key is taken", uri=self.uri, key=key) from error

    async def rename(self, path: str, key: str, *, exclusive: bool) -> None:
        """Give a closed temporary file its name. Raises KeyError if ``exclusive`` and the name is
        taken."""

        def effect() -> None:
            if path not in self._server.objects:
                raise StorageError("the temporary file is gone", uri=self.uri, key=key)
            self._server.put(self._root + key, self._server.objects[path][0], exclusive)
            self._server.store(path, None)

        await self.request("rename", key, effect)

    async def create(self, key: str, nbytes: int) -> Upload:
        path = self.hidden(check_key(key))
        await self.request("create", key, lambda: self._server.store(path, b""))
        return _HdfsUpload(self, key, path, nbytes)

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Deletes temporary files that were not written for an hour."""
        above, slash, name = prefix.rpartition("/")
        below = (f"{self._root}{prefix}/", f"{self._root}{above}{slash}{HIDDEN}{name}.")

        def effect() -> list[str]:
            old_s = self._server.now_s() - QUIET_S
            return [
                k
                for k, (_, at_s) in self._server.objects.items()
                if HIDDEN in k and k.startswith(below) and at_s < old_s
            ]

        for path in await self.request("list", prefix, effect):
            await self.request("delete", prefix, lambda path=path: self._server.store(path, None))

    def _append(self, path: str, data: bytes, at: int) -> None:
        """Append a packet. Packets have offsets, so one that arrives twice is stored once."""
        if path not in self._server.objects:
            raise StorageError("the lease is lost", uri=self.uri, key=path)
        self._server.store(path, self._server.objects[path][0][:at] + data)


class _HdfsUpload(Upload):
    """Writes begin and execute in order: the file accepts one at a time."""

    def __init__(self, driver: HdfsDriver, key: str, path: str, nbytes: int) -> None:
        self._driver, self._key, self._path, self._nbytes = driver, key, path, nbytes
        self._turn = asyncio.Lock()
        self._at = 0
        self._failed = False

    async def write(self, start: int, data: Buffer) -> None:
        async with self._turn:
            if self._failed or start != self._at:
                raise StorageError("an earlier write failed", uri=self._driver.uri, key=self._key)
            try:
                content = bytes(data)
                await self._driver.request(
                    "write", self._key, lambda: self._driver._append(self._path, content, self._at)
                )
            except BaseException:
                self._failed = True
                raise
            self._at += len(data)

    async def commit(self, nbytes: int | None = None) -> None:
        def seen() -> int:
            return len(self._driver._server.objects.get(self._path, (b"", 0))[0])

        nbytes = self._nbytes if nbytes is None else nbytes
        if await self._driver.request("close", self._key, seen) != nbytes:
            raise StorageError(
                "the file is not as long as what was written", uri=self._driver.uri, key=self._key
            )
        await self._driver.rename(self._path, self._key, exclusive=False)

    async def abort(self) -> None:
        """Delete the file, or not: the name node may never receive the request."""
        if self._driver._world.chance() < 0.5:
            self._driver._server.store(self._path, None)
