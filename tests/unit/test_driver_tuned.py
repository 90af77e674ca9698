"""Test tuned profiles: where they apply, which settings override them, and trust in the file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.commands import run

from holdfast.drivers.configuration.tuned import (
    Place,
    TunedProfile,
    check_keeping,
    forget_profiles,
    keep_profile,
    machine_kind,
    place_of,
    read_profiles,
    tuned_file,
)
from holdfast.drivers.registry import open_driver, resolved_options, tuned_place
from holdfast.drivers.uri import parse
from holdfast.errors import UsageError

S3 = "s3://bucket/run?endpoint=http://store:9000"


@dataclass(frozen=True)
class Mounted:
    """A mount, as the system describes it."""

    fs_type: str
    point: str


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the profiles, in a home of the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CONFIG_HOME", "HOLDFAST_CONFIG", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return check_keeping(os.environ)


def profile(uri: str, **options: str) -> TunedProfile:
    """Return a profile for the place of ``uri``, measured on this machine."""
    return TunedProfile(tuned_place(parse(uri)), machine_kind(), options, 1.9e9, 1.31, 1.22, 1.4)


def value(uri: str, name: str) -> tuple[object, str]:
    """Return the value and the source of an option."""
    found = resolved_options(parse(uri))[name]
    return found.value, found.source


def test_a_profile_applies_below_its_place(file: Path, tmp_path: Path) -> None:
    """A profile applies to its whole bucket, but to no other bucket or endpoint."""
    keep_profile(file, profile(S3, concurrency="64"))
    source = f"{file} [s3://bucket]"
    assert value(S3, "concurrency") == (64, source)
    assert value("s3://bucket/b/c?endpoint=http://store:9000/", "concurrency") == (64, source)
    assert value("s3://bucket2/run?endpoint=http://store:9000", "concurrency")[1] == "default"
    assert value("s3://bucket/run?endpoint=http://other:9000", "concurrency")[1] == "default"
    assert value("s3://bucket/run", "concurrency")[1] == "default"
    keep_profile(file, profile(f"file://{tmp_path}", threads="3"))
    assert open_driver(f"file://{tmp_path}/below").traits.concurrency == 3


def test_an_endpoint_may_come_from_anywhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The URI, our variable and AWS's variable identify the same place."""
    keep_profile(file, profile(S3, concurrency="64"))
    for name in ("HOLDFAST_S3_ENDPOINT", "AWS_ENDPOINT_URL"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "http://store:9000")
            assert value("s3://bucket/x", "concurrency")[0] == 64


def test_the_user_wins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """URI, keyword, environment and holdfast.toml each override a profile, option by option."""
    keep_profile(file, profile(S3, concurrency="64", part_size="32MiB"))
    assert value(S3 + "&concurrency=2", "concurrency") == (2, "the URI")
    assert value(S3 + "&concurrency=2", "part_size")[0] == 32 << 20
    found = resolved_options(parse(S3), concurrency=3)["concurrency"]
    assert (found.value, found.source) == (3, "a keyword")
    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_S3_CONCURRENCY", "4")
        assert value(S3, "concurrency") == (4, "HOLDFAST_S3_CONCURRENCY")
    own = file.with_name("holdfast.toml")
    own.write_text("[s3]\nconcurrency = 5\n")
    own.chmod(0o600)
    assert value(S3, "concurrency") == (5, f"{own} [s3]")


def test_a_profile_is_for_one_kind_of_machine(file: Path) -> None:
    """A profile of another kind of machine is listed, but not used; both can be kept."""
    foreign = replace(profile(S3, concurrency="64"), machine="2 × abacus")
    keep_profile(file, foreign)
    assert value(S3, "concurrency")[1] == "default"
    assert "of other machines, and not used: 2 × abacus" in run("drivers", S3).stdout
    keep_profile(file, profile(S3, concurrency="32"))
    assert value(S3, "concurrency")[0] == 32
    assert len(read_profiles(file)) == 2
    assert "1.31 × as fast as the defaults" in run("drivers", S3).stdout


def test_places_of_all_kinds() -> None:
    """A place is a mount point with its file system, a bucket with its endpoint, or a name node."""

    def place(uri: str, *known: str, **settings: str) -> Place:
        return place_of(parse(uri), settings, {}, known, lambda path: Mounted("xfs", "/mnt/a"))

    assert place("file:///mnt/a/b") == Place("file:///mnt/a", {"file system": "xfs"})
    assert place("hdfs://node:8020/a/b", "namenodes") == Place("hdfs://node:8020")
    there = Place("s3://b", {"endpoint": "http://h"})
    assert place("s3://b/x", "endpoint", endpoint="http://h/") == there
    assert place("memory://a/b", endpoint="not an option of it") == Place("memory://a")


def test_profiles_come_back_from_the_file(file: Path) -> None:
    """Profiles are read back whatever their characters, and replaced by newer ones."""
    strange = Place('s3://b"\\ü\x7f\x01', {"endpoint": "http://h"})
    first = TunedProfile(strange, "1 × x", {"direct": "off"}, 1.9e9, 1.5, 1.25, 2.0)
    keep_profile(file, first)
    keep_profile(file, profile(S3, concurrency="64"))
    assert read_profiles(file)[0] == first
    newer = profile(S3, concurrency="32")
    keep_profile(file, newer)
    assert read_profiles(file) == [first, newer]
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(file.parent)) == [file.name]


def test_a_profile_is_forgotten(file: Path) -> None:
    """Forgetting removes the profiles of a place for all machines, and no others."""
    keep_profile(file, profile(S3, concurrency="64"))
    keep_profile(file, profile("s3://other", concurrency="64"))
    assert "1 profile removed" in run("bench", S3, "--forget").stdout
    assert [kept.place.uri for kept in read_profiles(file)] == ["s3://other"]
    assert forget_profiles(file, tuned_place(parse(S3))) == 0


def test_two_tunings_do_not_overwrite_each_other(file: Path) -> None:
    """A second tuning is refused while another one writes."""
    keep_profile(file, profile(S3, concurrency="64"))
    before = file.read_text()
    new = file.with_name("tuned.toml.new")
    new.write_text("half a fi")
    with pytest.raises(UsageError, match="another process"):
        keep_profile(file, profile(S3, concurrency="32"))
    assert file.read_text() == before


def test_none_is_read_where_the_environment_names_the_configuration(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HOLDFAST_CONFIG, even empty, profiles are neither read nor kept."""
    keep_profile(file, profile(S3, concurrency="64"))
    monkeypatch.setenv("HOLDFAST_CONFIG", "")
    assert value(S3, "concurrency")[1] == "default"
    assert tuned_file(os.environ) is None
    with pytest.raises(UsageError, match="would not be read"):
        check_keeping(os.environ)


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_file_that_others_may_write_is_refused(file: Path, which: str) -> None:
    """A file or folder that others may write is refused, by drivers and before tuning."""
    keep_profile(file, profile(S3, concurrency="64"))
    path = file if which == "file" else file.parent
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(UsageError, match="others may write to"):
        open_driver(S3)
    with pytest.raises(UsageError, match="others may write to"):
        check_keeping(os.environ)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"concurrency"', '"endpoint"', "a profile cannot set endpoint"),
        ("version = 1", "version = 2", "its version is 2"),
        ("version = 1", "", "'version'"),
        ('machine = "', "machine = 3 # ", "3 is no text"),
        ("[[profile]]", "[[profile", "cannot be used"),
        ('"64"', "64", "64 is no text"),
        ("gain_low = 1.2200", "", "gain_low"),
    ],
)
def test_a_file_that_means_nothing_is_an_error(file: Path, old: str, new: str, said: str) -> None:
    """An unusable file is an error with advice, and only options of speed can be set."""
    keep_profile(file, profile(S3, concurrency="64"))
    file.write_text(file.read_text().replace(old, new))
    says = f"(?s){re.escape(str(file))}.*{re.escape(said)}"
    with pytest.raises(UsageError, match=says) as raised:
        open_driver(S3)
    assert "Delete the file" in str(raised.value)
