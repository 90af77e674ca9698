"""Credentials in files and variables, of AWS and of Google, and variables of obstore."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.resources
import json
import os
import re
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

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
from holdfast.drivers.objects import s3
from holdfast.drivers.objects.connections import made_without
from holdfast.drivers.objects.s3_place import Place
from holdfast.errors import AccessError, HoldfastError, StorageError, UriError

pytestmark = pytest.mark.clocked

LARGE = memoryview(bytes((5 << 20) + 1))


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file of credentials. Nothing else gives any, not even Google's own file."""
    set_credentials(monkeypatch, tmp_path, ())
    return tmp_path / "credentials"


def write(file: Path, key: str) -> None:
    """Replace the file by another one of the same name, as tools do that renew it."""
    new = file.with_suffix(".new")
    new.write_text(
        f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t{key}\n"
    )
    new.replace(file)


def only_fresh(code: str) -> Callable[[Request], Answer]:
    """Return a store that refuses all keys but one with a reason; to HEAD it gives none."""

    def answer(request: Request) -> Answer:
        if "Credential=FRESH/" in request.headers.get("authorization", ""):
            return s3_answer(request)
        status = 403 if code == "InvalidAccessKeyId" else 400
        return Answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    return answer


async def upload(driver: Driver) -> None:
    """Upload an object of two parts."""
    upload = await driver.create("large", len(LARGE))
    await upload.write(0, LARGE)
    await upload.abort()


async def compose(driver: Driver) -> None:
    """Copy an object."""
    upload = await driver.compose("copy", 3)
    await upload.copy(0, driver, "k", 0, 3)
    await upload.commit()


OPERATIONS: dict[str, Callable[[Driver], Awaitable[object]]] = {
    "put": lambda driver: driver.put("k", b"data"),
    "get": lambda driver: driver.get("k"),
    "stat": lambda driver: driver.stat("k"),
    "fetch": lambda driver: driver.fetch("k", 0, 3),
    "delete": lambda driver: driver.delete("k"),
    "sweep": lambda driver: driver.sweep("k"),
    "upload": upload,
    "compose": compose,
    "upload_small": lambda driver: stored(driver, "small", b"abc"),
}


def uri(server: ScriptedServer) -> str:
    """Return a URI of the store."""
    return f"s3://bucket/run?endpoint={server.url}&deadline=1s&retries=0&part_size=5MiB"


@pytest.mark.nightly(7)
@pytest.mark.parametrize(
    ("operation", "code"),
    [
        *((operation, "ExpiredToken") for operation in OPERATIONS),
        ("put", "InvalidAccessKeyId"),
        ("put", "SignatureDoesNotMatch"),
    ],
)
def test_a_renewed_file_is_read_by_a_driver_that_is_open(
    operation: str, code: str, file: Path
) -> None:
    """The first operation after the renewal works, whichever it is, although the store refuses the
    old credentials once more."""

    async def use(driver: Driver) -> None:
        with pytest.raises(AccessError):
            await driver.put("k", b"data")
        with pytest.raises(AccessError):
            await driver.sweep("k")
        write(file, "FRESH")
        await OPERATIONS[operation](driver)

    with ScriptedServer(only_fresh(code)) as server:
        write(file, "STALE")
        used(uri(server), use)


@pytest.mark.parametrize(
    ("code", "requests"), [("ExpiredToken", [2, 1, 1]), ("AccessDenied", [1, 1, 1])]
)
def test_what_is_refused_is_not_asked_for_ever(code: str, requests: list[int], file: Path) -> None:
    """A driver looks for other credentials once, if they have expired, and then fails at once."""

    async def use(driver: Driver) -> list[int]:
        counts = []
        for _ in range(3):
            server.log.clear()
            with pytest.raises(AccessError, match=code):
                await driver.put("k", b"data")
            counts.append(len(server.log))
        return counts

    with ScriptedServer(only_fresh(code)) as server:
        write(file, "STALE")
        assert used(uri(server), use) == requests


def test_what_has_nothing_to_do_with_credentials_is_not_tried_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that cannot be made asks for nothing twice; a closed driver says that it is closed."""
    tried: list[str] = []

    def refuse(session: object, bucket: str, *_: object) -> Place:
        tried.append(bucket)
        raise UriError("no such place")

    async def use(driver: Driver) -> None:
        with pytest.raises(UriError):
            await driver.put("k", b"data")
        await driver.close()
        with pytest.raises(StorageError, match="closed"):
            await driver.put("k", b"data")

    write(file, "STALE")
    monkeypatch.setattr(s3, "place_of", refuse)
    with ScriptedServer(s3_answer) as server:
        used(uri(server), use)
    assert tried == ["bucket"]


# Google


async def put(driver: Driver) -> None:
    """Put one object, and look at it twice."""
    await driver.put("k", b"abc")
    assert await driver.get("k") == b"abc"
    await driver.delete("k")


def google(request: Request) -> Answer:
    """Answer as Google's servers: tokens, and a public bucket."""
    later = datetime.now(UTC) + timedelta(hours=1)
    if request.path == "/sts":
        good = b"subject_token=from-the-cluster" in request.body
        token = {"access_token": "federated", "token_type": "Bearer", "expires_in": 3600}
        refusal = {"error": "invalid_grant", "error_description": "no such subject"}
        return _json(token) if good else _json(refusal, 400)
    if request.path == "/token" and request.host == "oauth2.googleapis.com":
        return _json({"access_token": "of-user", "token_type": "Bearer", "expires_in": 3600})
    if request.path.endswith(":generateAccessToken"):
        source = request.headers["authorization"].removeprefix("Bearer ")
        expiry = later.strftime("%Y-%m-%dT%H:%M:%SZ")
        return _json({"accessToken": f"{source}-as-trainer", "expireTime": expiry})
    return s3_answer(request)


def _json(content: dict[str, Any], status: int = 200) -> Answer:
    return Answer(status, json.dumps(content).encode(), {"content-type": "application/json"})


def federated(
    folder: Path, server: ScriptedServer, subject: str = "from-the-cluster", **more: Any
) -> dict[str, Any]:
    """Return workload identity federation with a file as its subject."""
    (folder / "subject").write_text(subject)
    pool = "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p"
    return {
        "type": "external_account",
        "audience": f"{pool}/providers/k",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{server.url}/sts",
        "credential_source": {"file": str(folder / "subject")},
        **more,
    }


def use_file(path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``content`` the application default credentials."""
    path.write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))


def tokens(server: ScriptedServer) -> set[str | None]:
    """Return the tokens of all requests for objects."""
    requests = [request for request in server.log if request.path.startswith("/bucket/")]
    return {request.headers.get("authorization") for request in requests}


@pytest.mark.parametrize("named_by", ["GOOGLE_APPLICATION_CREDENTIALS", "gcloud"])
def test_federated_credentials_are_used(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token in a subject's file is exchanged for the token that requests carry."""
    with ScriptedServer(google) as server:
        content = federated(tmp_path, server)
        if named_by == "gcloud":  # in its folder, with nothing in the environment
            (tmp_path / "gcloud").mkdir()
            path = tmp_path / "gcloud" / "application_default_credentials.json"
            path.write_text(json.dumps(content))
        else:
            use_file(tmp_path / "adc.json", content, monkeypatch)
        used(f"gs://bucket/run?endpoint={server.url}&{ONCE}", put)
        assert tokens(server) == {"Bearer federated"}


def test_impersonated_credentials_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's token is exchanged for a service account's at Google, by proxy and authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    account = "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/trainer@p.iam.gserviceaccount.com"
    user = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    with ScriptedServer(google, authority) as proxy:
        content = {
            "type": "impersonated_service_account",
            "service_account_impersonation_url": f"{account}:generateAccessToken",
            "source_credentials": user,
        }
        use_file(tmp_path / "adc.json", content, monkeypatch)
        used(f"gs://bucket/run?proxy={proxy.url}&ca={tmp_path / 'ca.pem'}&{ONCE}", put)
        assert tokens(proxy) == {"Bearer of-user-as-trainer"}
        hosts = {asked.host for asked in proxy.log if asked.path.startswith("/bucket/")}
        assert hosts == {"storage.googleapis.com"}


def test_a_refused_exchange_is_an_error_of_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file and Google's reason, without the token. No object is requested."""
    with ScriptedServer(google) as server:
        use_file(tmp_path / "adc.json", federated(tmp_path, server, "hunter2"), monkeypatch)
        with pytest.raises(AccessError, match=r"adc\.json.*no such subject") as caught:
            used(f"gs://bucket/run?endpoint={server.url}&{ONCE}", put)
        assert "hunter2" not in str(caught.value)
        assert tokens(server) == set()


@pytest.mark.parametrize("content", [{"type": "external_account"}, {"type": "unheard_of"}])
def test_a_file_that_cannot_be_used_is_said(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples are half a file, and an unknown type."""
    use_file(tmp_path / "adc.json", content, monkeypatch)
    with ScriptedServer(google) as server, pytest.raises(HoldfastError, match=r"adc\.json"):
        used(f"gs://bucket/run?endpoint={server.url}&{ONCE}", put)


def test_without_credentials_nobody_is_asked_for_any() -> None:
    """With anonymous=on, requests carry no token, and the metadata server gets no request."""
    with ScriptedServer(google) as server:
        used(f"gs://bucket/run?endpoint={server.url}&{ONCE}&anonymous=on", put)
        assert [request.method for request in server.log] == ["PUT", "GET", "DELETE"]
        assert not any((token or "").removeprefix("Bearer").strip() for token in tokens(server))


# Variables of obstore, which change no request


CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME"),
}
"""Variables of credentials that may come from the environment."""

OTHER_CREDENTIALS = re.compile(
    r"GOOGLE_(SERVICE_ACCOUNT(_PATH)?|BEARER_TOKEN|APPLICATION_CREDENTIALS)"
    r"|AZURE_.*(ACCESS_KEY|MASTER_KEY|CLIENT_ID|SECRET|TENANT_ID|AUTHORITY|SAS|TOKEN|MSI|IDENTITY|OBJECT_ID|AZURE_CLI"
    r"|CREDENTIAL_TYPE|WORKLOAD|CLUSTER)"
)
"""Other sources of credentials. obstore would rightly prefer them to the above."""

CHANGED = {
    "s3": ["AWS_ENDPOINT_URL_S3", "AWS_SKIP_SIGNATURE", "AWS_S3_EXPRESS", "AWS_SSE_KMS_KEY_ID"],
    "gs": ["GOOGLE_BASE_URL", "GOOGLE_SKIP_SIGNATURE"],
    "az": ["AZURE_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR"],
}
"""Variables that once changed requests."""

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
    others = filter(OTHER_CREDENTIALS.fullmatch, names)
    assert names >= {*CHANGED[scheme]}
    return sorted(names - {*CREDENTIALS[scheme], *others})


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
        thread.join(60)
    assert look() == "1"
