"""fsspec's file systems as storage: options, secrets, errors, and uploads that fail, on file
systems that differ in how a file comes to be seen."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from support.drivers import contents

import holdfast
from holdfast.drivers.fsspec.driver import FsspecDriver
from holdfast.drivers.fsspec.kinds import modified_s
from holdfast.drivers.fsspec.options import options_of
from holdfast.drivers.local.names import temporary_name
from holdfast.drivers.registry import driver_class, open_driver
from holdfast.drivers.uri import parse
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
    """A file of a shelf: what is written is kept aside, block by block, and shown when it is
    closed."""

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
    """Of the last one that was made."""

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
        kept = {
            name: kwargs[name]
            for name in ("block_size", "autocommit", "cache_type")
            if kwargs.get(name)
        }
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
        return {
            "name": path,
            "size": len(self.shelf[path]),
            "type": "file",
            "LastModified": "2020-01-01T00:00:00Z",
        }

    def find(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {name: self.info(name) for name in list(self.shelf) if name.startswith(path)}

    def rm_file(self, path: str) -> None:
        self.shelf.pop(path, None)


@pytest.fixture
def shelf() -> Iterator[type[Catalog]]:
    """An empty object store, known to fsspec under the protocol of one."""
    register_implementation("oci", Catalog, clobber=True)
    Catalog.shelf.clear()
    Catalog.broken = None
    yield Catalog
    Catalog.broken = None


def opened_by_others(driver: FsspecDriver) -> tuple[AbstractFileSystem, str]:
    """The driver's file system, and its root there, as any program that uses fsspec opens them."""
    return url_to_fs(driver.uri.removeprefix("fsspec+"))


def bare(uri: str) -> FsspecDriver:
    """The driver for ``uri``, without layers."""
    parsed = parse(uri)
    driver = driver_class(parsed.scheme).open(parsed)
    assert isinstance(driver, FsspecDriver)
    return driver


@pytest.fixture(params=["memory", "file", "shelf"])
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, shelf: type[Catalog]
) -> Iterator[FsspecDriver]:
    """One driver of each kind: what is copied into place, what is renamed, and what is shown when
    it is closed."""
    MemoryFileSystem.store.clear()
    uris = {
        "memory": "fsspec+memory://run",
        "file": f"fsspec+file://{tmp_path}/run",
        "shelf": "fsspec+oci://bucket/run",
    }
    driver = bare(uris[request.param])
    yield driver
    asyncio.run(driver.close())
    MemoryFileSystem.store.clear()


# URIs


def test_each_protocol_has_a_driver_with_its_options(shelf: type[Catalog]) -> None:
    """The named arguments of the file system, typed by their defaults, and the driver's own."""
    cls = driver_class("fsspec+oci")
    ours = {"part_size", "threads", "object_max_nbytes"}
    assert set(cls.OPTIONS) == {"limit", "region", "settings", "strict", *ours}
    parsed = {name: cls.OPTIONS[name].parse for name in cls.OPTIONS}
    assert (parsed["limit"]("7"), parsed["region"]("7"), parsed["strict"]("on")) == (7, "7", True)
    assert [parsed["settings"](text) for text in ("7", "true", '{"a": [1]}')] == [
        "7",
        True,
        {"a": [1]},
    ]
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
    """As an option, inside of one, or before the host: an error that does not show it."""
    with pytest.raises(UriError, match="secret") as caught:
        open_driver(uri)
    assert "hunter2" not in str(caught.value) + repr(caught.value)


def test_options_reach_the_file_system(shelf: type[Catalog]) -> None:
    """Those that were given, as values of their types; nothing is cached between drivers."""

    async def run() -> None:
        driver = bare("fsspec+oci://bucket/run?settings=%7B%22a%22:1%7D&part_size=5MiB&threads=3")
        await driver.put("x", b"")
        assert driver.traits.part_nbytes == 5 << 20
        await driver.close()

    asyncio.run(run())
    assert shelf.settings == {"a": 1}


def test_a_location_is_decoded(tmp_path: Path) -> None:
    """What a URI writes as %20 is a space for the file system."""
    asyncio.run(bare(f"fsspec+file://{tmp_path}/a%20b").put("x", b"y"))
    assert (tmp_path / "a b/x").read_bytes() == b"y"


def test_traits_are_honest(tmp_path: Path) -> None:
    """Parts come one after the other, and no exclusive put is called atomic. Of a file system that
    nobody knows, one thread at a time."""
    traits = open_driver(f"fsspec+file://{tmp_path}").traits
    assert (traits.part_order, traits.exclusive_is_atomic, traits.concurrency) == (
        "serial",
        False,
        8,
    )
    assert open_driver("fsspec+ftp://host/run").traits.concurrency == 1


# Uploads


def test_objects_are_where_fsspec_says(driver: FsspecDriver, tmp_path: Path) -> None:
    """Another program that uses fsspec finds them under their keys."""

    async def run() -> None:
        await driver.put("a/b", b"content")
        fs, root = opened_by_others(driver)
        assert fs.cat_file(f"{root}/a/b") == b"content"
        assert await contents(driver) == {"a/b": b"content"}

    asyncio.run(run())


@pytest.mark.nightly(8)
@pytest.mark.parametrize("nbytes", [0, 5, 3 << 20])
def test_an_upload_that_is_not_committed_leaves_nothing(driver: FsspecDriver, nbytes: int) -> None:
    """Aborted, incomplete, or simply left: no object, and no file of any name, also once the
    garbage is collected."""

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
    fs, root = opened_by_others(driver)
    assert [name for name in fs.find(root) if not fs.isdir(name)] == []


def test_a_failed_write_discards_what_the_store_has(shelf: type[Catalog]) -> None:
    """The store's error comes as one of ours, and its upload is discarded, not completed."""

    async def run() -> None:
        driver = bare("fsspec+oci://bucket/run?part_size=1MiB")
        upload = await driver.create("x", 4 << 20)
        await upload.write(0, memoryview(bytes(2 << 20)))
        shelf.broken = ConnectionResetError("gone")
        with pytest.raises(StorageDownError, match="write failed"):
            await upload.write(2 << 20, memoryview(bytes(2 << 20)))
        shelf.broken = None
        await upload.abort()
        with pytest.raises(StorageError, match="over"):
            await upload.write(2 << 20, memoryview(bytes(2 << 20)))
        await driver.close()

    asyncio.run(run())
    gc.collect()
    assert (shelf.shelf, shelf.discarded) == ({}, 1)


def test_parts_come_in_order(driver: FsspecDriver) -> None:
    """A part out of turn is an error, not a wrong object."""

    async def run() -> None:
        upload = await driver.create("x", 10)
        with pytest.raises(StorageError, match="0 is next, not 5"):
            await upload.write(5, memoryview(b"12345"))
        await upload.abort()

    asyncio.run(run())


def test_dead_uploads_are_swept_after_a_day(tmp_path: Path) -> None:
    """A temporary file that has not changed for a day goes; a younger one may belong to somebody."""
    (tmp_path / "data").mkdir()
    old, young = (tmp_path / "data" / temporary_name("0") for _ in range(2))
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)

    async def run() -> None:
        driver = open_driver(f"fsspec+file://{tmp_path}")
        await driver.sweep("data")
        await driver.close()

    asyncio.run(run())
    assert list((tmp_path / "data").iterdir()) == [young]


# Errors


class NoCredentialsError(Exception):
    """As a cloud's library has it."""


class EndpointConnectionError(Exception):
    """As a cloud's library has it."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FileNotFoundError("x"), NotFoundError),
        (PermissionError("x"), AccessError),
        (FileExistsError(), ExistsError),
        (TimeoutError(), StorageDownError),
        (ConnectionResetError(), StorageDownError),
        (OSError(5, "Input/output error"), StorageDownError),
        (NoCredentialsError("none found"), AccessError),
        (
            EndpointConnectionError("https://me:hunter2@host?token=hunter2 refused"),
            StorageDownError,
        ),
        (NotImplementedError(), StorageError),
        (OSError("odd"), StorageError),
    ],
)
def test_errors_are_ours(
    shelf: type[Catalog], raised: Exception, expected: type[StorageError]
) -> None:
    """Whatever a file system raises comes as the kind that a handler knows, with URI, key and
    cause, and no secret."""
    shelf.shelf["bucket/run/x"] = b"content"
    shelf.broken = raised

    async def run() -> None:
        with pytest.raises(StorageError) as caught:
            await bare("fsspec+oci://bucket/run").get("x")
        error = caught.value
        assert type(error) is expected
        assert (error.uri, error.key) == ("fsspec+oci://bucket/run", "x")
        assert isinstance(error.__cause__, Exception)
        assert "hunter2" not in str(error)

    asyncio.run(run())


class HttpError(Exception):
    """As requests has it, and Azure's libraries: with the answer."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"{status}")
        self.response = SimpleNamespace(status_code=status, headers=headers)


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
        (StatusError(503, **{"Retry-After": "7"}), BusyError, 7.0),
        (HttpError(429, **{"Retry-After": "7"}), BusyError, 7.0),
        (HttpError(503, **IN_AN_HOUR), BusyError, pytest.approx(1800, abs=1801)),
        (HttpError(503, **{"Retry-After": "soon"}), BusyError, None),
        (HttpError(503), BusyError, None),
        # s3fs makes an OSError of what botocore raises, and fsspec's own http takes any failure for
        # absence.
        (
            made_of(OSError(errno.EBUSY, "Slow Down"), ClientError(503, **{"retry-after": "7"})),
            BusyError,
            7.0,
        ),
        (made_of(FileNotFoundError("x"), StatusError(503, **{"Retry-After": "7"})), BusyError, 7.0),
        (made_of(FileNotFoundError("x"), StatusError(502)), StorageDownError, None),
        (made_of(FileNotFoundError("x"), ConnectionResetError()), StorageDownError, None),
        (made_of(FileNotFoundError("x"), EndpointConnectionError()), StorageDownError, None),
        (made_of(FileNotFoundError("x"), StatusError(404)), NotFoundError, None),
        (made_of(PermissionError("x"), ClientError(403)), AccessError, None),
        (StatusError(401), AccessError, None),
        (HttpError(507), FullError, None),
        (HttpError(500), StorageDownError, None),
        (HttpError(400), StorageError, None),
    ],
)
def test_what_a_server_answered_is_honoured(
    shelf: type[Catalog],
    raised: Exception,
    expected: type[StorageError],
    retry_after_s: float | None,
) -> None:
    """The status counts, in whatever it is wrapped, and so does Retry-After, in seconds or as a
    date: a server that asks for patience is busy, and not permanently broken; nor is an object
    absent that it has only not shown."""
    shelf.shelf["bucket/run/x"] = b"content"
    shelf.broken = raised

    async def run() -> None:
        with pytest.raises(StorageError) as caught:
            await bare("fsspec+oci://bucket/run").get("x")
        assert type(caught.value) is expected
        assert getattr(caught.value, "retry_after_s", None) == retry_after_s

    asyncio.run(run())


class BusyAtFirst(BaseHTTPRequestHandler):
    """Asks for a second's patience twice, HEAD and GET, then has one object."""

    protocol_version = "HTTP/1.1"
    busy: ClassVar[int] = 2

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        busy, type(self).busy = self.busy > 0, self.busy - 1
        self.send_response(503 if busy else 200)
        self.send_header("Retry-After", "1")
        self.send_header("Content-Length", "0" if busy else "7")
        self.end_headers()
        if not busy and self.command == "GET":
            self.wfile.write(b"content")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.heavy
def test_a_busy_web_server_is_asked_again_when_it_says() -> None:
    """For real, through fsspec's own ``http``: a second after a 503 that asks for one, and then the
    object is read."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install aiohttp")
    server = ThreadingHTTPServer(("127.0.0.1", 0), BusyAtFirst)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    async def run() -> float:
        driver = open_driver(f"fsspec+http://127.0.0.1:{server.server_port}", retries=3)
        began_s = time.monotonic()
        assert await driver.get("x") == b"content"
        await driver.close()
        return time.monotonic() - began_s

    try:
        assert asyncio.run(run()) >= 1.0
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"mtime": 12.5}, 12.5),
        ({"LastModified": "1970-01-01T00:01:00+00:00"}, 60.0),
        ({"updated": "1970-01-01T00:01:00Z", "created": 5}, 60.0),
        ({"mtime": "yesterday"}, 0.0),
        ({}, 0.0),
    ],
)
def test_times_are_read_whatever_they_are_called(info: dict[str, Any], expected: float) -> None:
    """Numbers, texts with a zone; 0 where nothing can be told, which no collector takes for old."""
    assert modified_s(info) == expected


# Through the public API


@pytest.mark.heavy
@pytest.mark.parametrize("where", ["memory", "file", "shelf"])
def test_a_checkpoint_is_saved_loaded_and_replaced(
    where: str, tmp_path: Path, shelf: type[Catalog], rng: np.random.Generator
) -> None:
    """Bit for bit, over several chunks; the second save replaces the first."""
    uris = {
        "memory": "fsspec+memory://all",
        "file": f"fsspec+file://{tmp_path}/all",
        "shelf": "fsspec+oci://b/all",
    }
    for step in (1, 2):
        state = {"w": rng.standard_normal((3000, 1000)), "b": rng.standard_normal(10), "step": step}
        holdfast.save(uris[where], state)
        back = holdfast.load(uris[where])
        assert back["step"] == step
        assert (back["w"] == state["w"]).all()
    with holdfast.open(uris[where]) as checkpoint:
        assert checkpoint.verify().ok
    MemoryFileSystem.store.clear()
