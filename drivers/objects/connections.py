"""The stores of obstore that one driver holds: one for each kind of requests, connected when first
needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ...errors import StorageError
from ..threads import Threads
from . import runtime
from .errors import connecting
from .options import Requests

__all__ = ["Connections"]


class Connections:
    """Connects by ``connect``, which blocks, in a thread. Nobody else holds the stores, so letting
    go of them closes their sockets."""

    def __init__(self, uri: str, connect: Callable[[Requests], Any], threads: Threads) -> None:
        """``uri``, redacted, is for messages."""
        self._uri = uri
        self._connect = connect
        self._threads = threads
        self._connecting = asyncio.Lock()
        self._stores: dict[Requests, Any] = {}
        self._closed = False

    async def open(self, requests: Requests) -> None:
        """See that there is a store for this kind of requests. Raises StorageError, UriError."""
        runtime.use(self._uri)
        async with self._connecting:
            self.check_open()
            if requests not in self._stores:
                with connecting(self._uri):
                    store = await self._threads.run(self._connect, requests)
                self.check_open()
                self._stores[requests] = store

    def ask(self, requests: Requests, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of obstore with the store for this kind of requests, which is open."""
        import obstore

        self.check_open()
        return getattr(obstore, method)(self._stores[requests], *args, **kwargs)

    def check_open(self) -> None:
        """Raise StorageError once the driver is closed."""
        if self._closed:
            raise StorageError("the driver is closed", uri=self._uri)

    def renew(self) -> None:
        """Connect anew for later requests. Those under way keep their stores."""
        self._stores.clear()

    def refuse_requests(self) -> None:
        """Refuse requests from now on. Those under way go on."""
        self._closed = True

    async def close(self) -> None:
        """Let go of the stores."""
        self.refuse_requests()
        if self._stores:
            self._stores.clear()
            await runtime.wake()
