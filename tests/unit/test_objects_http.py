"""Checkpoints on a web server (``http://``): loaded by range requests, and read-only."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import holdfast
from holdfast.drivers.objects.http import HttpDriver
from holdfast.drivers.uri import parse
from holdfast.errors import DamagedError, NotACheckpointError, NotFoundError, StorageError

pytest.importorskip("obstore", reason="obstore is not installed")


class _Handler(BaseHTTPRequestHandler):
    """Files below the server's folder, whole or in ranges."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        folder: Path = self.server.folder  # type: ignore[attr-defined]
        path = folder / unquote(self.path).lstrip("/")
        content = path.read_bytes() if path.is_file() else None
        if content is None:
            self._send(404, b"", 0, "")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(200, content if body else b"", len(content), "")
            return
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
        if start >= len(content):
            self._send(416, b"", 0, f"bytes */{len(content)}")
            return
        self._send(
            206, content[start:stop], stop - start, f"bytes {start}-{stop - 1}/{len(content)}"
        )

    def _send(self, status: int, body: bytes, nbytes: int, shown: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("ETag", '"1"')
        if shown:
            self.send_header("Content-Range", shown)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _WholeHandler(_Handler):
    """Handler that ignores ranges and sends whole files, as servers may and Python's own does."""

    def do_GET(self) -> None:
        del self.headers["Range"]
        super().do_GET()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The URL of a web server that shows ``tmp_path``."""
    with _served(tmp_path, _Handler) as url:
        yield url


@contextmanager
def _served(folder: Path, handler: type[_Handler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.folder = folder  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_checkpoint_is_loaded_from_a_web_server(site: str, tmp_path: Path) -> None:
    """A checkpoint loads from a web server, whole and in slices; a missing one raises an error."""
    state = {"w": torch.randn(6_000_000), "ü x": torch.arange(5), "step": 3}
    holdfast.save(tmp_path / "run/step 3", state)
    found = holdfast.load(f"{site}/run/step%203")
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["ü x"], state["ü x"])
    with holdfast.open(f"{site}/run/step%203") as checkpoint:
        assert torch.equal(checkpoint.read("w", rows=slice(100, 200)), state["w"][100:200])
    with pytest.raises(NotACheckpointError):
        holdfast.load(f"{site}/run/step%204")


def test_nothing_on_a_web_server_can_be_changed_or_listed(site: str, tmp_path: Path) -> None:
    """Calls that change or list a web server raise an error that says so; reads work."""
    (tmp_path / "x").write_bytes(b"content")

    async def use() -> None:
        driver, into = HttpDriver.open(parse(site)), bytearray(4)
        await driver.read("x", 2, memoryview(into))
        assert (bytes(into), (await driver.stat("x")).nbytes, await driver.get("x")) == (
            b"nten",
            7,
            b"content",
        )
        for call in (driver.get("y"), driver.stat("y"), driver.read("y", 0, memoryview(into))):
            with pytest.raises(NotFoundError):
                await call
        for start in (5, 100):
            with pytest.raises(DamagedError, match="ends at byte 7"):
                await driver.read("x", start, memoryview(into))
        calls = [
            driver.put("x", b""),
            driver.create("x", 1),
            driver.delete("x"),
            driver.delete_all("x"),
            driver.sweep("x"),
        ]
        for call in [*calls, anext(driver.list())]:  # type: ignore[call-overload]
            with pytest.raises(StorageError, match=r"read-only|cannot list"):
                await call
        await driver.close()

    asyncio.run(use())
    assert (tmp_path / "x").read_bytes() == b"content"


def test_a_web_server_without_ranges_is_told_of(tmp_path: Path) -> None:
    """The error for a server without range requests names the fault and a suitable server."""
    holdfast.save(tmp_path / "run", {"x": torch.arange(10)})
    with (
        _served(tmp_path, _WholeHandler) as url,
        pytest.raises(
            StorageError,
            match=r"Range request not supported.*a server, or a gateway, that answers ranges",
        ),
    ):
        holdfast.load(f"{url}/run")
