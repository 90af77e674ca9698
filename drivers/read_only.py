"""What drivers for reading only do with everything that would change their storage."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ..errors import StorageError
from .contract import Upload, check_key

__all__ = ["ReadOnly"]


class ReadOnly:
    """Refuses each method that writes with a StorageError. Named before the driver's base class.
    ``reading_only``: the sentence that says so."""

    uri: str
    reading_only: ClassVar[str]

    async def create(self, key: str, nbytes: int) -> Upload:
        """Raises StorageError."""
        self._refuse(key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """Raises StorageError."""
        self._refuse(key)

    async def delete(self, key: str) -> None:
        """Raises StorageError."""
        self._refuse(key)

    async def delete_all(self, prefix: str) -> None:
        """Raises StorageError."""
        self._refuse(prefix)

    async def sweep(self, prefix: str) -> None:
        """Raises StorageError."""
        self._refuse(prefix)

    def _refuse(self, key: str) -> NoReturn:
        check_key(key, uri=self.uri)
        raise StorageError(self.reading_only, uri=self.uri, key=key, advice="Save to another URI.")
