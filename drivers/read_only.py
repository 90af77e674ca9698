"""Mixin for drivers that can only read."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ..errors import StorageError
from .contract import Upload, check_key

__all__ = ["ReadOnly"]


class ReadOnly:
    """Rejects every writing method with a StorageError whose message is ``reading_only``. List it
    before the driver base class."""

    uri: str
    reading_only: ClassVar[str]

    async def create(self, key: str, nbytes: int) -> Upload:
        """Raise StorageError."""
        self._refuse(key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """Raise StorageError."""
        self._refuse(key)

    async def delete(self, key: str) -> None:
        """Raise StorageError."""
        self._refuse(key)

    async def delete_all(self, prefix: str) -> None:
        """Raise StorageError."""
        self._refuse(prefix)

    async def sweep(self, prefix: str) -> None:
        """Raise StorageError."""
        self._refuse(prefix)

    def _refuse(self, key: str) -> NoReturn:
        check_key(key, uri=self.uri)
        raise StorageError(self.reading_only, uri=self.uri, key=key, advice="Save to another URI.")
