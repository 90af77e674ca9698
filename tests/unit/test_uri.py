"""Test the parsing, joining and redacting of URIs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.drivers.uri import Uri, join, parse, redact
from holdfast.errors import UriError


@pytest.mark.parametrize(
    ("text", "scheme", "location", "options"),
    [
        ("file:///a/b?direct=on&threads=4", "file", "/a/b", {"direct": "on", "threads": "4"}),
        ("file://localhost/a", "file", "/a", {}),
        ("file:///a%20b/c%3Fd", "file", "/a b/c?d", {}),
        ("file:///", "file", "/", {}),
        ("file:////a//b/./c/", "file", "/a/b/c", {}),
        ("file:///a/../b", "file", "/a/../b", {}),
        ("FILE:///a", "file", "/a", {}),
        ("s3://bucket/run%201?endpoint=http://host:9000/x%3Fy", "s3", "bucket/run%201", {"endpoint": "http://host:9000/x?y"}),
        ("s3://bucket//a///b/./c//", "s3", "bucket/a/b/c", {}),
        ("s3://bucket/", "s3", "bucket", {}),
        ("hdfs:///a//b/", "hdfs", "/a/b", {}),
        ("hdfs://", "hdfs", "", {}),
        ("hdfs:////", "hdfs", "/", {}),
        ("fsspec+file:////a//b", "fsspec+file", "/a/b", {}),
        ("az://c/./x?endpoint=http://h//a", "az", "c/x", {"endpoint": "http://h//a"}),
        ("memory://", "memory", "", {}),
        ("fsspec+sftp://host/x", "fsspec+sftp", "host/x", {}),
        ("/a/b", "file", "/a/b", {}),
        ("/a?b#d%20e", "file", "/a?b#d%20e", {}),
        ("//a//b/", "file", "/a/b", {}),
        ("./s3:/x", "file", None, {}),
        ("file:///a/%FF%FE%20b", "file", os.fsdecode(b"/a/\xff\xfe b"), {}),
        ("./~/run", "file", None, {}),
        ("run/1", "file", None, {}),
    ],
)  # fmt: skip
def test_text_means_one_uri(
    text: str, scheme: str, location: str | None, options: dict[str, str]
) -> None:
    """A URI is decoded; a bare path is taken verbatim and made absolute. Both print as URIs."""
    uri = parse(text)
    expected = location if location is not None else f"{os.getcwd()}/{text.removeprefix('./')}"
    assert (uri.scheme, uri.location, uri.options) == (scheme, expected, options)
    assert parse(str(uri)) == uri


@pytest.mark.parametrize(
    "text",
    [
        "", "s3:/bucket/x", "s3:bucket", "S3:/bucket", "file:/a/b", "file:a", "file://host/a", "file://",
        "file://?direct=on", "http:x", "fsspec+X:y", "file:///a#part", "s3://b/k#part", "file:///a%00b",
        "s3://bucket/a/../b", "memory://m/..", "/a\0b", "file:///a?direct", "file:///a?=1",
        "file:///a?direct=on&direct=off", "file:///a?direct=%00", "/a\ud800", b"/a/b", Path("s3://bucket/run"),
        "~nobody-of-this-name/run", "s3://bucket?x=\ud800",
    ],
)  # fmt: skip
def test_what_is_no_uri_is_an_error(text: Any) -> None:
    """Text that only resembles a URI is an error, and never a local folder."""
    with pytest.raises(UriError) as caught:
        parse(text)
    assert "The URI comes first" not in str(caught.value)


def test_a_leading_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leading tilde of a bare path is expanded, unless a local folder has that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~nobody-of-this-name").mkdir()
    assert parse("~nobody-of-this-name").location == str(tmp_path / "~nobody-of-this-name")
    assert parse("~/run").location == f"{tmp_path}/run"
    assert parse(Path("~/run")).location == f"{tmp_path}/run"
    assert parse("~").location == str(tmp_path)
    assert parse("file:///~/run").location == "/~/run"
    assert parse("a/~").location == f"{os.getcwd()}/a/~"
    with pytest.raises(UriError, match="may begin with ~"):
        parse("file://~/run")


def test_only_relative_paths_need_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absolute path parses even if the working directory was deleted."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert parse("/a//b").location == parse("file:///a/b").location == "/a/b"
    with pytest.raises(UriError, match="'run' is a relative path, and the working directory was"):
        parse("run")


@pytest.mark.parametrize(
    "path", ["/a/b?threads=3", "b?direct=on&threads=2", "/a?secret_key=hunter2", "~/x?threads=3"]
)
def test_options_on_a_bare_path_are_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how to give the options, and how to name a folder with such a name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UriError) as caught:
        parse(path)
    assert "hunter2" not in str(caught.value)
    written = str(caught.value).partition("Write ")[2].partition(" to give them")[0]
    assert parse(written).options.keys() <= {"threads", "direct", "secret_key"}
    assert parse(written).location.startswith("/")
    assert parse("file:///a/b%3Fthreads=3").location == "/a/b?threads=3"


@pytest.mark.parametrize(
    "given", [{"w": 1}, [1], None, 5, torch.nn.Linear(1, 1), torch.zeros(1)], ids=type
)
def test_arguments_that_are_swapped_are_said(given: Any) -> None:
    """A state in the place of the URI is an error that gives the right order."""
    says = rf"the URI is an? {type(given).__name__}\. The URI comes first, then the state"
    for call in (holdfast.save, holdfast.async_save, holdfast.load):
        with pytest.raises(UriError, match=says):
            call(given, "/checkpoints/run")  # type: ignore[arg-type]


def test_other_schemes_keep_their_location_verbatim() -> None:
    """A location that the driver decodes itself is printed unchanged."""
    assert str(parse("s3://bucket/a%2Fb+c?region=eu")) == "s3://bucket/a%2Fb+c?region=eu"
    with pytest.raises(UriError, match="%3F"):
        Uri("s3", "bucket/a?b")


SECRETS = [
    ("s3://user:hunter2@bucket/x", "s3://bucket/x"),
    ("s3://AKIA:se/cret@bucket/x", "s3://bucket/x"),
    ("s3://tok@bucket/x", "s3://bucket/x"),
    ("http://host:8080/a@b", "http://host:8080/a@b"),
    ("s3://bucket/model@v2/x:y", "s3://bucket/model@v2/x:y"),
    ("s3://b?access_key=A&part_size=1", "s3://b?access_key=***&part_size=1"),
    ("s3://b?secret_access_key=B", "s3://b?secret_access_key=***"),
    ("az://c?sas=A&sv=2", "az://c?sas=***&sv=2"),
    (
        "http://h?X-Amz-Signature=A&X-Amz-Credential=B",
        "http://h?X-Amz-Signature=***&X-Amz-Credential=***",
    ),
    ("s3://b?endpoint=http://u:p@host:1/", "s3://b?endpoint=http://host:1/"),
    ("s3://b?endpoint=http:%2F%2Fu:p@host", "s3://b?endpoint=http://host"),
    ("s3://b?%74oken=A", "s3://b?%74oken=***"),
    ("s3:/b?password=A", "s3:/b?password=***"),
    ("s3:/user:hunter2@bucket", "s3:/bucket"),
    ("s3:user:hunter2@bucket", "s3:bucket"),
    ("s3://user:hun?ter2@bucket/x", "s3://bucket/x"),
    ("s3://user:hun#ter2@bucket/x", "s3://bucket/x"),
    ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
    ("file:///run:1@x", "file:///run:1@x"),
    ("/a/b", "/a/b"),
]


@pytest.mark.parametrize(("text", "clean"), SECRETS)
def test_secrets_are_not_printed(text: str, clean: str) -> None:
    """User, password and secret options are hidden; everything else stays."""
    assert redact(text) == clean


@pytest.mark.parametrize(
    "scheme", ["s3", "gs", "http", "hdfs", "memory", "file", "lustre", "fsspec+sftp", "nobody"]
)
@pytest.mark.parametrize("user", ["u:hunter2", "u:/hunter2", "u%3Ahunter2", ":hunter2"])
def test_a_password_is_no_part_of_a_uri(scheme: str, user: str) -> None:
    """A password is refused for every scheme, and the error does not show it."""
    with pytest.raises(UriError) as caught:
        parse(f"{scheme}://{user}@host/x")
    assert "hunter2" not in f"{caught.value} {caught.value!r} {vars(caught.value)}"
    assert "environment" in str(caught.value.advice)


@pytest.mark.parametrize(
    ("uri", "parts", "expected"),
    [
        ("file:///a?threads=2", ("b", "c/d"), "file:///a/b/c/d?threads=2"),
        ("file:///", ("b",), "file:///b"),
        ("/a", ("b?c d%",), "file:///a/b%3Fc%20d%25"),
        ("s3://bucket/?region=eu", ("run 1", "x#y"), "s3://bucket/run%201/x%23y?region=eu"),
        ("memory://name", ("a",), "memory://name/a"),
        ("file:///a", (), "file:///a"),
    ],
)
def test_a_child_keeps_the_options(uri: str, parts: tuple[str, ...], expected: str) -> None:
    """Keys are appended, encoded if the scheme needs it, and options stay."""
    assert str(join(uri, *parts)) == expected


@pytest.mark.parametrize("part", ["..", "a/../b", "/a", "", "a//b", ".", "a\0"])
def test_a_child_cannot_leave_its_parent(part: str) -> None:
    """A part that is not a plain relative key is refused, and so is any below a private store."""
    with pytest.raises(UriError):
        join("file:///a", part)
    with pytest.raises(UriError):
        join("memory://", "a")
