"""``http://host/root`` and ``https://host/root``: checkpoints that any web server hands out, for
reading only.

The server must answer ranges. It cannot be asked what there is, so nothing is listed; a checkpoint
is opened by its own URI, and its manifest says which files it has.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, NoReturn

from ...errors import StorageError
from ..contract import ObjectInfo, Upload, check_key
from ..options import Option
from ..uri import Uri
from .driver import ObjectDriver
from .options import COMMON_OPTIONS, Requests

__all__ = ["HttpDriver"]

_READING = ("part_size", "concurrency", "timeout", "read_timeout", "deadline", "ca", "proxy")


class HttpDriver(ObjectDriver):
    """What lies below one URL. Everything that would change or list it raises StorageError."""

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
        """A web server has no buckets."""

    async def create(self, key: str, nbytes: int) -> Upload:
        self._refuse(key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        self._refuse(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix:
            check_key(prefix, uri=self.uri)
        raise StorageError(
            "a web server cannot say what there is", uri=self.uri, key=prefix or None
        )
        yield  # what makes this a generator

    async def delete(self, key: str) -> None:
        self._refuse(key)

    async def delete_all(self, prefix: str) -> None:
        self._refuse(prefix)

    async def sweep(self, prefix: str) -> None:
        self._refuse(prefix)

    def _refuse(self, key: str) -> NoReturn:
        check_key(key, uri=self.uri)
        raise StorageError(
            "http:// is for reading only", uri=self.uri, key=key, advice="Save to another URI."
        )
