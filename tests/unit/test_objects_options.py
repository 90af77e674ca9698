"""Object stores as URIs: the forms that are understood, and those refused before any request."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.drivers import used
from support.servers.scripted import set_credentials

from holdfast.drivers.objects.names import encoded, split_location
from holdfast.drivers.objects.s3_place import Place, bucket_and_root, place_of, session_for
from holdfast.drivers.registry import open_driver
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
    """They are decoded as URIs are, and written as keys are."""
    assert split_location(parse(uri)) == expected


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3:///run", "s3://b/a/../b", "s3://b/a%2F%2Fb", "s3://b/%ff", "gs://u@b/x"],
)
def test_a_location_that_names_no_root_is_refused(uri: str) -> None:
    """A missing bucket, steps upwards, empty names, invalid UTF-8 and users are refused."""
    with pytest.raises(UriError):
        split_location(parse(uri))


def test_ordinary_keys_are_stored_as_they_are() -> None:
    """Only what cannot be printed, and the percent sign itself, is encoded."""
    plain = "data/20310203T040506-8e8a630f/0.safetensors ü 日本"
    assert encoded(plain) == plain
    assert encoded("a%b\n\x7f") == "a%25b%0A%7F"


@pytest.mark.parametrize(
    "options", ["part_size=1MiB", "style=other", "timeout=0", "endpoint=host:80", "x=1"]
)
def test_options_are_checked_before_anything_is_sent(options: str) -> None:
    """This holds for values and for names."""
    with pytest.raises(UriError):
        open_driver(f"s3://bucket/run?{options}")


@pytest.mark.parametrize(
    "endpoint", ["http://u:hunter2@127.0.0.1:1", "http://127.0.0.1:1/?sig=hunter2"]
)
def test_an_endpoint_from_elsewhere_holds_no_secret_either(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint from AWS's variables is refused before any request, and not repeated."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UriError, match=r"the endpoint.*without user, password, query") as caught:
        used("s3://bucket/run", lambda driver: driver.get("a"))
    assert "hunter2" not in str(caught.value)


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme is known, but its library is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "obstore" else found(name)
    )
    with pytest.raises(UriError, match="pip install obstore"):
        open_driver("s3://bucket/run")


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the URI nor the environment names one. The error says how, and nothing is sent."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UriError, match=r"\?account="):
        used("az://container/run", lambda driver: driver.get("a"))


# Buckets of AWS, and where they are


ACCESS_POINT = "arn:aws:s3:us-west-2:123456789012:accesspoint/my-ap"


@pytest.fixture(autouse=True)
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the configuration file of a user who has set nothing else."""
    set_credentials(monkeypatch, tmp_path)
    return tmp_path / "config"


def place(
    bucket: str = "bucket", region: str = "us-east-1", endpoint: str = "", style: str = "auto"
) -> Place:
    """Return the place to which requests for ``bucket`` now go."""
    return place_of(session_for(""), bucket, region, endpoint, style, "s3://bucket")


@pytest.mark.parametrize(
    ("bucket", "region", "expected"),
    [
        ("bucket", "us-east-1", "https://bucket.s3.us-east-1.amazonaws.com"),
        ("bucket", "eu-central-1", "https://bucket.s3.eu-central-1.amazonaws.com"),
        ("my.bucket", "us-west-2", "https://s3.us-west-2.amazonaws.com/my.bucket"),
        ("bucket", "cn-north-1", "https://bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("bucket--use1-az4--x-s3", "us-east-1",
         "https://bucket--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com"),
        (ACCESS_POINT, "us-west-2", "https://my-ap-123456789012.s3-accesspoint.us-west-2.amazonaws.com"),
    ],
)  # fmt: skip
def test_buckets_of_aws_are_found(bucket: str, region: str, expected: str) -> None:
    """Examples are partitions, names with dots, directory buckets and access points."""
    assert place(bucket, region) == Place(expected, region, "", "auto")


@pytest.mark.parametrize(
    ("kinds", "host"),
    [(["DUALSTACK"], "s3.dualstack"), (["FIPS", "DUALSTACK"], "s3-fips.dualstack")],
)
def test_fips_and_dual_stack_are_as_the_environment_says(
    kinds: list[str], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for each alone, and for both together."""
    for kind in kinds:
        monkeypatch.setenv(f"AWS_USE_{kind}_ENDPOINT", "true")
    assert place() == Place(
        f"https://bucket.{host}.us-east-1.amazonaws.com", "us-east-1", "", "auto"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use_fips_endpoint = true", Place("https://bucket.s3-fips.us-east-1.amazonaws.com", "us-east-1", "", "auto")),
        ("s3 =\n  use_accelerate_endpoint = true",
         Place("https://bucket.s3-accelerate.amazonaws.com", "us-east-1", "", "auto")),
        ("endpoint_url = https://h:1", Place("https://h:1/bucket", "us-east-1", "https://h:1", "path")),
        ("endpoint_url = https://h:1\nservices = " "own\n[services " "own]\ns3 =\n  " "endpoint_url = " "https://i:1/",
         Place("https://i:1/bucket", "us-east-1", "https://i:1", "path")),
        ("endpoint_url = https://h.example\ns3 =\n  addressing_style = virtual",
         Place("https://bucket.h.example", "us-east-1", "https://h.example", "virtual")),
        ("endpoint_url = https://h:1\nignore_configured_endpoint_urls = true",
         Place("https://bucket.s3.us-east-1.amazonaws.com", "us-east-1", "", "auto")),
    ],
)  # fmt: skip
def test_a_profile_is_understood(text: str, expected: Place, profile: Path) -> None:
    """It may set FIPS, acceleration, endpoints for all services and for S3, and bucket naming."""
    profile.write_text(f"[default]\n{text}\n")
    assert place() == expected


def test_the_uri_wins_over_the_environment_and_that_over_the_profile(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for endpoints with and without the bucket in the host's name."""
    profile.write_text("[default]\nendpoint_url = https://of-profile:1\n")
    assert place().endpoint == "https://of-profile:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://for-all:1")
    assert place().endpoint == "https://for-all:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://for-s3.example/below/")
    assert place().bucket_url == "https://for-s3.example/below/bucket"
    assert place(style="virtual").bucket_url == "https://bucket.for-s3.example/below"
    of_uri = "http://of-uri.example/"
    assert place(endpoint=of_uri).bucket_url == "http://of-uri.example/bucket"
    assert place(endpoint=of_uri, style="virtual").bucket_url == "http://bucket.of-uri.example"


@pytest.mark.parametrize(
    "bucket",
    [
        "arn:aws:s3:us-west-2:123456789012:bucket",
        "arn:aws:s3::123456789012:accesspoint:mfzwi23gnjvgw.mrap",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/x",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost:op-01ac5d28a6a232904:accesspoint:x",
        "tenant:bucket",
        "b%2Fc",
        "x" * 256,
    ],
)
def test_what_is_no_bucket_is_refused(bucket: str) -> None:
    """Access points that need other signatures, and impossible names, are refused at once."""
    with pytest.raises(UriError, match=r"not a bucket name.*accesspoint"):
        open_driver(f"s3://{bucket}/run")


@pytest.mark.parametrize("separator", ["/", ":"])
def test_a_root_below_an_access_point(separator: str) -> None:
    """The root follows the name of an access point."""
    bucket = f"arn:aws:s3:us-west-2:123456789012:accesspoint{separator}my-ap"
    uri = f"s3://{bucket}/run/1"
    assert bucket_and_root(parse(uri)) == (bucket, "run/1")
    assert open_driver(uri).uri == uri
