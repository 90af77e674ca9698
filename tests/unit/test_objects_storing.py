"""Storage options of S3 objects are part of every request that stores one, by every method."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from support.drivers import stored, used
from support.servers.scripted import (
    ONCE,
    Answer,
    Request,
    ScriptedServer,
    s3_answer,
    set_credentials,
)

from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import open_driver
from holdfast.errors import StorageError, UriError

pytestmark = pytest.mark.clocked

KEY = base64.b64encode(bytes(range(32))).decode()
LARGE = memoryview(bytes((5 << 20) + 1))
ARN = "arn:aws:kms:us-east-1:123456789012:key/abc"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set dummy credentials, and clear all other variables of AWS."""
    set_credentials(monkeypatch, tmp_path)


async def store(driver: Driver) -> None:
    """Store objects in every way, read one, and look for leftovers."""
    await driver.put("plain", b"abc")
    await driver.put("exclusive", b"abc", exclusive=True)
    await stored(driver, "small", b"abc")
    with contextlib.suppress(StorageError):  # the server stores only three bytes
        await stored(driver, "large", LARGE)
    assert await driver.get("plain") == b"abc"
    await driver.sweep("large")


def kind(request: Request) -> str:
    """Classify a request."""
    parts = urlsplit(request.path)
    query = parse_qs(parts.query, keep_blank_values=True)
    if request.method == "PUT":
        return "part" if "partNumber" in query else parts.path.rpartition("/")[2]
    if request.method == "POST":
        return "begin" if "uploads" in query else "complete"
    return "list" if "uploads" in query or "list-type" in query else request.method


TOLD = ("x-amz-server", "x-amz-storage", "x-amz-tagging", "x-amz-request-payer")


def headers(server: ScriptedServer, kinds: list[str]) -> dict[str, dict[str, str]]:
    """Return the storage headers of the first request of each kind."""
    found: dict[str, dict[str, str]] = {}
    for request in server.log:
        told = {name: text for name, text in request.headers.items() if name.startswith(TOLD)}
        found.setdefault(kind(request), told)
    return {kind: found[kind] for kind in kinds}


SSE = "x-amz-server-side-encryption"
STORING = ["plain", "exclusive", "small", "begin"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("sse=AES256", {SSE: "AES256"}),
        (
            f"sse=aws:kms&kms={ARN}&bucket_kms=on",
            {SSE: "aws:kms", f"{SSE}-aws-kms-key-id": ARN, f"{SSE}-bucket-key-enabled": "true"},
        ),
        (
            "sse=aws:kms:dsse&kms=alias/holdfast",
            {SSE: "aws:kms:dsse", f"{SSE}-aws-kms-key-id": "alias/holdfast"},
        ),
        ("storage_class=STANDARD_IA", {"x-amz-storage-class": "STANDARD_IA"}),
        ("tags=team=ml,run=7", {"x-amz-tagging": "run=7&team=ml"}),
        ("requester_pays=on", {"x-amz-request-payer": "requester"}),
        ("", {}),
    ],
)
def test_every_object_is_stored_as_asked(options: str, expected: Mapping[str, str]) -> None:
    """Every request that creates an object has encryption, class, tags and payer."""
    with ScriptedServer(s3_answer) as server:
        used(f"s3://bucket/run?endpoint={server.url}&part_size=5MiB&{ONCE}&{options}", store)
        told = headers(server, STORING)
        for one in told.values():
            if tags := one.get("x-amz-tagging"):
                one["x-amz-tagging"] = "&".join(sorted(tags.split("&")))
        assert told == {name: dict(expected) for name in STORING}


def test_whoever_pays_says_so_in_every_request() -> None:
    """Reads, parts and listings of both clients name the payer, too."""
    with ScriptedServer(s3_answer) as server:
        options = f"part_size=5MiB&{ONCE}&requester_pays=on"
        used(f"s3://bucket/run?endpoint={server.url}&{options}", store)
        kinds = {kind(request) for request in server.log}
        assert kinds >= {"part", "complete", "GET", "HEAD", "list"}
        assert {asked.headers.get("x-amz-request-payer") for asked in server.log} == {"requester"}


def test_a_key_of_the_customers_goes_with_everything_that_needs_it(tmp_path: Path) -> None:
    """Objects, parts, reads and sizes use the customer's key, which appears in no URI."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with ScriptedServer(s3_answer, authority, tls=True) as server:
        uri = f"s3://bucket/run?endpoint={server.url}&part_size=5MiB&{ONCE}&sse=customer"
        used(f"{uri}&ca={tmp_path / 'ca.pem'}", store, sse_customer_key=KEY)
        told = headers(server, [*STORING, "part", "GET"])
        sent = [one.get(f"{SSE}-customer-key") for one in told.values()]
        assert sent == [KEY] * len(told)


def test_a_key_is_not_sent_in_clear() -> None:
    """A customer's key is refused without TLS, before any request."""
    with ScriptedServer(s3_answer) as server:
        root = f"s3://bucket/run?endpoint={server.url}&sse=customer"
        with pytest.raises(UriError, match="in clear"):
            used(root, store, sse_customer_key=KEY)
        assert server.log == []


@pytest.mark.parametrize(
    ("query", "options", "match"),
    [
        ("kms=abc", {}, "sse=aws:kms"),
        ("bucket_kms=on&sse=AES256", {}, "sse=aws:kms"),
        ("sse=customer", {}, "need each other"),
        ("sse=AES256", {"sse_customer_key": KEY}, "need each other"),
        ("sse=customer", {"sse_customer_key": "short"}, "must be 32 bytes"),
        (f"sse=customer&sse_customer_key={KEY}", {}, "environment"),
        ("sse=rot13", {}, "must be one of"),
        ("storage_class=DEEP_ARCHIVE", {}, "cannot be read"),
        ("storage_class=a%20b", {}, "storage class"),
        ("tags=team", {}, "must be a list of tags"),
        ("tags=a=1,a=2", {}, "distinct names"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    query: str, options: dict[str, str], match: str
) -> None:
    """Incompatible options are refused before any request."""
    with pytest.raises(UriError, match=match):
        open_driver(f"s3://bucket/run?{query}", **options)


@pytest.mark.parametrize("query", ["tags=a=1", "storage_class=STANDARD", "sse=AES256"])
def test_directory_buckets_refuse_what_they_do_not_know(query: str) -> None:
    """Directory buckets refuse tags, classes and encryption of single objects."""
    with pytest.raises(UriError, match="S3 Express"):
        open_driver(f"s3://bucket--use1-az4--x-s3/run?{query}")


def express_answer(request: Request) -> Answer:
    """Answer as a directory bucket: give sessions, and list whole folders only."""
    query = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
    if "session" in query:
        text = (
            "<CreateSessionResult><Credentials><SessionToken>st</SessionToken><SecretAccessKey>s</SecretAccessKey>"
            "<AccessKeyId>SESSION</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
            "</CreateSessionResult>"
        )
        return Answer(200, text.encode(), {"content-type": "application/xml"})
    prefix = query.get("prefix", [""])[0]
    if kind(request) == "list" and prefix and not prefix.endswith("/"):
        return Answer(400, b"<Error><Code>InvalidPrefix</Code></Error>")
    return s3_answer(request)


def test_a_directory_bucket_is_used_by_sessions(tmp_path: Path) -> None:
    """The name of a directory bucket makes both clients use sessions and list by folder."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    host = "bucket--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com"

    async def use(driver: Driver) -> None:
        await store(driver)
        assert [info async for info in driver.list("images")] != []
        await driver.delete_all("images")

    with ScriptedServer(express_answer, authority) as proxy:
        uri = f"s3://bucket--use1-az4--x-s3/run?proxy={proxy.url}&ca={tmp_path / 'ca.pem'}&part_size=5MiB&{ONCE}"
        used(uri, use)
        rest = [request for request in proxy.log if request.path not in ("/holdfast", "/?session")]
        assert {request.host for request in rest} == {host}
        assert {request.headers.get("x-amz-s3session-token") for request in rest} == {"st"}
        assert {kind(request) for request in rest} >= {"plain", "begin", "part", "complete", "list"}
