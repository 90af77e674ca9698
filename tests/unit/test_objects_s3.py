"""S3: certificates, proxies, regions, and options of stored objects, in all requests."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from support.drivers import bare, stored, used
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

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unset certificates and proxies, and forget servers that other tests trust."""
    set_credentials(monkeypatch, tmp_path)


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """Return a private authority, with its certificate in ``ca.pem``."""
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    return made


async def use(driver: Driver) -> None:
    """Use both clients: one puts an object, the other looks for unfinished uploads."""
    await driver.put("k", b"data")
    await driver.sweep("k")


def asked(server: ScriptedServer) -> list[str]:
    """Return the methods of all requests, without the first look at the server."""
    return [request.method for request in server.log if request.path != "/holdfast"]


@pytest.mark.nightly(10)
@pytest.mark.parametrize(
    "named_by", ["option", "home", "AWS_CA_BUNDLE", "profile", "SSL_CERT_FILE"]
)
def test_one_name_of_a_private_authority_serves_both_clients(
    named_by: str, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are put and unfinished uploads found, wherever the authority is named."""
    path, option = tmp_path / "ca.pem", ""
    if named_by == "option":
        option = f"&ca={path}"
    elif named_by == "home":
        monkeypatch.setenv("HOME", str(tmp_path))
        option = "&ca=~/ca.pem"
    elif named_by == "profile":
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {path}\n")
    else:
        monkeypatch.setenv(named_by, str(path))
    with ScriptedServer(s3_answer, authority, tls=True) as server:
        used(f"s3://bucket/run?endpoint={server.url}&{ONCE}{option}", use)
        assert asked(server) == ["PUT", "GET"]


@pytest.mark.parametrize("scheme", ["gs", "az", "https"])
def test_other_stores_take_the_option_too(
    scheme: str, authority: trustme.CA, tmp_path: Path
) -> None:
    """This holds for Google's stores, Azure's, and web servers."""

    with ScriptedServer(s3_answer, authority, tls=True) as server:
        own = {"gs": "&anonymous=on", "az": "&account=account", "https": ""}[scheme]
        place = f"bucket?endpoint={server.url}"
        if scheme == "https":
            place = f"localhost:{server.port}/run?retries=0"
        uri = f"{scheme}://{place}{own}&ca={tmp_path / 'ca.pem'}"
        assert used(uri, lambda driver: driver.get("k")) == b"abc"


def test_a_certificate_that_is_not_trusted_is_said_at_once(authority: trustme.CA) -> None:
    """The error comes before the deadline, is final, and names the certificate and the option."""
    with ScriptedServer(s3_answer, authority, tls=True) as server:
        began_s = time.monotonic()
        says = r"certificate is not trusted: UnknownIssuer.*\?ca="
        with pytest.raises(StorageError, match=says) as caught:
            used(f"s3://bucket/run?endpoint={server.url}&deadline=1h", use)
        assert time.monotonic() - began_s < 30
        assert not caught.value.temporary
        assert server.log == []


@pytest.mark.parametrize(
    ("endpoint", "match"),
    [
        ("https://127.0.0.1:{port}", "NotValidForName.*endpoint"),
        ("https://localhost:{clear}", "does not speak TLS"),
    ],
)
def test_the_name_and_the_protocol_are_looked_at(
    endpoint: str, match: str, authority: trustme.CA, tmp_path: Path
) -> None:
    """A certificate for another host and a server without TLS are errors."""
    secure, plain = ScriptedServer(s3_answer, authority, tls=True), ScriptedServer(s3_answer)
    with secure as server, plain as clear:
        url = endpoint.format(port=server.port, clear=clear.port)
        with pytest.raises(StorageError, match=match):
            used(f"s3://bucket/run?endpoint={url}&deadline=1h&ca={tmp_path / 'ca.pem'}", use)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_refused(content: str | None, tmp_path: Path) -> None:
    """It is missing, or contains something else. The error names it, and nothing is sent."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with ScriptedServer(s3_answer) as server:
        with pytest.raises(UriError, match=r"certificates to trust, .*ca\.pem"):
            used(f"s3://bucket/run?endpoint={server.url}&ca={path}", use)
        assert server.log == []


def test_both_clients_go_through_the_proxy() -> None:
    """Requests for a host that does not exist reach only the proxy."""
    with ScriptedServer(s3_answer) as proxy:
        endpoint = "http://store.example"
        used(f"s3://bucket/run?endpoint={endpoint}&proxy={proxy.url}&{ONCE}", use)
        asked = [(request.method, request.host) for request in proxy.log]
        assert asked == [("PUT", "store.example"), ("GET", "store.example")]


def in_region(region: str) -> Callable[[Request], Answer]:
    """Answer as AWS does for a bucket in ``region``."""

    def answer(request: Request) -> Answer:
        scope = request.headers.get("authorization", "")
        if request.method == "HEAD" and request.path == "/":
            status = 403 if f".{region}." in request.host else 301
            return Answer(status, b"", {"x-amz-bucket-region": region})
        if f"/{region}/s3/" not in scope and request.path != "/holdfast":
            code = "<Error><Code>AuthorizationHeaderMalformed</Code></Error>"
            return Answer(400, code.encode(), {"x-amz-bucket-region": region})
        return s3_answer(request)

    return answer


def test_the_region_of_a_bucket_is_found(authority: trustme.CA, tmp_path: Path) -> None:
    """AWS gets one unsigned request for the region. Both clients sign for it at its own host."""
    with ScriptedServer(in_region("eu-west-3"), authority) as proxy:
        for _ in range(2):
            used(f"s3://bucket/run?proxy={proxy.url}&ca={tmp_path / 'ca.pem'}&{ONCE}", use)
        heads = [asked for asked in proxy.log if (asked.method, asked.path) == ("HEAD", "/")]
        rest = [request for request in proxy.log if request.method in ("PUT", "GET")]
        assert not any("authorization" in request.headers for request in heads)
        assert heads[0].host == "bucket.s3.us-east-1.amazonaws.com"
        assert {request.host for request in rest} == {"bucket.s3.eu-west-3.amazonaws.com"}
        assert [request.method for request in rest] == ["PUT", "GET"] * 2
        assert len(heads) <= 2  # botocore itself follows the redirect, once


def test_a_server_that_never_answers_does_not_hold_up_the_first_look(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """The look at its certificate gives up soon, and leaves the rest to the first operation."""
    released = threading.Event()

    def slow_once(request: Request) -> Answer:
        if request.path == "/holdfast":
            released.wait(TIMEOUT_S)
        return s3_answer(request)

    with ScriptedServer(slow_once, authority, tls=True) as server:
        began_s = time.monotonic()
        options = f"timeout=2s&deadline=1s&retries=0&ca={tmp_path / 'ca.pem'}"
        used(f"s3://bucket/run?endpoint={server.url}&{options}", use)
        released.set()
        assert time.monotonic() - began_s < 30
        assert asked(server) == ["PUT", "GET"]


def test_certificates_of_the_environment_do_not_matter_without_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variable may name a missing file. For a store without TLS, nobody looks for it."""
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nonexistent/ca.pem")
    with ScriptedServer(s3_answer) as server:
        used(f"s3://bucket/run?endpoint={server.url}&{ONCE}", use)
        assert asked(server) == ["PUT", "GET"]


# Storage options are part of every request that stores an object


KEY = base64.b64encode(bytes(range(32))).decode()
LARGE = memoryview(bytes((5 << 20) + 1))
ARN = "arn:aws:kms:us-east-1:123456789012:key/abc"


async def store(driver: Driver) -> None:
    """Store objects in every way, read one, and look for leftovers."""
    await driver.put("plain", b"abc")
    await driver.put("exclusive", b"abc", exclusive=True)
    await stored(driver, "small", b"abc")
    with contextlib.suppress(StorageError):  # the server stores only three bytes
        await stored(driver, "large", LARGE)
    assert await driver.get("plain") == b"abc"
    if driver.traits.copies is not None:
        await compose(driver)
    await driver.sweep("large")


async def compose(driver: Driver) -> None:
    """Copy an object, and write another in the same way."""
    upload = await driver.compose("composed", 3)
    await upload.copy(0, driver, "plain", 0, 3)
    await upload.commit()
    upload = await driver.compose("composed", 3)
    await upload.write(0, memoryview(b"abc"))
    await upload.commit()


def kind(request: Request) -> str:
    """Classify a request."""
    parts = urlsplit(request.path)
    query = parse_qs(parts.query, keep_blank_values=True)
    if parts.path.endswith("composed") and "uploads" in query:
        return "compose"
    if "x-amz-copy-source" in request.headers:
        return "copy"
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
STORING = ["plain", "exclusive", "small", "begin", "compose"]


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
        assert kinds >= {"part", "copy", "complete", "GET", "HEAD", "list"}
        assert {asked.headers.get("x-amz-request-payer") for asked in server.log} == {"requester"}


def test_a_key_of_the_customers_goes_with_everything_that_needs_it(
    authority: trustme.CA, tmp_path: Path
) -> None:
    """Objects, parts, reads and sizes use the customer's key, which appears in no URI."""
    with ScriptedServer(s3_answer, authority, tls=True) as server:
        uri = f"s3://bucket/run?endpoint={server.url}&part_size=5MiB&{ONCE}&sse=customer"
        used(f"{uri}&ca={tmp_path / 'ca.pem'}", store, sse_customer_key=KEY)
        told = headers(server, [*STORING, "part", "copy", "GET"])
        sent = [one.get(f"{SSE}-customer-key") for one in told.values()]
        assert sent == [KEY] * len(told)
        copy = next(request for request in server.log if kind(request) == "copy")
        assert copy.headers["x-amz-copy-source"] == "bucket/run/plain"
        assert copy.headers["x-amz-copy-source-range"] == "bytes=0-2"
        assert copy.headers[f"x-amz-copy-source{SSE.removeprefix('x-amz')}-customer-key"] == KEY


@pytest.mark.parametrize(
    ("bucket", "options", "is_able"),
    [
        ("bucket", "", True),
        ("bucket", "checksum=signed", True),
        ("bucket", "checksum=sha256", False),
        ("bucket", "checksum=crc64nvme", False),
        ("bucket--usw2-az1--x-s3", "", False),
    ],
)
def test_what_cannot_be_copied_is_known_before(bucket: str, options: str, is_able: bool) -> None:
    """The traits say without a request whether parts are copied. A driver with other credentials or
    of another bucket is not copied from."""
    driver = bare(f"s3://{bucket}/run?{options}")
    assert (driver.traits.copies is not None) == is_able
    assert driver.copies_from(bare(f"s3://{bucket}/other?{options}")) == is_able
    for other in (f"s3://other/run?{options}", f"s3://{bucket}/run?profile=p&{options}"):
        assert not driver.copies_from(bare(other))


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


def test_a_directory_bucket_is_used_by_sessions(authority: trustme.CA, tmp_path: Path) -> None:
    """The name of a directory bucket makes both clients use sessions and list by folder."""
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
