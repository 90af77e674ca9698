"""Mixin for drivers that can only read."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from ..errors import StorageError
from .contract import check_key


class ReadOnly:
    """Rejects every writing method with a StorageError whose message is ``reading_only``. List it
    before the driver base class."""

    uri: str
    reading_only: ClassVar[str]

    async def _refuse(self, key: str, *_: object, **how: object) -> NoReturn:
        check_key(key, uri=self.uri)
        raise StorageError(self.reading_only, uri=self.uri, key=key, advice="Save to another URI.")

    create = put = delete = _refuse

    async def delete_all(self, prefix: str) -> NoReturn:
        await self._refuse(prefix)

    sweep = delete_all
