"""The HDFS driver on secure servers: with a ticket, without one, and with a delegation token.

Each client is a separate process, since its environment tells where the tickets are.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import finished
from support.servers.hadoop import find_hadoop
from support.servers.kerberos import find_kerberos
from support.servers.secure_hadoop import SecureHadoop

pytestmark = pytest.mark.drill

CLIENT_S = 60

QUICKLY_S = 5

SAVE_AND_LOAD = """
import logging, sys, torch, holdfast
logging.basicConfig()
state = {"a": torch.randn(int(sys.argv[2]) << 18), "b": torch.arange(10)}
for _ in range(2):
    holdfast.save(sys.argv[1], state)
found = holdfast.load(sys.argv[1])
assert all(torch.equal(found[name], state[name]) for name in state)
print("the same")
"""

PRIVATE = """
import sys, urllib.parse, hdfs_native
parts = urllib.parse.urlsplit(sys.argv[1])
hdfs_native.Client(f"hdfs://{parts.netloc}").set_permission(parts.path, 0o700)
"""

PUT = """
import asyncio, sys, time
from holdfast.drivers.registry import open_driver
from holdfast.errors import StorageError
async def put():
    driver = open_driver(sys.argv[1])
    began_s = time.monotonic()
    try:
        await driver.put("a", b"content")
        print("stored")
    except StorageError as error:
        print(f"{type(error).__name__}: {error}")
    print(time.monotonic() - began_s)
    await driver.close()
asyncio.run(put())
"""


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureHadoop]:
    """Start servers that authenticate clients but do not protect transfers."""
    _skip_without_servers()
    server = SecureHadoop(tmp_path_factory.mktemp("secure"))
    server.start()
    yield server
    server.stop()


def _skip_without_servers() -> None:
    if find_hadoop() is None or find_kerberos() is None:
        pytest.skip("Hadoop or Kerberos is not installed: make test-servers")


def client(program: str, uri: str, environment: dict[str, str], mib: int = 40) -> str:
    """Run a client with a state of ``mib``, enough for several parts; return its output."""
    command = [sys.executable, "-W", "error", "-c", program, uri, str(mib)]
    done = finished(command, env=os.environ | environment, timeout_s=CLIENT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(uri: str, environment: dict[str, str]) -> str:
    """Return the error of a put, which must fail quickly."""
    error, took_s = client(PUT, uri, environment).strip().splitlines()
    assert float(took_s) < QUICKLY_S
    return error


def test_a_save_comes_back(secure: SecureHadoop) -> None:
    """A save with a ticket loads again; WebHDFS has joined the parts without copies."""
    output = client(SAVE_AND_LOAD, secure.at(uuid.uuid4().hex), secure.environment(secure.ticket()))
    assert output == "the same\n"


def test_a_save_comes_back_from_servers_that_protect_what_is_sent(tmp_path: Path) -> None:
    """A save works with encrypted transfers (3DES, which is slow)."""
    _skip_without_servers()
    server = SecureHadoop(tmp_path, "privacy", datanodes=1)
    server.start()
    try:
        output = client(SAVE_AND_LOAD, server.at("run"), server.environment(server.ticket()), mib=2)
    finally:
        server.stop()
    assert output == "the same\n"


def test_parts_are_copied_where_webhdfs_knows_nobody(secure: SecureHadoop) -> None:
    """If WebHDFS rejects the ticket, a save copies the parts, and logs once why it is slow."""
    uri = secure.at(uuid.uuid4().hex).replace("webhdfs=localhost", "webhdfs=127.0.0.1")
    output = client(SAVE_AND_LOAD, uri, secure.environment(secure.ticket()))
    assert "the same" in output
    assert output.count("parts are joined by copying") == 1
    assert "asks for a Kerberos ticket" in output


@pytest.mark.parametrize(
    ("problem", "said", "advice"),
    [
        ("no ticket", "No Kerberos credentials available", "kinit"),
        # Without HADOOP_CONF_DIR the name node would close each connection, and the library would
        # retry until its deadline.
        ("no configuration", "requires KERBEROS", "HADOOP_CONF_DIR"),
        ("no library", "", "libgssapi-krb5-2"),
        ("a cancelled token", "", "HADOOP_TOKEN_FILE_LOCATION"),
    ],
)
def test_a_client_that_cannot_log_in_is_told_at_once(
    secure: SecureHadoop, tmp_path: Path, problem: str, said: str, advice: str
) -> None:
    """A client without valid credentials gets an access error with a remedy, without retries."""
    if problem == "no ticket":
        environment = secure.environment()
    elif problem == "no configuration":
        environment = secure.environment(secure.ticket()) | {"HADOOP_CONF_DIR": ""}
    elif problem == "no library":
        (tmp_path / "libgssapi_krb5.so.2").write_text("no library")
        environment = secure.environment(secure.ticket()) | {"LD_LIBRARY_PATH": str(tmp_path)}
    else:
        tokens = secure.token(tmp_path / "tokens")
        secure.cancel(tokens)
        environment = secure.environment() | {"HADOOP_TOKEN_FILE_LOCATION": str(tokens)}
    error = refused(secure.at("run"), environment)
    assert error.startswith("AccessError: ")
    assert said in error
    assert advice in error


def test_another_user_is_refused(secure: SecureHadoop) -> None:
    """Permissions apply to the user of the ticket, not to HADOOP_USER_NAME."""
    uri = secure.at(uuid.uuid4().hex)
    environment = secure.environment(secure.ticket("alice")) | {"HADOOP_USER_NAME": "bob"}
    assert client(PUT, uri, environment).startswith("stored")
    client(PRIVATE, uri, environment)
    error = refused(uri, secure.environment(secure.ticket("bob")) | {"HADOOP_USER_NAME": "alice"})
    assert error.startswith("AccessError: ")
    assert "user=bob" in error


def test_a_delegation_token_stands_for_a_ticket(secure: SecureHadoop, tmp_path: Path) -> None:
    """A delegation token alone, looked up by host address, suffices for saves and loads."""
    environment = secure.environment() | {
        "HADOOP_TOKEN_FILE_LOCATION": str(secure.token(tmp_path / "tokens"))
    }
    assert client(SAVE_AND_LOAD, secure.at(uuid.uuid4().hex), environment) == "the same\n"
