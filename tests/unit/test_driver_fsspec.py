"""fsspec's file systems as storage: options, secrets, errors, and uploads that fail."""

from __future__ import annotations

import asyncio
import email.utils
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from support.drivers import asynchronous, bare, contents, used

from holdfast.drivers.contract import Driver
from holdfast.drivers.fsspec.kinds import options_of
from holdfast.drivers.local.names import temporary_name
from holdfast.drivers.registry import driver_class, open_driver
from holdfast.errors import (
    AccessError,
    BusyError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)


class ShelfFile(AbstractBufferedFile):
    """A file of a shelf: its blocks are kept aside, and shown when it is closed."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.broken:
            raise self.fs.broken
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.shelf[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        type(self.fs).discarded += 1


class Catalog(AbstractFileSystem):
    """An object store: no folders, no rename; an object appears whole, when its file is closed."""

    protocol = "oci"
    shelf: ClassVar[dict[str, bytes]] = {}
    discarded: ClassVar[int] = 0
    broken: ClassVar[Exception | None] = None
    settings: ClassVar[Any] = None
    """Settings of the last instance that was made."""

    def __init__(
        self,
        limit: int = 5,
        region: str = "here",
        settings: Any = None,
        strict: bool = False,
        **kw: Any,
    ):
        super().__init__(**kw)
        type(self).settings = settings
        type(self).discarded = 0

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> ShelfFile:
        if mode == "rb":
            self.info(path)
        names = ("block_size", "autocommit", "cache_type")
        kept = {name: kwargs[name] for name in names if kwargs.get(name)}
        return ShelfFile(self, path, mode, size=len(self.shelf.get(path, b"")), **kept)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        if self.broken:
            raise self.broken
        return self.shelf[self.info(path)["name"]][start:end]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if path not in self.shelf:
            raise FileNotFoundError(path)
        found = {"name": path, "size": len(self.shelf[path]), "type": "file"}
        return {**found, "LastModified": "2020-01-01T00:00:00Z"}

    def find(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {name: self.info(name) for name in list(self.shelf) if name.startswith(path)}

    def rm_file(self, path: str) -> None:
        self.shelf.pop(path, None)


@pytest.fixture
def shelf() -> Iterator[type[Catalog]]:
    """Return an empty object store that fsspec knows under one protocol."""
    register_implementation("oci", Catalog, clobber=True)
    Catalog.shelf.clear()
    Catalog.broken = None
    yield Catalog
    Catalog.broken = None


@pytest.fixture(params=["memory", "file", "shelf"])
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, shelf: type[Catalog]
) -> Iterator[Driver]:
    """Drivers whose files are copied into place, renamed, or shown when they are closed."""
    MemoryFileSystem.store.clear()
    uris = {"memory": "memory://run", "file": f"file://{tmp_path}/run", "shelf": "oci://bucket/run"}
    driver = bare(f"fsspec+{uris[request.param]}")
    yield driver
    asyncio.run(driver.close())
    MemoryFileSystem.store.clear()


def test_each_protocol_has_a_driver_with_its_options(shelf: type[Catalog]) -> None:
    """The named arguments of the file system, typed by their defaults, and the driver's own."""
    cls = driver_class("fsspec+oci")
    ours = {"part_size", "threads", "object_max_nbytes"}
    assert set(cls.OPTIONS) == {"limit", "region", "settings", "strict", *ours}
    parsed = {name: cls.OPTIONS[name].parse for name in cls.OPTIONS}
    assert (parsed["limit"]("7"), parsed["region"]("7"), parsed["strict"]("on")) == (7, "7", True)
    texts = {"7": "7", "true": True, '{"a": [1]}': {"a": [1]}}
    assert {text: parsed["settings"](text) for text in texts} == texts
    with pytest.raises(ValueError, match="JSON"):
        parsed["settings"]("{")
    assert options_of("oci", Catalog)["limit"].default == 5


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "fsspec+oci://bucket/run?colour=red",
            "Known options: limit, object_max_nbytes, part_size",
        ),
        ("fsspec+oci://bucket/run?limit=many", "'limit' must be a whole number"),
        ("fsspec+oci://", "no place for checkpoints"),
        ("fsspec+file://relative", "three slashes"),
        ("fsspec+nonesuch://x", "fsspec knows no nonesuch"),
        ("fsspec+dropbox://x", "cannot be imported"),
    ],
)
def test_uris_that_cannot_be_are_refused(shelf: type[Catalog], uri: str, message: str) -> None:
    """Unknown options and protocols, wrong values, and roots that are none, before any I/O."""
    with pytest.raises(UriError, match=message):
        open_driver(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "fsspec+oci://bucket/run?settings=%7B%22secret%22%3A%22hunter2%22%7D",
        "fsspec+oci://bucket/run?settings=%5B%7B%22api_key%22%3A%22hunter2%22%7D%5D",
        "fsspec+ftp://me:hunter2@host/run",
        "fsspec+ftp://host/run?password=hunter2",
    ],
)
def test_secrets_are_refused_and_not_repeated(shelf: type[Catalog], uri: str) -> None:
    """A secret may be an option, a part of one, or before the host. The error does not show it."""
    with pytest.raises(UriError, match="secret") as caught:
        open_driver(uri)
    assert "hunter2" not in str(caught.value) + repr(caught.value)


@asynchronous
async def test_options_reach_the_file_system(shelf: type[Catalog]) -> None:
    """Given options arrive as values of their types; nothing is cached between drivers."""
    driver = bare("fsspec+oci://bucket/run?settings=%7B%22a%22:1%7D&part_size=5MiB&threads=3")
    await driver.put("x", b"")
    assert (driver.traits.part_nbytes, driver.traits.concurrency) == (5 << 20, 3)
    assert open_driver("fsspec+ftp://host/run").traits.concurrency == 1  # nobody knows it
    await driver.close()
    assert shelf.settings == {"a": 1}


@pytest.mark.parametrize("nbytes", [0, 3 << 20])
def test_an_upload_that_is_not_committed_leaves_nothing(driver: Driver, nbytes: int) -> None:
    """An upload that is aborted, incomplete, or simply left shows no object and keeps no file."""

    async def run() -> None:
        for end in ("abort", "incomplete", "left"):
            upload = await driver.create(f"data/{end}", nbytes + 1)
            await upload.write(0, memoryview(bytes(nbytes)))
            if end == "abort":
                await upload.abort()
                await upload.abort()
            elif end == "incomplete":
                with pytest.raises(StorageError, match="never written"):
                    await upload.commit()
        assert await contents(driver) == {}
        await driver.close()

    asyncio.run(run())
    gc.collect()
    fs, root = url_to_fs(driver.uri.removeprefix("fsspec+"))
    assert [name for name in fs.find(root) if not fs.isdir(name)] == []


@asynchronous
async def test_a_failed_write_discards_what_the_store_has(shelf: type[Catalog]) -> None:
    """The store's error comes as one of ours, and its upload is discarded, not completed."""
    driver, half = bare("fsspec+oci://bucket/run?part_size=1MiB"), memoryview(bytes(2 << 20))
    upload = await driver.create("x", 4 << 20)
    await upload.write(0, half)
    shelf.broken = ConnectionResetError("gone")
    with pytest.raises(StorageDownError, match="write failed"):
        await upload.write(2 << 20, half)
    shelf.broken = None
    await upload.abort()
    with pytest.raises(StorageError, match="over"):
        await upload.write(2 << 20, half)
    await driver.close()
    gc.collect()
    assert (shelf.shelf, shelf.discarded) == ({}, 1)


def test_dead_uploads_are_swept_after_a_day(tmp_path: Path) -> None:
    """A temporary file that has not changed for a day goes; a younger one may belong to somebody."""
    (tmp_path / "data").mkdir()
    old, young = (tmp_path / "data" / temporary_name("0") for _ in range(2))
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    used(f"fsspec+file://{tmp_path}", lambda driver: driver.sweep("data"))
    assert list((tmp_path / "data").iterdir()) == [young]


class NoCredentialsError(Exception):
    """As a cloud's library has it."""


class EndpointConnectionError(Exception):
    """As a cloud's library has it."""


class ClientError(Exception):
    """As botocore has it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"{status}")
        self.response = {
            "Error": {},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        }


class StatusError(Exception):
    """As aiohttp has it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"{status}")
        self.status, self.headers = status, headers


def made_of(error: Exception, cause: Exception) -> Exception:
    """``error``, raised from ``cause``."""
    error.__cause__ = cause
    return error


IN_AN_HOUR = {"Retry-After": email.utils.formatdate(time.time() + 3600, usegmt=True)}


@pytest.mark.parametrize(
    ("raised", "expected", "retry_after_s"),
    [
        (FileNotFoundError("x"), NotFoundError, None),
        (PermissionError("x"), AccessError, None),
        (FileExistsError(), ExistsError, None),
        (TimeoutError(), StorageDownError, None),
        (OSError(5, "Input/output error"), StorageDownError, None),
        (NoCredentialsError("none found"), AccessError, None),
        (EndpointConnectionError("https://me:hunter2@h?token=hunter2"), StorageDownError, None),
        (NotImplementedError(), StorageError, None),
        (OSError("odd"), StorageError, None),
        # The class follows from the status of an answer, in any wrapper.
        (StatusError(503, **{"Retry-After": "7"}), BusyError, 7.0),
        (StatusError(503, **IN_AN_HOUR), BusyError, pytest.approx(1800, abs=1801)),
        (StatusError(503, **{"Retry-After": "soon"}), BusyError, None),
        (StatusError(507), FullError, None),
        (StatusError(500), StorageDownError, None),
        (StatusError(400), StorageError, None),
        # s3fs makes an OSError of what botocore raises; fsspec's own http takes failure for absence.
        (made_of(OSError("Slow Down"), ClientError(503, **{"retry-after": "7"})), BusyError, 7.0),
        (made_of(FileNotFoundError("x"), StatusError(502)), StorageDownError, None),
        (made_of(FileNotFoundError("x"), ConnectionResetError()), StorageDownError, None),
        (made_of(FileNotFoundError("x"), StatusError(404)), NotFoundError, None),
        (made_of(PermissionError("x"), ClientError(403)), AccessError, None),
    ],
)
def test_errors_are_ours(
    shelf: type[Catalog], raised: Exception, expected: type[StorageError], retry_after_s: Any
) -> None:
    """Any error of a file system comes as the kind that a handler knows, without secrets.

    A server that asks for patience is busy, and an object that it only fails to show is not absent.
    """
    shelf.shelf["bucket/run/x"] = b"content"
    shelf.broken = raised
    with pytest.raises(StorageError) as caught:
        asyncio.run(bare("fsspec+oci://bucket/run").get("x"))
    error = caught.value
    assert type(error) is expected
    assert (error.uri, error.key) == ("fsspec+oci://bucket/run", "x")
    assert isinstance(error.__cause__, Exception)
    assert "hunter2" not in str(error)
    assert getattr(error, "retry_after_s", None) == retry_after_s
