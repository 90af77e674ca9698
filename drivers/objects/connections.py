"""The obstore stores of one driver: one for each kind of request, connected on first use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Any, Self

from ...core.forks.renewal import new_lock
from ...errors import StorageError
from ..threads import Threads
from . import runtime
from .errors import connecting
from .options import Requests

_hiding = new_lock()


def made_without(
    variables: Collection[str], make: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return the result of ``make``, called with none of ``variables`` set, in upper or lower case.

    They are removed from the C library's environment, which obstore reads, while ``make`` runs, and
    then restored; Python's ``os.environ`` is not changed. Usually none is set and nothing happens.
    Only list variables that nothing but obstore reads.
    """
    hidden = {name.upper() for name in variables}
    with _hiding:
        found = {
            name: os.environ.get(name, "") for name in list(os.environ) if name.upper() in hidden
        }
        for name in found:
            os.unsetenv(name)
        try:
            return make(*args, **kwargs)
        finally:
            for name, value in found.items():
                os.putenv(name, value)


class Held:
    """The only reference to a response of obstore, which may have a connection, until the end of a
    ``with`` statement or :meth:`Connections.close`.

    A response in a variable could keep its connection open for much longer: an error refers to the
    variables of all functions that it has passed through.
    """

    def __init__(self, response: Any, others: set[Held]) -> None:
        self.response = response
        self._others = others

    def __enter__(self) -> Self:
        self._others.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._others.discard(self)
        self.response = None


class Connections:
    """Connects with ``connect``, which blocks, in a thread. Nothing else references the stores and
    their responses, so dropping them closes their sockets."""

    def __init__(self, uri: str, connect: Callable[[Requests], Any], threads: Threads) -> None:
        """Take ``uri``, redacted, for messages."""
        self._uri = uri
        self._connect = connect
        self._threads = threads
        self._connecting = asyncio.Lock()
        self._stores: dict[Requests, Any] = {}
        self._held: set[Held] = set()
        self._were_used = False
        self._closed = False

    async def open(self, requests: Requests) -> None:
        """Connect the store for this kind of request if needed. Raises StorageError and
        UriError."""
        runtime.use(self._uri)
        async with self._connecting:
            self.check_open()
            if requests not in self._stores:
                with connecting(self._uri):
                    store = await self._threads.run(self._connect, requests)
                self.check_open()
                self._stores[requests] = store
                self._were_used = True

    def ask(self, requests: Requests, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of obstore with the store for this kind of request, which must be
        open."""
        import obstore

        self.check_open()
        return getattr(obstore, method)(self._stores[requests], *args, **kwargs)

    def hold(self, response: Any) -> Held:
        """Return ``response``, to be used in a ``with`` statement."""
        return Held(response, self._held)

    def check_open(self) -> None:
        """Raise StorageError after close()."""
        if self._closed:
            raise StorageError("the driver is closed", uri=self._uri)

    def renew(self) -> None:
        """Reconnect for later requests. Requests in flight keep their stores."""
        self._stores.clear()

    def refuse_requests(self) -> None:
        """Reject further requests. Requests in flight continue."""
        self._closed = True

    async def close(self) -> None:
        """Drop the stores and their responses."""
        self.refuse_requests()
        for held in tuple(self._held):
            held.__exit__()
        self._stores.clear()
        if self._were_used:  # also by a store that was renewed, or dropped by a cancelled close()
            await runtime.wake()
