"""Environment variables of obstore change no request; only the URI's options do."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
import os
import re
import threading
from pathlib import Path

import pytest
from support.drivers import used
from support.servers.scripted import Request, ScriptedServer, s3_answer, set_credentials

from holdfast.drivers.contract import Driver
from holdfast.drivers.objects.connections import made_without
from holdfast.errors import StorageError

pytestmark = pytest.mark.clocked

TIMEOUT_S = 60

CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME"),
}
"""The variables that may come from the environment."""

OTHER_CREDENTIALS = re.compile(
    r"GOOGLE_(SERVICE_ACCOUNT(_PATH)?|BEARER_TOKEN|APPLICATION_CREDENTIALS)"
    r"|AZURE_.*(ACCESS_KEY|MASTER_KEY|CLIENT_ID|SECRET|TENANT_ID|AUTHORITY|SAS|TOKEN|MSI|IDENTITY|OBJECT_ID|AZURE_CLI"
    r"|CREDENTIAL_TYPE|WORKLOAD|CLUSTER)"
)
"""Other sources of credentials. obstore would rightly prefer them to those above."""

VALUES = {
    "AWS_CHECKSUM_ALGORITHM": "sha256",
    "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms",
    "AWS_CONDITIONAL_PUT": "disabled",
    "AWS_REQUEST_PAYER": "requester",
    "AZURE_ENCRYPTION_KEY": "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=",
}
CLIENT = ("ALLOW_HTTP", "ALLOW_INVALID_CERTIFICATES", "CONNECT_TIMEOUT", "DEFAULT_CONTENT_TYPE", "HTTP1_ONLY",
          "HTTP2_ONLY", "PROXY_URL", "PROXY_EXCLUDES", "RANDOMIZE_ADDRESSES", "READ_TIMEOUT", "TIMEOUT", "USER_AGENT")  # fmt: skip


def known_variables(scheme: str) -> list[str]:
    """Return the variables that the installed obstore reads, without credentials."""
    file, prefix = {"s3": ("aws", "AWS"), "gs": ("gcs", "GOOGLE"), "az": ("azure", "AZURE")}[scheme]
    text = importlib.resources.files("obstore").joinpath("_store", f"_{file}.pyi").read_text()
    keys = (*map(str.upper, re.findall(r"^    ([a-z][a-z0-9_]*): ", text, re.M)), *CLIENT)
    names = {*re.findall(rf"\b{prefix}_[A-Z0-9_]+", text), *(f"{prefix}_{key}" for key in keys)}
    names -= {*CREDENTIALS[scheme], *filter(OTHER_CREDENTIALS.fullmatch, names)}
    return sorted(names)


async def use(driver: Driver) -> None:
    """Send every kind of request, and ignore errors: the server stores nothing."""
    content = memoryview(bytes((5 << 20) + 1))
    with contextlib.suppress(StorageError):
        upload = await driver.create("images/large", len(content))
        with contextlib.suppress(StorageError):
            await upload.write(0, content)
            await upload.commit()
        await upload.abort()
    for work in (
        driver.put("taken", b"data", exclusive=True),
        driver.put("small", b"data"),
        driver.get("small"),
        driver.stat("small"),
        driver.fetch("small", 1, 2),
        driver.delete("small"),
        driver.sweep("images"),
        driver.delete_all("images"),
    ):
        with contextlib.suppress(StorageError):
            await work


def requests(uri: str, server: ScriptedServer) -> list[tuple[object, ...]]:
    """Return the requests that ``uri`` causes, without values that depend on the time."""
    server.log.clear()
    used(uri, use)
    return sorted(map(without_time, server.log))


def without_time(request: Request) -> tuple[object, ...]:
    """Return a request without clocks, signatures and random boundaries."""
    changing = ("x-amz-date", "x-ms-date", "date", "amz-sdk-invocation-id", "traceparent")
    headers = {name: value for name, value in request.headers.items() if name not in changing}
    signed = headers.get("authorization", "")
    headers["authorization"] = re.sub(r"Signature=\w+|/20\d{6}/|:[\w+/]+=*$", "", signed)
    path = re.sub(r"blockid=[^&]*", "", request.path)
    body = request.body
    if boundary := re.search(r"boundary=([^\s;]+)", headers.get("content-type", "")):
        headers["content-type"] = "multipart"
        body = body.replace(boundary[1].encode(), b"")
        body = re.sub(rb"(?i)\r\n(x-ms-date|date|authorization): [^\r]*", b"", body)
    if "comp=blocklist" in path:
        body = b""  # names of blocks are random
    return request.method, request.host, path, sorted(headers.items()), body


@pytest.mark.nightly(14)
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("s3", ""), ("s3", "&checksum=none"), ("gs", ""), ("az", ""), ("az", "&anonymous=on")],
)
def test_no_variable_of_obstore_changes_a_request(
    scheme: str, options: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests stay identical, byte for byte, under any value of any variable of obstore."""
    set_credentials(monkeypatch, tmp_path)
    region = "&region=us-east-1" if scheme == "s3" else ""
    with ScriptedServer(s3_answer) as server:
        uri = f"{scheme}://bucket/run?endpoint={server.url}&part_size=5MiB&deadline=0s&timeout=5s&retries=0{region}{options}"
        expected = requests(uri, server)
        for value in ("true", "perhaps", "http://127.0.0.1:9"):
            for name in known_variables(scheme):
                monkeypatch.setenv(name, VALUES.get(name, value) if value == "true" else value)
            assert requests(uri, server) == expected
        assert len({request[0] for request in expected}) >= 4


@pytest.mark.parametrize(
    ("scheme", "leaked"),
    [
        ("s3", ["AWS_ENDPOINT_URL_S3", "AWS_SKIP_SIGNATURE", "AWS_CHECKSUM_ALGORITHM"]),
        ("s3", ["AWS_CONDITIONAL_PUT", "AWS_S3_EXPRESS", "AWS_SERVER_SIDE_ENCRYPTION"]),
        ("s3", ["AWS_SSE_KMS_KEY_ID", "AWS_REQUEST_PAYER"]),
        ("gs", ["GOOGLE_BASE_URL", "GOOGLE_SKIP_SIGNATURE"]),
        ("az", ["AZURE_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR"]),
    ],
)
def test_the_variables_are_those_that_the_client_reads(scheme: str, leaked: list[str]) -> None:
    """The list of variables contains at least those known to have changed requests."""
    assert set(leaked) <= set(known_variables(scheme))


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is restored after any error, even with two threads at once."""
    monkeypatch.setenv("HIDDEN_ONE", "1")
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p

    def look() -> str | None:
        assert os.environ["HIDDEN_ONE"] == "1"  # Python's own view of it never changes
        found = getenv(b"HIDDEN_ONE")
        return found and found.decode()

    def fail() -> None:
        assert look() is None
        raise KeyError

    def often() -> None:
        for _ in range(200):
            assert made_without(["hidden_one"], look) is None

    with pytest.raises(KeyError):
        made_without(["HIDDEN_ONE"], fail)
    assert look() == "1"
    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert look() == "1"
