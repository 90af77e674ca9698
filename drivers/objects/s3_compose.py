"""Uploads to S3 with copies (UploadPartCopy), by botocore."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from ...errors import NotFoundError
from ..contract import Buffer, Driver
from .compose import ComposedUpload
from .uploads import Target

_SENT_NBYTES = 1 << 20


class Body(io.RawIOBase):
    """A request's content, which botocore reads from the caller's memory without copying it."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).toreadonly()
        self._at = 0

    def md5(self) -> str:
        """Return the digest, as the store takes it to check the content."""
        digest = hashlib.md5(self._data, usedforsecurity=False).digest()
        return base64.b64encode(digest).decode()

    def read(self, nbytes: int | None = -1) -> Any:
        """Return up to 1 MiB, whatever ``nbytes``: botocore asks for 16 KiB at a time."""
        piece = self._data[self._at : self._at + _SENT_NBYTES]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


class Ask(Protocol):
    """Sends one request for the object. ``doing`` starts messages, and ``operation`` names
    botocore's method. Raises StorageError."""

    def __call__(
        self, doing: str, operation: str, **params: Any
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return the response."""


class S3ComposedUpload(ComposedUpload):
    """An upload to S3 with copies."""

    def __init__(
        self,
        target: Target,
        ask: Ask,
        copied_from: Callable[[Driver, str], dict[str, Any]],
    ) -> None:
        """``copied_from`` returns the parameters that name an object of another driver."""
        super().__init__(target)
        self._ask = ask
        self._copied_from = copied_from
        self._upload: dict[str, str] = {}

    async def _begin(self) -> None:
        answer = await self._ask("begin", "create_multipart_upload")
        self._upload = {"UploadId": answer["UploadId"]}

    async def _send_part(self, number: int, data: Buffer) -> str:
        params = {"PartNumber": number, "Body": data, **self._upload}
        return str((await self._ask("write", "upload_part", **params))["ETag"])

    async def _copy_part(self, number: int, source: Driver, key: str, start: int, stop: int) -> str:
        answer = await self._ask(
            "copy",
            "upload_part_copy",
            PartNumber=number,
            CopySourceRange=f"bytes={start}-{stop - 1}",
            **self._copied_from(source, key),
            **self._upload,
        )
        return str(answer["CopyPartResult"]["ETag"])

    async def _complete(self, tags: dict[int, str]) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in tags.items()]
        params = {"MultipartUpload": {"Parts": parts}, **self._upload}
        await self._ask("commit", "complete_multipart_upload", **params)

    async def _drop(self) -> bool:
        if not self._upload:
            return False  # the store may have begun it
        with suppress(NotFoundError):  # completed, or dropped by another process
            await self._ask("abort", "abort_multipart_upload", **self._upload)
        return True
