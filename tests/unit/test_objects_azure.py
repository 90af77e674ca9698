"""Copies within Azure Blob Storage: their requests, their signatures, and their limits."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from support.drivers import asynchronous
from support.servers.scripted import DATE, Answer, Request, ScriptedServer, set_credentials

from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import open_driver
from holdfast.errors import AccessError, BusyError, StorageDownError, StorageError

pytestmark = pytest.mark.clocked

pytest.importorskip("obstore", reason="obstore is not installed")

NBYTES = 5 << 20
"""Size of each part."""
STRANGE = "a/ü %2F+&b"
DELEGATED = """<UserDelegationKey><SignedOid>o</SignedOid><SignedTid>t</SignedTid>
<SignedStart>{0}</SignedStart><SignedExpiry>{1}</SignedExpiry><SignedService>b</SignedService>
<SignedVersion>2023-11-03</SignedVersion><Value>c2VjcmV0</Value></UserDelegationKey>"""


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set dummy credentials, and forget the stores of other tests."""
    set_credentials(monkeypatch, tmp_path)


def query_of(url: str) -> dict[str, str]:
    """Return the query of a URL."""
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


class Container:
    """A store that reports two parts of each blob, and keeps nothing. ``fault`` may answer a
    request for a block instead."""

    def __init__(self, fault: Callable[[Request], Answer | None] = lambda asked: None) -> None:
        self.fault = fault

    def __call__(self, asked: Request) -> Answer:
        query = query_of(asked.path)
        if query.get("comp") == "userdelegationkey":
            now = datetime.now(UTC)
            times = (f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in (now, now + timedelta(hours=1)))
            return Answer(200, DELEGATED.format(*times).encode())
        if asked.method == "HEAD":
            headers = {"content-length": str(2 * NBYTES), "last-modified": DATE, "etag": "e"}
            return Answer(200, headers=headers)
        return (query.get("comp") == "block" and self.fault(asked)) or Answer(201)


def opened(server: ScriptedServer, options: str = "", bucket: str = "bucket") -> Driver:
    """Open a driver that never retries."""
    uri = f"az://{bucket}/run?endpoint={server.url}&part_size=5MiB&{options}"
    return open_driver(uri, retries=0, op_timeout_s="off")


async def compose(driver: Driver, key: str = "to") -> None:
    """Store an object of a part that is copied and one that is written."""
    upload = await driver.compose(key, 2 * NBYTES)
    try:
        await upload.copy(0, driver, STRANGE, 7, NBYTES)
        await upload.write(NBYTES, memoryview(bytes(NBYTES)))
        await upload.commit()
    finally:
        await upload.abort()


@pytest.mark.parametrize("token", ["", "bearer"])
@asynchronous
async def test_the_store_copies_what_a_signature_lets_it_read(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each URL is signed for one blob and one purpose, for an hour, with the account's key or with
    a key that the store has issued for a token. The list of blocks has both, in order."""
    if token:
        monkeypatch.setenv("AZURE_STORAGE_TOKEN", token)
    with ScriptedServer(Container()) as server:
        driver = opened(server)
        await driver.put(STRANGE, b"x")
        await compose(driver, "to/ü %")
        await driver.close()
    put = next(asked for asked in server.log if "comp" not in query_of(asked.path))
    copy, write, commit = (
        asked for asked in server.log if query_of(asked.path).get("comp") in ("block", "blocklist")
    )
    source = copy.headers["x-ms-copy-source"]
    assert source.partition("?")[0] == f"{server.url}{put.path}"
    assert copy.headers["x-ms-source-range"] == f"bytes=7-{6 + NBYTES}"
    assert (len(copy.body), len(write.body)) == (0, NBYTES)
    assert {query_of(asked.path)["sp"] for asked in (copy, write, commit)} == {"w"}
    assert query_of(source)["sp"] == "r"
    assert "secret" not in source
    assert ("skoid" in query_of(source)) == bool(token)
    blocks = re.findall("<Latest>(.*?)</Latest>", commit.body.decode())
    assert blocks == [query_of(asked.path)["blockid"] for asked in (copy, write)]
    assert {len(base64.b64decode(block)) for block in blocks} == {32}


def answering(status: int, code: str, *, times: int = 1000) -> Callable[[Request], Answer | None]:
    """Return a fault that refuses, and repeats the whole request, the first ``times``."""
    left = [None] * times

    def answer(asked: Request) -> Answer | None:
        if not left:
            return None
        left.pop()
        text = f"<Error><Code>{code}</Code><Message>{asked.path} {asked.headers}</Message></Error>"
        return Answer(status, text.encode(), cut=not status)

    return answer


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AuthorizationPermissionMismatch", AccessError),
        (400, "InvalidHeaderValue", StorageError),
        pytest.param(403, "AuthenticationFailed", AccessError, marks=pytest.mark.nightly(6)),
        pytest.param(503, "ServerBusy", BusyError, marks=pytest.mark.nightly(6)),
        pytest.param(0, "", StorageDownError, marks=pytest.mark.nightly(6)),
    ],
)
@asynchronous
async def test_no_error_shows_a_signature(
    status: int, code: str, kind: type[StorageError], caplog: pytest.LogCaptureFixture
) -> None:
    """A failed request raises the usual error, even if the store repeats the signed URLs."""
    caplog.set_level(logging.DEBUG)
    with ScriptedServer(Container(answering(status, code))) as server:
        driver = opened(server)
        with pytest.raises(
            kind, match=f"copy failed.*{code}.*key to, in az://bucket/run"
        ) as caught:
            await compose(driver)
        await driver.close()
    error: BaseException | None = caught.value
    while error is not None:
        assert "sig" not in repr(error)
        error = error.__cause__ or error.__context__
    assert "sig=" not in caplog.text


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AuthenticationFailed"), (503, "ServerBusy"), (0, "")]
)
@asynchronous
async def test_a_request_is_sent_again(status: int, code: str) -> None:
    """A request is repeated if the store is busy, is gone, or takes a signature for one that is
    not valid yet because its clock is behind."""
    with ScriptedServer(Container(answering(status, code, times=1))) as server:
        driver = opened(server)
        await compose(driver)
        await driver.close()
    assert [query_of(asked.path)["comp"] for asked in server.log if "comp" in query_of(asked.path)] == [
        "block", "block", "block", "blocklist",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "variable"),
    [("anonymous=on", ""), ("", "AZURE_STORAGE_SAS_TOKEN"), ("endpoint=http://192.0.2.1", "")],
)
def test_nothing_is_copied_without_a_key(
    options: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no copies without credentials that can sign, and none where others could read the
    signatures on their way."""
    if variable:
        monkeypatch.setenv(variable, "sv=1&sig=x")
    given = options if "endpoint" in options else f"endpoint=http://127.0.0.1:1&{options}"
    driver = open_driver(f"az://bucket/run?{given}")
    assert driver.traits.copies is None
    assert not driver.copies_from(driver)


@pytest.mark.parametrize(
    ("other", "accepted"),
    [
        ("az://bucket/other", True),
        ("az://another/run", False),
        ("az://bucket/run?account=other", False),
        ("az://bucket/run?endpoint=https://elsewhere", False),
        ("s3://bucket/run", False),
    ],
)
def test_copies_stay_within_a_container(other: str, accepted: bool) -> None:
    """The source is in the same container, and read with the same credentials."""
    assert open_driver("az://bucket/run").copies_from(open_driver(other)) == accepted
