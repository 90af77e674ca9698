"""``shown://name/root``: a store of this process. Reads go through a server and ``peer://``, writes
go directly to the store. So the conformance kit can test a read-only driver."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from typing import Any
from urllib.parse import unquote

from holdfast.drivers.conformance.probes import MemoryProbe
from holdfast.drivers.contract import Traits, Upload
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import option_values
from holdfast.drivers.peer.driver import PeerDriver
from holdfast.drivers.uri import Uri

from ..shelves import Showing, StoreShelf, showing

_servers: dict[str, Showing] = {}
_open = ExitStack()
atexit.register(_open.close)


def _server(name: str) -> Showing:
    """Return the server of the store ``name``, which runs until this process ends."""
    if name not in _servers:
        _servers[name] = _open.enter_context(showing(StoreShelf(name)))
    return _servers[name]


class ShownDriver(PeerDriver):
    """Reads like ``peer://``, and writes directly into the server's memory."""

    def __init__(self, uri: Uri, values: dict[str, Any]) -> None:
        name, _, root = uri.location.partition("/")
        server = _server(name)
        at = Uri("peer", f"127.0.0.1:{server.port}/{root}")
        super().__init__(at, {**values, "token": server.token})
        self.uri = uri.root
        self._store = MemoryDriver(f"{name}/{unquote(root)}")
        self._store.uri = uri.root
        own: Traits = self._store.traits
        self.traits = Traits(
            part_nbytes=own.part_nbytes,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=self.traits.concurrency,
            coalesce_nbytes=self.traits.coalesce_nbytes,
            part_order="any",
            exclusive_is_atomic=True,
            shared=False,
            piece_nbytes=self.traits.piece_nbytes,
        )

    @classmethod
    def open(cls, uri: Uri) -> ShownDriver:
        """See PeerDriver."""
        return cls(uri, option_values(cls.OPTIONS, uri))

    async def create(self, key: str, nbytes: int) -> Upload:
        """Create an upload in the store."""
        self._target(key)
        return await self._store.create(key, nbytes)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """Put an object into the store."""
        self._target(key)
        await self._store.put(key, data, exclusive=exclusive)

    async def delete(self, key: str) -> None:
        """Delete an object from the store."""
        await self._store.delete(key)

    async def delete_all(self, prefix: str) -> None:
        """Delete objects from the store."""
        await self._store.delete_all(prefix)

    async def sweep(self, prefix: str) -> None:
        """Sweep the store."""
        await self._store.sweep(prefix)

    async def close(self) -> None:
        """Close both drivers."""
        await self._store.close()
        await super().close()


class ShownProbe(MemoryProbe):
    """Looks into the store itself."""

    def __init__(self, uri: Uri) -> None:
        super().__init__(Uri("memory", unquote(uri.location)))
