"""The HDFS driver without a server: abandoned calls, errors, names, configuration and tokens."""

from __future__ import annotations

import asyncio
import base64
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.drivers import asynchronous

from holdfast.drivers.calls import Call, run
from holdfast.drivers.hdfs.authentication import (
    Token,
    parse_tokens,
    service_address,
    token_of,
    tokens,
    unauthenticated,
    url_form,
)
from holdfast.drivers.hdfs.config import (
    Served,
    name_service,
    rpc_addresses,
    served,
    site,
    web_addresses,
)
from holdfast.drivers.hdfs.driver import HdfsDriver
from holdfast.drivers.hdfs.errors import storage_error
from holdfast.drivers.hdfs.names import (
    Names,
    belongs_to,
    is_temporary,
    key_name,
    path_name,
    temporary_name,
)
from holdfast.drivers.hdfs.uploads import FileOptions, HdfsUpload
from holdfast.drivers.hdfs.webhdfs import ConcatRefused, WebHdfs
from holdfast.drivers.uri import parse as parse_uri
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

pytestmark = pytest.mark.clocked


def test_a_call_returns_or_raises_what_its_thread_does() -> None:
    """Results and exceptions come through, even those that are not an Exception."""

    class Panic(BaseException):
        pass

    def fail(call: Call) -> None:
        raise Panic

    assert asyncio.run(run(lambda call: 42, 5)) == 42
    with pytest.raises(Panic):
        asyncio.run(run(fail, 5))


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_that_hangs_is_left_behind(cancelled: bool) -> None:
    """A call that times out or is cancelled is abandoned, and cannot touch the buffer later."""
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
    """A call of many small steps may exceed the deadline, which applies to each step."""

    def steps(call: Call) -> str:
        for _ in range(6):
            time.sleep(0.1)
            with call:
                pass
        return "done"

    assert asyncio.run(run(steps, 0.4)) == "done"


class SlowNameNode:
    """Answers a request for a new file only when allowed."""

    def __init__(self) -> None:
        self.inner = self
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.deleted = queue.SimpleQueue[str]()

    def create(self, path: str, options: object) -> object:
        self.asked.set()
        assert self.may_answer.wait(10)
        return object()

    def delete(self, path: str, recursive: bool) -> None:
        self.deleted.put(path)


class SlowClient:
    """The part of a client that an upload needs to begin and to end."""

    uri = "hdfs://slow"

    def __init__(self) -> None:
        self.inner = SlowNameNode()

    async def call(self, doing: str, key: str, function: Callable[[Call], object]) -> object:
        return await run(function, 10)

    async def delete(self, path: str, key: str) -> None:
        self.inner.delete(path, False)


@pytest.mark.parametrize("answered", [False, True])
def test_a_file_is_deleted_once_the_name_node_has_made_it(answered: bool) -> None:
    """An abort does not wait for a missing answer: the thread that gets it deletes the file."""
    client: Any = SlowClient()
    name_node = client.inner
    driver = HdfsDriver.open(parse_uri("hdfs://slow:8020/"))
    options = FileOptions(None, None, False)
    upload = HdfsUpload(driver, "x", 3, "/x", client, None, options)

    async def begin_and_abort() -> None:
        task = asyncio.ensure_future(upload._begin())
        assert await asyncio.to_thread(name_node.asked.wait, 10)
        if answered:
            name_node.may_answer.set()
            await task
        task.cancel()
        await asyncio.wait([task])
        await upload.abort()
        assert name_node.deleted.empty() != answered

    asyncio.run(begin_and_abort())
    name_node.may_answer.set()
    assert name_node.deleted.get(timeout=10).startswith("/")
    assert name_node.deleted.empty()


def rpc(cls: str, text: str) -> RuntimeError:
    """Return the error that the library raises for an exception of a name node."""
    cls = cls if cls.startswith("java.") else f"org.apache.hadoop.{cls}"
    return RuntimeError(f'RPCError("{cls}", "{text}")')


GSS = 'GSSAPIError(GssMajorCodes { raw: "0x000d0000" }, 25, "%s")'


@pytest.mark.parametrize(
    ("error", "doing", "kind", "advice"),
    [
        (FileNotFoundError("/x"), "stat", NotFoundError, None),
        (FileExistsError("/x"), "rename", ExistsError, None),
        (FileExistsError("lease recovery is in progress."), "join", BusyError, "a minute"),
        (rpc("security.AccessControlException", "user=a"), "get", AccessError, "HADOOP_USER_NAME"),
        (rpc("security.AccessControlException", "(is not a directory)"), "x", NotFoundError, None),
        (rpc("hdfs.protocol.DSQuotaExceededException", "x"), "write", FullError, "the quota"),
        (rpc("java.io.IOException", "could only be written to 0 of"), "write", FullError, "free"),
        (rpc("hdfs.server.namenode.SafeModeException", "safe"), "create", BusyError, "safe mode"),
        (rpc("ipc.StandbyException", "standby"), "stat", StorageDownError, "?namenodes="),
        (RuntimeError('DataTransferError("broke")'), "write", StorageDownError, "DataNode"),
        (OSError("Connection refused"), "stat", StorageDownError, "name node"),
        (rpc("fs.ParentNotDirectoryException", "/x"), "create", StorageError, None),
        (RuntimeError("RPC listener disconnected"), "stat", StorageError, "core-site.xml"),
        (RuntimeError("something new"), "stat", StorageError, None),
        (RuntimeError(GSS % "Ticket expired"), "get", AccessError, "kinit"),
        (RuntimeError(GSS % "Cannot contact any KDC"), "get", StorageDownError, "KRB5_CONFIG"),
        (rpc("security.token.SecretManager$InvalidToken", "x"), "get", AccessError, "kinit"),
    ],
)
def test_errors_are_told_apart(
    error: Exception, doing: str, kind: type[StorageError], advice: str | None
) -> None:
    """Class or text identify an error. It says where and what next, and hides Java stacks."""
    stack = "\\n\\tat org.apache.hadoop.Deep.inside(Deep.java:1)"
    error.args = tuple(f"{text}{stack}" for text in error.args)
    found = storage_error(error, doing, "hdfs://h/x", "key")
    assert type(found) is kind
    assert (found.uri, found.key) == ("hdfs://h/x", "key")
    assert found.message.startswith(f"{doing} failed: ")
    assert advice is None or advice in str(found.advice)
    assert not any(hidden in found.message for hidden in ("Deep.java", "GssMajorCodes"))


def test_names_go_there_and_back() -> None:
    """Names that HDFS refuses are escaped, one to one. Other file names are not keys."""
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
    for name in ("manifest.safetensors", "a,b", "ü" * 100):
        temporary = f"{temporary_name(name)}.63.tmp"
        assert is_temporary(temporary)
        assert belongs_to(temporary, name)
        assert not belongs_to(temporary, "other")
        assert len(temporary.encode()) < 100
        assert "," not in temporary


NS = name_service("ns", ["a:8020", "b:8020"])
FEDERATED = {
    "dfs.nameservices": "ns1, ns2",
    "dfs.namenode.rpc-address.ns2": "b:8020",
    "dfs.namenode.http-address.ns2": "b:50070",
    "dfs.namenode.rpc-address.ns1": "a:8020",
}
ROUTERS = name_service("fed", ["r1:8888", "r2:8888"])
HTTPS = {"dfs.http.policy": "HTTPS_ONLY"}


@pytest.mark.parametrize(
    ("authority", "properties", "web", "rpc"),
    [
        ("ns2", FEDERATED, ["http://b:50070"], ["b:8020"]),
        # Given by host and port, while the configuration has it as a part of a name service.
        ("b:8020", NS | {"dfs.namenode.http-address.ns.nn1": "b:1"}, ["http://b:1"], ["b:8020"]),
        ("h:8020", {"dfs.namenode.http-address": "0.0.0.0:1"}, ["http://h:1"], ["h:8020"]),
        ("ns", NS, ["http://a:9870", "http://b:9870"], ["a:8020", "b:8020"]),
        ("fed", ROUTERS, ["http://r1:50071", "http://r2:50071"], ["r1:8888", "r2:8888"]),
        ("r1:8888", HTTPS, ["https://r1:50072"], ["r1:8888"]),
        ("host:8020", HTTPS, ["https://host:9871"], ["host:8020"]),
    ],
)
def test_addresses_of_name_nodes(
    authority: str, properties: dict[str, str], web: list[str], rpc: list[str]
) -> None:
    """Configured addresses are used, or else Hadoop's default ports on the same hosts."""
    assert web_addresses(authority, properties) == web
    assert rpc_addresses(authority, properties) == rpc


def test_the_configuration_is_that_of_hadoop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properties come from the folder that an option or HADOOP_CONF_DIR names."""
    entry = "<property><name>fs.defaultFS</name><value>hdfs://ns</value></property>"
    (tmp_path / "core-site.xml").write_text(f"<configuration>{entry}</configuration>")
    assert site(str(tmp_path)) == {"fs.defaultFS": "hdfs://ns"}
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert site(None) == {"fs.defaultFS": "hdfs://ns"}
    monkeypatch.delenv("HADOOP_CONF_DIR")
    monkeypatch.setenv("HADOOP_HOME", "/nowhere")
    assert site(None) == {}


VIEW = {
    "fs.defaultFS": "viewfs://cluster",
    "fs.viewfs.mounttable.cluster.link./data": "hdfs://ns1/real/data",
    "fs.viewfs.mounttable.cluster.link./data/deep": "hdfs://ns2/",
    "fs.viewfs.mounttable.cluster.linkFallback": "hdfs://ns3/rest",
    "fs.viewfs.mounttable.cluster.link./elsewhere": "s3a://bucket/x",
}


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("/data/deep/run", Served("ns2", "/run")),
        ("/data/deep", Served("ns2", "/")),
        ("/data/run", Served("ns1", "/real/data/run")),
        ("/database/run", Served("ns3", "/rest/database/run")),
        ("/data", None),
        ("/", None),
        ("/elsewhere/run", None),
    ],
)
def test_links_of_a_viewfs_are_followed(root: str, expected: Served | None) -> None:
    """The longest link above a folder counts. A folder with links below it has no single place."""
    assert served("", root, VIEW) == expected


def test_what_a_uri_without_authority_means() -> None:
    """It means ``fs.defaultFS``, if that is HDFS. A mount table's name never counts as a host."""
    table = {"fs.viewfs.mounttable.default.link./x": "hdfs://h:1/y"}
    assert served("", "/x", {"fs.defaultFS": "hdfs://ns/"}) == Served("ns", "/x")
    assert served("", "/x", {"fs.defaultFS": "viewfs:///", **table}) == Served("h:1", "/y")
    for elsewhere in ({}, {"fs.defaultFS": "viewfs://cluster"}, {"fs.defaultFS": "file:///"}):
        assert served("", "/x", elsewhere) is None
    assert served("ns", "/x", VIEW) == Served("ns", "/x")


@pytest.mark.heavy
def test_who_is_asked_for_a_ticket_and_configured_without_is_told() -> None:
    """The name node's offer decides. A silent or absent node is left to the library."""
    simple = b"\x00\x00\x00\x08\x0a\x06SIMPLE"
    secure = b"\x00\x00\x00\x0a\x0a\x08KERBEROS"

    async def ask(answer: bytes) -> tuple[str, str] | None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(4)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await asyncio.to_thread(unauthenticated, [address], "simple")

    reason = asyncio.run(ask(secure))
    assert reason is not None
    assert "requires KERBEROS" in reason[0]
    assert "HADOOP_CONF_DIR" in reason[1]
    assert asyncio.run(ask(simple)) is None
    assert asyncio.run(ask(b"")) is None
    assert asyncio.run(ask(b"\xff" * 10)) is None
    assert unauthenticated(["127.0.0.1:1", "nonsense"], "simple") is None


async def _answering(answer: bytes | None) -> tuple[asyncio.Server, list[bytes]]:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0), asked


def _address(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.heavy
@asynchronous
async def test_concat_asks_one_name_node_after_the_other() -> None:
    """A standby refuses, a dead node does not answer. The request names all sources, encoded."""
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


REDIRECT = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\n\r\n"
CHUNKS = b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nen\r\n4\r\ncryp\r\n0\r\n\r\n"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (REDIRECT, "answered 307: Temporary Redirect"),  # could lead the token to another host
        (CHUNKS, "answered 400: encryp$"),
        (b"SSH-2.0\r\n", "not HTTP"),
        (None, r"no answer for 0\.1 s"),
    ],
    ids=["redirect", "chunks", "no HTTP", "silence"],
)
@asynchronous
async def test_concat_says_why_it_is_refused(answer: bytes | None, said: str) -> None:
    """For any answer except success, concat is refused in time, with the reason."""
    server, _ = await _answering(answer)
    async with server:
        nodes = WebHdfs([_address(server)], 0.1 if answer is None else 5, delegation="t")
        with pytest.raises(ConcatRefused, match=said):
            await nodes.concat("/x", ["/y"], "me")
        await asyncio.sleep(0.1)  # let the server see that the client has gone


# Delegation tokens


KIND = "HDFS_DELEGATION_TOKEN"
TOKENS = [
    Token(b"identifier" * 30, b"password", KIND, "127.0.0.1:8020"),
    Token(b"other", b"secret", KIND, "ha-hdfs:ns"),
    Token(b"kms", b"key", "kms-dt", "kms:9600"),
]


def writable(parts: list[bytes]) -> bytes:
    """Encode parts with their lengths, as Hadoop's Writables do; lengths are below 65536."""
    found = b""
    for part in parts:
        small = len(part) < 128
        length = bytes([len(part)]) if small else bytes([256 - 114]) + len(part).to_bytes(2)
        if 128 <= len(part) < 256:
            length = bytes([256 - 113, len(part)])
        found += length + part
    return found


def varint(number: int) -> bytes:
    """Encode a number as protobuf does."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(fields: list[tuple[int, bytes]]) -> bytes:
    """Encode a protobuf message of counted bytes."""
    return b"".join(
        varint(number << 3 | 2) + varint(len(content)) + content for number, content in fields
    )


def fields_of(token: Token) -> list[bytes]:
    """Return the parts of a token in order."""
    return [token.identifier, token.password, token.kind.encode(), token.service.encode()]


def writable_file() -> bytes:
    """Encode tokens as ``hdfs fetchdt`` does."""
    entries = b"".join(writable([b"alias", *fields_of(token)]) for token in TOKENS)
    return b"HDTS\0" + bytes([len(TOKENS)]) + entries + b"\0"


def protobuf_file() -> bytes:
    """Encode tokens as ``hdfs dtutil`` does."""
    tokens = [message(list(enumerate(fields_of(token), 1))) for token in TOKENS]
    entries = [(1, message([(1, b"alias"), (2, token)])) for token in tokens]
    content = message([*entries, (2, b"a secret key")])
    return b"HDTS\1" + varint(len(content)) + content


FILES = {"writable": writable_file(), "protobuf": protobuf_file()}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_both_forms_are_read(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of a file are read; only those of HDFS are used."""
    assert parse_tokens(content) == TOKENS
    assert "password" not in repr(TOKENS[0])
    (tmp_path / "tokens").write_bytes(content)
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    assert tokens() == TOKENS[:2]


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_that_was_cut_off_is_refused(content: bytes) -> None:
    """A cut at any byte, except in the list of secret keys, is a ValueError."""
    end = len(content) - (1 if content[4] == 0 else 0)
    for nbytes in range(end):
        with pytest.raises(ValueError, match="token file"):
            parse_tokens(content[:nbytes])


def test_a_token_is_found_by_its_service() -> None:
    """A token belongs to an authority, a name service or a host's address, or to none."""
    assert token_of("127.0.0.1:8020", TOKENS) == TOKENS[0]
    assert token_of("ns", TOKENS) == TOKENS[1]
    assert service_address("localhost:8020", TOKENS) == "127.0.0.1:8020"
    for authority in ("localhost:8021", "ns", "nowhere.invalid:8020", "localhost:port", ""):
        assert service_address(authority, TOKENS) == authority
    assert service_address("localhost:8020", []) == "localhost:8020"


def test_a_request_carries_a_token_in_its_own_form() -> None:
    """Identifier and password, each with its length, are sent in URL-safe base64."""
    form = url_form(TOKENS[0])
    assert "=" not in form
    content = base64.urlsafe_b64decode(form + "=" * (-len(form) % 4))
    assert content == writable([TOKENS[0].identifier, TOKENS[0].password, b"", b""])


@pytest.mark.parametrize("content", [b"", b"HDTS\2 ", b"HDTS\0\5short", None])
def test_a_file_without_tokens_is_an_error_before_any_call(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is damaged, of another kind, or missing; the error names the variable."""
    if content is not None:
        (tmp_path / "tokens").write_bytes(content)
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    with pytest.raises(UriError, match="HADOOP_TOKEN_FILE_LOCATION"):
        HdfsDriver.open(parse_uri("hdfs://localhost:8020/x"))
