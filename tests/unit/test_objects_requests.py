"""Requests of drivers of object stores, their number, and the errors that answers become."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from support.commands import HOLDFAST, finished, run
from support.drivers import asynchronous, changes, keys, reads, used
from support.servers.odd_store import OddStore, kind_of
from support.servers.scripted import Answer, Request, ScriptedServer, refusal, set_credentials

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.objects.http import HttpDriver
from holdfast.drivers.uri import parse
from holdfast.errors import (
    AccessError,
    DamagedError,
    ExistsError,
    HoldfastError,
    NotACheckpointError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)

pytestmark = pytest.mark.clocked

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("botocore", reason="botocore is not installed")

MIB = 1 << 20
CLOUDS = ["s3", "gs", "az"]
BARE = "retries=0&op_timeout_s=off"
"""Options without a layer that retries."""


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set dummy credentials for all clouds, and forget the stores of other tests."""
    set_credentials(monkeypatch, tmp_path)


def uri(server: ScriptedServer, cloud: str = "s3", options: str = "") -> str:
    """Return the URI of a root at this server."""
    return (
        f"{cloud}://bucket/run?endpoint={server.url}&deadline=5s{'&' if options else ''}{options}"
    )


class Store:
    """A store with the operations of an exclusive put. ``lost``: how the answer to its first put is
    lost, if at all; ``taken``: the former content of the key."""

    def __init__(self, lost: Answer | None = None, taken: bytes | None = None) -> None:
        self.lost = lost
        self.content = taken

    def __call__(self, asked: Request) -> Answer:
        if asked.method == "PUT":
            return self._put(asked)
        if asked.method == "GET" and self.content is not None:
            return Answer(body=self.content)
        return refusal(404, "NoSuchKey")

    def _put(self, asked: Request) -> Answer:
        google = asked.headers.get("x-goog-if-generation-match") == "0"
        assert google or asked.headers.get("if-none-match") == "*"
        if self.content is not None:
            return refusal(412, "PreconditionFailed")
        self.content = asked.body
        lost, self.lost = self.lost, None
        return lost or Answer(headers={"x-goog-generation": "1"})


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize(
    "lost", [Answer(cut=True), refusal(500, "InternalError")], ids=["cut", "500"]
)
def test_an_exclusive_put_whose_answer_is_lost_succeeds(cloud: str, lost: Answer) -> None:
    """The client repeats nothing; the layer's second try finds the key taken by the put's bytes."""
    store = Store(lost)
    with ScriptedServer(store) as server:
        used(uri(server, cloud), lambda driver: driver.put("key", b"claim 1", exclusive=True))
        assert server.methods == ["PUT", "PUT", "GET"]
    assert store.content == b"claim 1"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_an_exclusive_put_does_not_take_the_object_of_another_for_its_own(cloud: str) -> None:
    """The key stays taken, even by equal bytes, and after a failed first try."""
    with ScriptedServer(Store(taken=b"claim 1")) as server, pytest.raises(ExistsError):
        used(uri(server, cloud), lambda driver: driver.put("key", b"claim 1", exclusive=True))
    store = Store()

    def overtaken(asked: Request) -> Answer:
        if asked.method == "PUT" and store.content is None:
            store.content = b"claim of another"
            return Answer(cut=True)
        return store(asked)

    with ScriptedServer(overtaken) as server, pytest.raises(ExistsError):
        used(uri(server, cloud), lambda driver: driver.put("key", b"claim 1", exclusive=True))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_conflict_of_requests_is_no_object_that_exists(cloud: str) -> None:
    """409 for another request in flight is temporary, and the layer retries."""
    answers = [refusal(409, "OperationAborted"), Answer(headers={"x-goog-generation": "1"})]
    with ScriptedServer(lambda asked: answers.pop(0)) as server:
        used(uri(server, cloud), lambda driver: driver.put("key", b"x", exclusive=True))
        assert server.methods == ["PUT", "PUT"]


NO_KEY: dict[str, str | None] = {"GOOGLE_SERVICE_ACCOUNT_KEY": None}
GIVEN = "GOOGLE_APPLICATION_CREDENTIALS"


@pytest.mark.parametrize(
    ("cloud", "variables", "kind", "said"),
    [
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": None}, UriError, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "***"}, AccessError, "Invalid Access Key"),
        ("gs", {"GOOGLE_SERVICE_ACCOUNT": "/missing"}, HoldfastError, ""),
        ("gs", NO_KEY | {GIVEN: "/missing.json"}, AccessError, "/missing.json"),
        ("gs", NO_KEY | {GIVEN: "/dev/null"}, AccessError, "service account"),
        ("gs", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"x": "hunter2'}, AccessError, "service account"),
    ],
)
def test_what_no_client_can_be_made_of_is_an_error_of_the_user(
    cloud: str,
    variables: Any,
    kind: type[HoldfastError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error, also of the command, says where to look, and shows no secret and no traceback."""
    for name, value in variables.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    root = f"{cloud}://bucket/run"
    with pytest.raises(kind) as caught:
        used(root, lambda driver: driver.get("key"))
    assert caught.value.advice
    assert said in str(caught.value)
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__!r}"
    printed = run("ls", root, status=2).stderr
    assert "Traceback" not in printed
    assert "hunter2" not in printed


@pytest.mark.nightly(5)
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_line_that_is_slow_is_only_slow(cloud: str) -> None:
    """A line that takes longer than ``read_timeout`` causes no failure and no second request."""
    content = bytes(MIB)

    def answer(asked: Request) -> Answer:
        if asked.method == "PUT":
            return Answer(headers={"x-goog-generation": "1"})
        span = f"bytes 0-{MIB - 1}/{MIB}"
        return Answer(206, content, {"content-range": span, "x-goog-generation": "1"}, pause_s=0.05)

    async def use(driver: Driver) -> bytes:
        await driver.put("key", content)
        return bytes(await driver.fetch("key", 0, MIB))

    with ScriptedServer(answer, pause_s=0.05) as server:
        began_s = time.monotonic()
        assert used(uri(server, cloud, f"read_timeout=300ms&{BARE}"), use) == content
        assert time.monotonic() - began_s > 1.0
        assert server.methods == ["PUT", "GET"]


@pytest.mark.parametrize(
    ("cloud", "options"),
    [*((cloud, "read_timeout=300ms") for cloud in (*CLOUDS, "http")), ("s3", "timeout=300ms")],
)
def test_a_store_that_falls_silent_is_given_up(cloud: str, options: str) -> None:
    """It is given up in the time that either option allows; the error names both."""
    is_over = threading.Event()

    def answer(asked: Request) -> Answer:
        is_over.wait(30)
        return Answer()

    with ScriptedServer(answer) as server:
        root = uri(server, cloud, f"{options}&{BARE}").replace("deadline=5s", "deadline=0")
        if cloud == "http":
            root = f"{server.url}/run?deadline=0&{options}&{BARE}"
        began_s = time.monotonic()
        with pytest.raises(StorageDownError, match="read_timeout") as caught:
            used(root, lambda driver: driver.get("key"))
        assert time.monotonic() - began_s < 15
        is_over.set()
    assert "?timeout=" in str(caught.value)


def _ranges_of(content: bytes, sent_nbytes: list[int]) -> Callable[[Request], Answer]:
    """Answer reads of ranges; the first ones stop after too few bytes."""
    left = iter(sent_nbytes)

    def answer(asked: Request) -> Answer:
        first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), int(last) + 1
        span = f"bytes {start}-{stop - 1}/{len(content)}"
        headers = {"content-range": span, "content-length": str(stop - start)}
        return Answer(206, content[start : min(stop, start + next(left, stop))], headers)

    return answer


def test_pieces_go_on_where_a_store_fell_silent() -> None:
    """After a response that breaks off, the rest is read, and no byte twice."""
    content = bytes(range(256)) * (3 * MIB // 256)
    with ScriptedServer(_ranges_of(content, [MIB + MIB // 2, 77])) as server:
        taken = bytearray()
        options = "read_timeout=300ms&retries=5"
        root = uri(server, "s3", options).replace("deadline=5s", "deadline=0")
        used(root, lambda driver: driver.read_pieces("key", 5, len(content) - 5, taken.extend))
        assert taken == content[5:]
        assert len(server.methods) > 1


def test_a_cancelled_read_in_pieces_waits_for_no_silent_store() -> None:
    """The caller returns at once; the driver can read and close while the thread still waits."""
    content = bytes(3 * MIB)

    async def use(driver: Driver) -> float:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()
        took = partial(loop.call_soon_threadsafe, begun.set)
        read = driver.read_pieces("key", 0, len(content), lambda piece: took())
        reading = asyncio.create_task(read)
        await begun.wait()
        began_s = time.monotonic()
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        await driver.read_pieces("key", 0, 10, lambda piece: None)
        return time.monotonic() - began_s

    with ScriptedServer(_ranges_of(content, [2 * MIB])) as server:
        began_s = time.monotonic()
        assert used(uri(server, "s3", f"read_timeout=3s&{BARE}"), use) < 2
        assert time.monotonic() - began_s < 3


@pytest.mark.parametrize("refused", [refusal(501, "NotImplemented"), refusal(404, "NoSuchUpload")])
def test_a_store_without_a_list_of_unfinished_uploads_has_none(
    refused: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """A process asks once and does not try again; one line of the log says so."""

    async def use(driver: Driver) -> None:
        await driver.sweep("data")
        await driver.delete_all("data")

    store = OddStore(fault=lambda asked: refused if kind_of(asked) == "uploads" else None)
    with ScriptedServer(store) as server:
        for _ in range(2):
            used(uri(server), use)
        assert len([asked for asked in server.log if "uploads" in asked.path]) == 1
    (said,) = [message for message in caplog.messages if "unfinished uploads" in message]
    assert "cannot list" in said


def test_a_request_that_a_store_does_not_know_is_not_tried_again() -> None:
    """501 is a final answer."""
    with ScriptedServer(lambda asked: refusal(501, "NotImplemented")) as server:
        with pytest.raises(StorageError, match="does not support") as caught:
            used(uri(server), lambda driver: driver.put("key", b"x", exclusive=True))
        assert not caught.value.temporary
        assert server.methods == ["PUT"]


def deleting(bulk: Answer | None) -> OddStore:
    """Return a store of two objects below ``run/data``; ``bulk`` answers bulk deletes."""
    store = OddStore(fault=lambda asked: bulk if kind_of(asked) == "bulk" else None)
    store.objects = dict.fromkeys(("run/data/a", "run/data/b"), (b"x", 0.0))
    return store


@pytest.mark.parametrize(
    "bulk",
    [
        Answer(body=b"<DeleteResult><Deleted></Deleted></DeleteResult>"),
        Answer(body=b"connection oriented rubbish"),
        refusal(400, "MissingContentMD5"),
        refusal(403, "AccessDenied"),
    ],
    ids=["no key", "rubbish", "400", "403"],
)
def test_a_store_that_refuses_bulk_deletes_is_found_out(
    bulk: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """This call and all later ones delete one object at a time, which the log says once."""
    store = deleting(bulk)
    with ScriptedServer(store) as server:
        for _ in range(2):
            store.objects |= deleting(bulk).objects
            used(uri(server, options="concurrency=1"), lambda driver: driver.delete_all("data"))
            assert store.objects == {}
        assert server.methods.count("POST") == 1
    assert len([message for message in caplog.messages if "bulk_delete=off" in message]) == 1


def test_bulk_deletes_can_be_switched_off() -> None:
    """Then no such request is made. A single key never takes one."""
    store = deleting(Answer(500))
    with ScriptedServer(store) as server:
        root = uri(server, options="concurrency=1&bulk_delete=off")
        used(root, lambda driver: driver.delete_all("data"))
        assert store.objects == {}
        used(uri(server), lambda driver: driver.delete("data/a"))
        assert server.methods.count("DELETE") == 3
        assert "POST" not in server.methods


def test_deletes_that_are_not_allowed_at_all_say_so() -> None:
    """A store that refuses both ways is not mistaken for one that knows only one of them."""
    store = deleting(refusal(403, "AccessDenied"))

    def answer(asked: Request) -> Answer:
        return refusal(403, "AccessDenied") if asked.method == "DELETE" else store(asked)

    with ScriptedServer(answer) as server:
        for _ in range(2):
            with pytest.raises(AccessError):
                used(uri(server, options="concurrency=1"), lambda driver: driver.delete_all("data"))
        assert server.methods.count("POST") == 2


@pytest.mark.parametrize("cloud", ["s3", "az"])
def test_a_backslash_stays_one(cloud: str) -> None:
    """Some stores treat it as a slash, so they never get one."""
    with ScriptedServer(lambda asked: Answer(headers={"x-goog-generation": "1"})) as server:
        used(uri(server, cloud), lambda driver: driver.put("a\\b", b"x"))
        assert "a%255Cb" in server.log[0].path


def test_no_certificates_are_read_where_nothing_is_encrypted(tmp_path: Path) -> None:
    """The file in this test would make its reader wait forever."""
    os.mkfifo(certificates := tmp_path / "certificates.pem")
    environment = os.environ | {"SSL_CERT_FILE": str(certificates)}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        environment.pop(name, None)
        environment.pop(name.upper(), None)
    with ScriptedServer(lambda asked: Answer()) as server:
        finished([*HOLDFAST, "ls", uri(server)], env=environment, cwd="/")
        assert server.methods


# Checkpoints on a web server, which is read-only


def showing(folder: Path, *, ranges: bool = True) -> ScriptedServer:
    """Return a web server that serves the files of a folder, whole or in ranges."""

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
    """Return the URL of a web server that serves ``tmp_path``."""
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
