"""What of the HDFS driver needs no server: calls that are left behind, errors told apart by text, names, configuration."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from holdfast.drivers.hdfs.calls import Call, run
from holdfast.drivers.hdfs.config import name_service, site, web_addresses
from holdfast.drivers.hdfs.errors import storage_error
from holdfast.drivers.hdfs.names import Names, belongs_to, is_temporary, key_name, path_name, temporary_name
from holdfast.drivers.hdfs.webhdfs import ConcatRefused, WebHdfs
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


def test_a_call_returns_or_raises_what_its_thread_does() -> None:
    """Results and exceptions come through, those that are no Exception too."""

    class Panic(BaseException):
        pass

    def fail(call: Call) -> None:
        raise Panic

    assert asyncio.run(run(lambda call: 42, 5)) == 42
    with pytest.raises(Panic):
        asyncio.run(run(fail, 5))


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_that_hangs_is_left_behind(cancelled: bool) -> None:
    """At the deadline, or when cancelled; from then on it cannot touch the caller's memory, and ends when it tries."""
    released, ended, memory = threading.Event(), threading.Event(), bytearray(1)

    def hang(call: Call) -> None:
        released.wait(10)
        try:
            with call:
                memory[0] = 1
        finally:
            ended.set()

    async def wait() -> None:
        task = asyncio.ensure_future(run(hang, 5 if cancelled else 0.05))
        await asyncio.sleep(0.01)
        if cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
            await task

    began_s = time.monotonic()
    asyncio.run(wait())
    assert time.monotonic() - began_s < 2
    released.set()
    assert ended.wait(5)
    assert memory == b"\0"


def test_progress_puts_the_deadline_off() -> None:
    """A call of many small steps may take longer than the deadline of each."""

    def steps(call: Call) -> str:
        for _ in range(6):
            time.sleep(0.1)
            with call:
                pass
        return "done"

    assert asyncio.run(run(steps, 0.4)) == "done"


JAVA = "org.apache.hadoop."


@pytest.mark.parametrize(
    ("error", "doing", "kind"),
    [
        (FileNotFoundError("/x"), "stat", NotFoundError),
        (FileExistsError("/x"), "rename", ExistsError),
        (
            RuntimeError(f'RPCError("{JAVA}security.AccessControlException", "Permission denied: user=a")'),
            "get",
            AccessError,
        ),
        (RuntimeError(f'RPCError("{JAVA}hdfs.protocol.DSQuotaExceededException", "quota")'), "write", FullError),
        (RuntimeError(f'RPCError("{JAVA}hdfs.protocol.NSQuotaExceededException", "quota")'), "create", FullError),
        (RuntimeError(f'RPCError("{JAVA}hdfs.server.namenode.SafeModeException", "safe")'), "create", BusyError),
        (RuntimeError(f'RPCError("{JAVA}ipc.StandbyException", "standby")'), "stat", StorageDownError),
        (
            RuntimeError('RPCError("java.io.IOException", "File x could only be written to 0 of the 1")'),
            "write",
            FullError,
        ),
        (RuntimeError('DataTransferError("the pipeline broke")'), "write", StorageDownError),
        (OSError("Connection refused"), "stat", StorageDownError),
        (RuntimeError(f'RPCError("{JAVA}fs.ParentNotDirectoryException", "/x")'), "create", StorageError),
        (
            RuntimeError(f'RPCError("{JAVA}security.AccessControlException", "/x (is not a directory)")'),
            "list",
            NotFoundError,
        ),
        (RuntimeError("something new"), "stat", StorageError),
    ],
)
def test_errors_are_told_apart(error: Exception, doing: str, kind: type[StorageError]) -> None:
    """By class where the library has one, else by text; each says what was done, where, and no Java stack."""
    error.args = tuple(f"{text}\\n\\tat org.apache.hadoop.Deep.inside(Deep.java:1)" for text in error.args)
    found = storage_error(error, doing, "hdfs://h/x", "key")
    assert type(found) is kind
    assert (found.uri, found.key) == ("hdfs://h/x", "key")
    assert found.message.startswith(f"{doing} failed: ")
    assert "Deep.java" not in found.message


def test_names_go_there_and_back() -> None:
    """What HDFS refuses is written otherwise, one to one; what no key is stored as is no key."""
    for name in ("a", "a:b", "%", "%3A", "%25:", "ü€"):
        assert key_name(path_name(name)) == name
        assert ":" not in path_name(name)
    assert key_name("50%") is None
    names = Names("/base", "hdfs://h/base")
    assert names.path("a:b/c") == "/base/a%3Ab/c"
    assert names.key("/base/a%3Ab/c") == "a:b/c"
    assert names.key("/base/a/.x.0123456789abcdef.0.tmp") is None
    for key in ("../x", ".x.0123456789abcdef.3.tmp", "\ud800", "x" * 256):
        with pytest.raises(UriError):
            names.path(key)


def test_temporary_names_are_short_and_plain() -> None:
    """Whatever they stand for, they fit, hold no comma, and are known again."""
    for name in ("manifest.safetensors", "a,b", "x" * 255, "ü" * 100):
        temporary = f"{temporary_name(name)}.63.tmp"
        assert is_temporary(temporary)
        assert belongs_to(temporary, name)
        assert not belongs_to(temporary, "other")
        assert len(temporary.encode()) < 100
        assert "," not in temporary


def test_addresses_of_webhdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As configured, for each name node of a service; else Hadoop's own port at the same host."""
    assert web_addresses("host:8020", {}) == ["http://host:9870"]
    assert web_addresses("host:8020", {"dfs.namenode.http-address": "0.0.0.0:50070"}) == ["http://host:50070"]
    service = name_service("ns", ["a:8020", "b:8020"])
    assert web_addresses("ns", service) == ["http://a:9870", "http://b:9870"]
    secure = {"dfs.http.policy": "HTTPS_ONLY", "dfs.namenode.https-address.ns.nn0": "a:9871"}
    assert web_addresses("ns", service | secure)[0] == "https://a:9871"
    entry = "<property><name>fs.defaultFS</name><value>hdfs://ns</value></property>"
    (tmp_path / "core-site.xml").write_text(f"<configuration>{entry}</configuration>")
    assert site(str(tmp_path)) == {"fs.defaultFS": "hdfs://ns"}
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert site(None) == {"fs.defaultFS": "hdfs://ns"}
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("HADOOP_HOME", "/nowhere")
    assert site(None) == {}


async def _answering(answer: bytes) -> tuple[asyncio.Server, list[bytes]]:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0), asked


def _address(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_concat_asks_one_name_node_after_the_other() -> None:
    """A standby refuses, a dead one does not answer; the request names every source, encoded."""

    async def ask() -> None:
        standby, _ = await _answering(b"HTTP/1.1 403 Forbidden\r\n\r\n{StandbyException}")
        active, asked = await _answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        async with standby, active:
            nodes = WebHdfs(["http://127.0.0.1:1", _address(standby), _address(active)], 5)
            await nodes.concat("/a ü/x", ["/a ü/y", "/a ü/z"], "al ice")
            (request,) = asked
            want = b"POST /webhdfs/v1/a%20%C3%BC/x?op=CONCAT&sources=/a%20%C3%BC/y,/a%20%C3%BC/z&user.name=al%20ice HTTP/1.1"
            assert request.startswith(want)
            with pytest.raises(ConcatRefused, match=r"403.*Standby"):
                await WebHdfs([_address(standby)], 5).concat("/x", ["/y"], "me")
            with pytest.raises(ConcatRefused, match="comma"):
                await nodes.concat("/x", ["/y,z"], "me")

    asyncio.run(ask())


def test_what_is_no_http_is_refused_in_time() -> None:
    """Another protocol on that port, or silence: concat is refused, with the reason."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def ask() -> None:
        other, _ = await _answering(b"SSH-2.0\r\n")
        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        async with other, silent:
            with pytest.raises(ConcatRefused, match="no HTTP"):
                await WebHdfs([_address(other)], 5).concat("/x", ["/y"], "me")
            with pytest.raises(ConcatRefused, match="TimeoutError"):
                await WebHdfs([_address(silent)], 0.1).concat("/x", ["/y"], "me")
            await asyncio.sleep(0.1)  # for the servers to see that the client has gone

    asyncio.run(ask())
