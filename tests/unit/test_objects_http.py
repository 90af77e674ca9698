"""Checkpoints on a web server (``http://``): loaded by range requests, and read-only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from support.drivers import asynchronous, changes, keys, reads
from support.servers.scripted import Answer, Request, ScriptedServer

import holdfast
from holdfast.drivers.objects.http import HttpDriver
from holdfast.drivers.uri import parse
from holdfast.errors import DamagedError, NotACheckpointError, NotFoundError, StorageError

pytest.importorskip("obstore", reason="obstore is not installed")


def showing(folder: Path, *, ranges: bool = True) -> ScriptedServer:
    """A web server that shows the files of a folder, whole or in ranges."""

    def answer(asked: Request) -> Answer:
        path = folder / unquote(asked.path).lstrip("/")
        if not path.is_file():
            return Answer(404)
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        if wanted is None or not ranges:
            return Answer(body=content)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
        if start >= len(content):
            return Answer(416, headers={"content-range": f"bytes */{len(content)}"})
        shown = {"content-range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return Answer(206, content[start:stop], shown)

    return ScriptedServer(answer)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The URL of a web server that shows ``tmp_path``."""
    with showing(tmp_path) as server:
        yield server.url


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


@asynchronous
async def test_nothing_on_a_web_server_can_be_changed_or_listed(site: str, tmp_path: Path) -> None:
    """Calls that change or list a web server raise an error that says so; reads work."""
    (tmp_path / "x").write_bytes(b"content")
    driver, into = HttpDriver.open(parse(site)), memoryview(bytearray(4))
    await driver.read("x", 2, into)
    assert (into, await driver.get("x")) == (b"nten", b"content")
    assert (await driver.stat("x")).nbytes == 7
    for call in reads(driver, "y"):
        with pytest.raises(NotFoundError):
            await call
    for start in (5, 100):
        with pytest.raises(DamagedError, match="ends at byte 7"):
            await driver.read("x", start, into)
    for call in (*changes(driver, "x"), keys(driver)):
        with pytest.raises(StorageError, match=r"read-only|cannot list"):
            await call
    await driver.close()
    assert (tmp_path / "x").read_bytes() == b"content"


def test_a_web_server_without_ranges_is_told_of(tmp_path: Path) -> None:
    """The error for a server without range requests names the fault and a suitable server."""
    holdfast.save(tmp_path / "run", {"x": torch.arange(10)})
    says = "Range request not supported.*a server, or a gateway, that answers ranges"
    with showing(tmp_path, ranges=False) as server, pytest.raises(StorageError, match=says):
        holdfast.load(f"{server.url}/run")
