"""Object stores as URIs: what is understood, and what is refused before any of them is asked."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from holdfast.drivers.objects.names import encoded, split_location
from holdfast.drivers.registry import open_driver, schemes
from holdfast.drivers.uri import parse
from holdfast.errors import UriError


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://bucket/run/step-1/", ("bucket", "run/step-1")),
        ("s3://bucket/a%20b/%C3%BC", ("bucket", "a b/ü")),
        ("gs://bucket/100%25", ("bucket", "100%25")),
    ],
)
def test_a_location_is_a_bucket_and_a_root(uri: str, expected: tuple[str, str]) -> None:
    """Decoded as URIs are, and then written as a key is."""
    assert split_location(parse(uri)) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///run",
        "s3://bucket/a/../b",
        "s3://bucket/a%2F%2Fb",
        "s3://bucket/%ff",
        "gs://u@b/x",
    ],
)
def test_a_location_that_names_no_root_is_refused(uri: str) -> None:
    """No bucket, steps upwards, empty names, what is no UTF-8, and a user, which a store would take
    for the bucket's name."""
    with pytest.raises(UriError):
        split_location(parse(uri))


def test_ordinary_keys_are_stored_as_they_are() -> None:
    """Only what cannot be printed, and the percent sign itself, is encoded."""
    assert (
        encoded("data/20310203T040506-8e8a630f/0.safetensors ü 日本")
        == "data/20310203T040506-8e8a630f/0.safetensors ü 日本"
    )
    assert encoded("a%b\n\x7f") == "a%25b%0A%7F"


@pytest.mark.parametrize(
    "option", ["secret_access_key=x", "aws_session_token=x", "access_key_id=x", "sas=x"]
)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_secret_in_a_uri_is_refused(scheme: str, option: str) -> None:
    """The error says where secrets go, and shows none."""
    with pytest.raises(UriError, match="environment") as caught:
        open_driver(f"{scheme}://bucket/run?{option.replace('=x', '=hunter2')}")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "part_size=1MiB",
        "part_size=16",
        "concurrency=0",
        "style=other",
        "checksum=md5",
        "timeout=0",
        "endpoint=host:80",
        "x=1",
    ],
)
def test_options_are_checked_before_anything_is_sent(options: str) -> None:
    """Values and names alike."""
    with pytest.raises(UriError):
        open_driver(f"s3://bucket/run?{options}")


async def _get(uri: str) -> bytes:
    driver = open_driver(uri)
    try:
        return await driver.get("a")
    finally:
        await driver.close()


@pytest.mark.parametrize(
    "endpoint", ["http://u:hunter2@127.0.0.1:1", "http://127.0.0.1:1/?sig=hunter2"]
)
def test_an_endpoint_from_elsewhere_holds_no_secret_either(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What AWS's own variables say is refused, too, before anything is sent, and not repeated."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UriError, match=r"the endpoint.*without user, password, query") as caught:
        asyncio.run(_get("s3://bucket/run"))
    assert "hunter2" not in str(caught.value)


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme is known, but its library is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "obstore" else found(name)
    )
    with pytest.raises(UriError, match="pip install obstore"):
        open_driver("s3://bucket/run")


def test_every_object_store_has_its_scheme() -> None:
    """They are built in, whatever the metadata of an older install says."""
    assert {"s3", "gs", "az", "http", "https"} <= set(schemes())


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the URI nor the environment names one: an error that says how, and nothing is sent."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UriError, match=r"\?account="):
        asyncio.run(_get("az://container/run"))
