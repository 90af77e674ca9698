"""``http://host/root`` and ``https://host/root``: read-only access to checkpoints on any web
server.

The server must support range requests. It cannot list files, so a checkpoint is opened by its own
URI, and its manifest names its files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from ...errors import StorageError
from ..contract import ObjectInfo, ReadOnly, check_key
from ..options import Option
from ..uri import Uri
from .driver import ObjectDriver
from .options import COMMON_OPTIONS, Requests

_READING = ("part_size", "concurrency", "timeout", "read_timeout", "deadline", "ca", "proxy")


class HttpDriver(ReadOnly, ObjectDriver):
    """Objects below one URL. Every writing or listing method raises StorageError."""

    reading_only: ClassVar[str] = "http:// is read-only"
    OPTIONS: ClassVar[Mapping[str, Option]] = {name: COMMON_OPTIONS[name] for name in _READING}
    deviations: ClassVar[Mapping[str, str]] = {}

    def __init__(self, uri: Uri, values: Mapping[str, Any]) -> None:
        super().__init__(uri, {"conditional": False, **values})
        self._host = f"{uri.scheme}://{self._bucket}"

    @property
    def _container(self) -> tuple[str, ...]:
        return ("http", self._host)

    def _connect(self, requests: Requests) -> Any:
        from obstore.store import HTTPStore

        make: Any = HTTPStore
        return make(self._host, **self._http(requests, self._host))

    async def _check_container(self, key: str) -> None:
        """Do nothing: a web server has no buckets."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix:
            check_key(prefix, uri=self.uri)
        raise StorageError("a web server cannot list objects", uri=self.uri, key=prefix or None)
        yield  # makes this a generator
