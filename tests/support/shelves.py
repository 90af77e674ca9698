"""Shelves of real memory, and a server for one, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast.drivers import memory
from holdfast.drivers.contract import ObjectInfo
from holdfast.errors import NotFoundError
from holdfast.storage.arenas.memory import Memory, sealed_bytes
from holdfast.storage.keeper.serving.memory_catalog import Content
from holdfast.storage.keeper.serving.serve import serve
from holdfast.storage.serving.options import ServeOptions, new_token


@dataclass
class MemfdShelf:
    """Objects in sealed memory, as a keeper has them. ``pinned``: how often each is open."""

    objects: dict[str, Memory] = field(default_factory=dict)
    pinned: dict[str, int] = field(default_factory=dict)
    modified_s: float = 1_700_000_000.25
    others: int = 0

    def keepers(self) -> int:
        """Return the number of keepers of the job."""
        return self.others

    def add(self, key: str, data: bytes) -> None:
        """Add an object of at least one byte."""
        self.objects[key] = Memory(sealed_bytes(data), len(data), writable=False)

    def listing(self) -> Sequence[ObjectInfo]:
        """See Catalog."""
        return [ObjectInfo(key, held.nbytes, self.modified_s) for key, held in self.objects.items()]

    @contextmanager
    def open(self, key: str) -> Iterator[Content]:
        """See Catalog."""
        held = self.objects.get(key)
        if held is None:
            raise NotFoundError("no such object", key=key)
        self.pinned[key] = self.pinned.get(key, 0) + 1
        try:
            yield Content(held.view, self.modified_s)
        finally:
            self.pinned[key] -= 1

    def status(self) -> Mapping[str, object]:
        """See Catalog."""
        return {"objects": len(self.objects)}

    def metrics(self) -> str:
        """See Catalog."""
        return f"# TYPE objects gauge\nobjects {len(self.objects)}\n"


@dataclass(frozen=True)
class StoreShelf:
    """The objects of a named ``memory://`` store, which drivers may change at any time."""

    name: str

    def keepers(self) -> int:
        """Return the number of keepers of the job."""
        return 0

    @property
    def _objects(self) -> dict[str, tuple[bytes, float]]:
        return memory.STORES.setdefault(self.name, {})

    def listing(self) -> Sequence[ObjectInfo]:
        """See Catalog."""
        held = self._objects.copy()
        return [ObjectInfo(key, len(data), when) for key, (data, when) in held.items()]

    @contextmanager
    def open(self, key: str) -> Iterator[Content]:
        """See Catalog."""
        try:
            data, modified_s = self._objects[key]
        except KeyError as error:
            raise NotFoundError("no such object", key=key) from error
        yield Content(memoryview(data), modified_s)

    def status(self) -> Mapping[str, object]:
        """See Catalog."""
        return {}

    def metrics(self) -> str:
        """See Catalog."""
        return ""


@dataclass
class Showing:
    """A running server. ``server`` has its counters."""

    server: Any
    token: str
    host: str = "127.0.0.1"

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.server.port)

    def uri(self, path: str = "", **options: str) -> str:
        """Return the URI of ``path``."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"peer://{self.host}:{self.port}/{path}" + (f"?{query}" if query else "")


@contextmanager
def showing(shelf: Any, token: str = "", *, hear: Any = None, **options: Any) -> Iterator[Showing]:
    """Serve ``shelf`` from a thread until the end of the body. ``hear`` answers reports."""
    token = token or new_token()
    begun = threading.Event()
    found: list[Any] = []

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with serve(shelf, ServeOptions(token, **options), hear) as server:
                found.extend([server, lambda: loop.call_soon_threadsafe(ended.set)])
                begun.set()
                await ended.wait()
        except BaseException as error:
            found.insert(0, error)
            raise
        finally:
            begun.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="shelf", daemon=True)
    thread.start()
    assert begun.wait(30), "the server has not begun"
    if isinstance(found[0], BaseException):
        raise found[0]
    server, end = found
    try:
        yield Showing(server, token)
    finally:
        with contextlib.suppress(RuntimeError):
            end()
        thread.join(30)
        assert not thread.is_alive(), "the server has not ended"


def until(true: Any, what: str, seconds: float = 10.0) -> None:
    """Wait until ``true()``; fail after ``seconds``."""
    deadline_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline_s, f"not in {seconds} s: {what}"
        time.sleep(0.01)
