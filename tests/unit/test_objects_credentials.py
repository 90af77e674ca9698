"""Credentials in shared files: read again when they were written, by a process that goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.drivers import used
from support.servers.scripted import Answer, Request, ScriptedServer, s3_answer, set_credentials

from holdfast.drivers.contract import Driver
from holdfast.drivers.objects import s3
from holdfast.drivers.objects.s3_place import Place
from holdfast.errors import AccessError, StorageError, UriError

pytestmark = pytest.mark.clocked

LARGE = memoryview(bytes((5 << 20) + 1))


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of credentials, and nothing else that says any."""
    set_credentials(monkeypatch, tmp_path, ())
    return tmp_path / "credentials"


def write(file: Path, key: str) -> None:
    """As tools renew it: another file, by its name."""
    new = file.with_suffix(".new")
    new.write_text(
        f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t{key}\n"
    )
    new.replace(file)


def only_fresh(code: str) -> Callable[[Request], Answer]:
    """A store that refuses all keys but one, and says why; to HEAD it says nothing."""

    def answer(request: Request) -> Answer:
        if "Credential=FRESH/" in request.headers.get("authorization", ""):
            return s3_answer(request)
        return Answer(
            403 if code == "InvalidAccessKeyId" else 400,
            f"<Error><Code>{code}</Code></Error>".encode(),
        )

    return answer


async def upload(driver: Driver) -> None:
    """An object of two parts."""
    upload = await driver.create("large", len(LARGE))
    await upload.write(0, LARGE)
    await upload.abort()


async def upload_small(driver: Driver) -> None:
    """An object of one request."""
    upload = await driver.create("small", 3)
    await upload.write(0, memoryview(b"abc"))
    await upload.commit()


OPERATIONS: dict[str, Callable[[Driver], Awaitable[object]]] = {
    "put": lambda driver: driver.put("k", b"data"),
    "get": lambda driver: driver.get("k"),
    "stat": lambda driver: driver.stat("k"),
    "fetch": lambda driver: driver.fetch("k", 0, 3),
    "delete": lambda driver: driver.delete("k"),
    "sweep": lambda driver: driver.sweep("k"),
    "upload": upload,
    "upload_small": upload_small,
}


def uri(server: ScriptedServer) -> str:
    """A place there."""
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
    """Whichever operation comes first after the renewal works, though the store says no once more."""

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


def test_what_is_refused_is_not_asked_for_ever(file: Path) -> None:
    """With an unchanged file, a driver looks for other credentials once, then fails."""

    async def use(driver: Driver) -> list[int]:
        counts = []
        for _ in range(3):
            server.log.clear()
            with pytest.raises(AccessError, match="ExpiredToken"):
                await driver.put("k", b"data")
            counts.append(len(server.log))
        return counts

    with ScriptedServer(only_fresh("ExpiredToken")) as server:
        write(file, "STALE")
        assert used(uri(server), use) == [2, 1, 1]


def test_a_refusal_of_good_credentials_is_no_reason_to_look_again(file: Path) -> None:
    """AccessDenied is about permissions: one request, then the error."""

    async def use(driver: Driver) -> None:
        with pytest.raises(AccessError, match="AccessDenied"):
            await driver.put("k", b"data")

    with ScriptedServer(only_fresh("AccessDenied")) as server:
        write(file, "STALE")
        used(uri(server), use)
        assert len(server.log) == 1


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
