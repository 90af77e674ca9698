"""Test the sources of options and trust in them, their values, and the tracking of ranges."""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers.configuration.file import check_trusted, file_of_user
from holdfast.drivers.configuration.resolution import Setting, resolve
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.options import Option, duration, integer, or_off, size, switch, url
from holdfast.drivers.ranges import Ranges
from holdfast.drivers.registry import open_driver, resolved_options
from holdfast.drivers.uri import parse
from holdfast.errors import StorageError, UriError, UsageError

OWN = {"level": Option(integer(0, 99), 1, "how much"), "token": Option(str, None, "a secret")}
COMMON = common_options(remote=True)
SCHEMES = ("my", "my+x", "file", "s3")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the user's file, which does not exist; the working directory is empty."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    folder = tmp_path / "home/.config/holdfast"
    folder.mkdir(parents=True)
    return folder / "holdfast.toml"


def found(
    uri: str = "my://bucket/run", environment: dict[str, str] | None = None, **keywords: object
) -> dict[str, tuple[object, str]]:
    """Return value and source of every option that is not at its default."""
    resolved = resolve(
        parse(uri), keywords, OWN, COMMON, lambda: SCHEMES, environment=environment or {}
    )
    return {name: (r.value, r.source) for name, r in resolved.items() if r.source != "default"}


def test_the_nearest_word_counts(file: Path) -> None:
    """The order is: URI, keyword, environment of the scheme, environment, profile, file."""
    file.write_text(
        "[common]\nretries = 9\n[my]\nretries = 8\n['my://bucket']\nretries = 7\n"
        "[profile.p.common]\nretries = 6\n[profile.p.my]\nretries = 5\n"
        "['profile'.p.'my://bucket/run']\nretries = 4\n"
    )
    profile = {"HOLDFAST_CONFIG_PROFILE": "p"}
    common = {**profile, "HOLDFAST_RETRIES": "3"}
    own = {**common, "HOLDFAST_MY_RETRIES": "2"}
    assert found("my://bucket/run?retries=0", own, retries=1)["retries"] == (0, "the URI")
    assert found(environment=own, retries=1)["retries"] == (1, "a keyword")
    assert found(environment=own)["retries"] == (2, "HOLDFAST_MY_RETRIES")
    assert found(environment=common)["retries"] == (3, "HOLDFAST_RETRIES")
    assert found(environment=profile)["retries"] == (4, f"{file} [profile.p.my://bucket/run]")
    assert found("my://bucket/other", profile)["retries"] == (5, f"{file} [profile.p.my]")
    assert found("s3://bucket/other", profile)["retries"] == (6, f"{file} [profile.p.common]")
    assert found()["retries"] == (7, f"{file} [my://bucket]")
    assert found("my://other")["retries"] == (8, f"{file} [my]")
    assert found("s3://other")["retries"] == (9, f"{file} [common]")


@pytest.mark.parametrize(
    ("uri", "applies"),
    [
        ("my://b/run", True),
        ("my://b/run/step-1", True),
        ("my://b/run2", False),
        ("my://b", False),
        ("s3://b/run", False),
    ],
)
def test_a_table_for_a_uri_holds_for_what_lies_below_it(
    file: Path, uri: str, applies: bool
) -> None:
    """A table applies to whole names, and the longest one that applies wins, in any order."""
    file.write_text(
        "['my://b/run/']\nretries = 3\n['my://b/run/step-1']\nlevel = 2\n['my://b']\nlevel = 1\n"
    )
    assert ("retries" in found(uri)) == applies
    expected = None if uri.startswith("s3") else 2 if uri.endswith("step-1") else 1
    assert found(uri).get("level", (None,))[0] == expected


def test_tables_may_be_for_folders_and_fsspec(file: Path) -> None:
    """A table for a file:// URI applies to bare paths; every file system of fsspec is a scheme."""
    file.write_text('["file:///scratch"]\nlevel = 3\n["fsspec+gcs"]\nretries = 3\n')
    assert found("/scratch/run")["level"][0] == 3
    assert found("fsspec+gcs://b")["retries"][0] == 3
    assert found("my://b") == {}


def test_a_profile_may_be_chosen_by_uri_or_keyword(file: Path) -> None:
    """A profile is chosen by the URI or a keyword, as it is by a variable."""
    file.write_text("[my]\nlevel = 1\n[profile.p.my]\nlevel = 2\n")
    assert found("my://b?config_profile=p")["level"][0] == 2
    assert found(config_profile="p")["level"][0] == 2


def test_values_are_text_numbers_or_bools(file: Path) -> None:
    """Values may be text, numbers or bools, and None counts as not set."""
    file.write_text(
        "[common]\nmetrics = true\nop_timeout_s = 1.5\nmax_bytes_per_s = '1GiB'\nretries = 2\n"
    )
    assert {n: v for n, (v, _) in found().items()} == {
        "metrics": True, "op_timeout_s": 1.5, "max_bytes_per_s": 1 << 30, "retries": 2,
    }  # fmt: skip
    assert found(metrics=False, op_timeout_s=3, retries=None)["metrics"] == (False, "a keyword")
    with pytest.raises(UsageError, match=r"'retries' is text, a number or a bool, not list"):
        found(retries=[1])
    file.write_text("[common]\nretries = [1]\n")
    with pytest.raises(UsageError, match=r"retries in .*holdfast\.toml \[common\].*not list"):
        found()


def test_a_secret_in_a_uri_is_refused() -> None:
    """A secret in a URI is refused, even one that no driver knows, and the error does not show it."""
    for name in ("token", "aws_secret_access_key", "password", "sas", "key"):
        with pytest.raises(UriError, match=r"looks like a secret.*must not be in") as caught:
            found(f"my://b?{name}=hush")
        assert "hush" not in str(caught.value)
    assert found(token="hush")["token"] == ("hush", "a keyword")
    environment = {"HOLDFAST_MY_TOKEN": "hush"}
    assert found(environment=environment)["token"] == ("hush", "HOLDFAST_MY_TOKEN")
    assert "hush" not in repr(Setting("hush", "a keyword"))


def test_a_password_in_a_value_is_refused_whoever_says_it(file: Path) -> None:
    """A URL with a password is refused from any source, since libraries show URLs."""
    file.write_text("[my]\ntoken = 'http://u:hunter2@host'")
    environment = {"HOLDFAST_CONFIG": "", "HOLDFAST_MY_TOKEN": "x=http://u:hunter2@host"}
    asks = (
        (lambda: found("my://b"), "holdfast.toml"),
        (lambda: found("my://b", environment), "HOLDFAST_MY_TOKEN"),
        (lambda: found("my://b", token="http://u:hunter2@host"), "a keyword"),
    )
    for ask, source in asks:
        with pytest.raises(UriError, match=f"{source}.*must not contain a password") as caught:
            ask()
        assert "hunter2" not in f"{caught.value!r} {caught.value} {vars(caught.value)}"


@pytest.mark.parametrize(
    ("how", "toml", "says"),
    [
        ({"uri": "my://b?levle=1"}, "", r"my:// has no option 'levle' \(in"),
        ({"levle": 1}, "", "no option 'levle', which a keyword sets"),
        ({"environment": {"HOLDFAST_MY_LEVLE": "1"}}, "", "'levle', which HOLDFAST_MY_LEVLE sets"),
        ({}, "[my]\nlevle = 1", r"no option 'levle', which /.*holdfast\.toml \[my\] sets"),
        ({}, "['my://bucket']\nlevle = 1", r"'levle', which /.*\.toml \[my://bucket\] sets"),
    ],
)
def test_an_unknown_option_is_an_error_wherever_it_stands(
    file: Path, how: dict[str, Any], toml: str, says: str
) -> None:
    """The error names the source, the driver's options, and the options of every scheme."""
    file.write_text(toml)
    known = "Known options: level, token; for every scheme: config_profile, .*retries"
    with pytest.raises(UriError, match=f"{says}.*{known}"):
        found(**how)


@pytest.mark.parametrize(
    ("environment", "toml", "error", "says"),
    [
        ({}, "[common]\nlevel = 1", UriError, r"no option 'level' is common to all schemes \(/.*\[common\]\).*Known: .*retries"),
        ({}, "[s4]\nlevel = 1", UsageError, r"table \[s4\], which is not a scheme.*file, my, my\+x, s3"),
        ({}, "[profile.p.s4]\nx = 1\n", UsageError, r"table \[profile\.p\.s4\], which is not a scheme"),
        ({}, "retries = 1", UsageError, r"\[retries\], which is not a scheme"),
        ({}, "common = 1", UsageError, "'common' is outside any table"),
        ({}, "profile = 1", UsageError, "'profile' is outside any table"),
        ({}, "[my", UsageError, "cannot be used: "),
        ({}, "['my://b?x=1']\nlevel = 1", UsageError, "with options in its URI"),
        ({}, "['my://b#x']\nlevel = 1", UsageError, "which is not a URI"),
        ({"HOLDFAST_RETIRES": "3"}, "", UriError, "HOLDFAST_RETIRES is unknown.*HOLDFAST_RETRIES"),
        ({"HOLDFAST_CONFG": "/a.toml"}, "", UriError, "HOLDFAST_CONFG is unknown.*mean HOLDFAST_CONFIG[?]"),
        ({"HOLDFAST_KEEPER_DRI": "/a"}, "", UriError, "HOLDFAST_KEEPER_DRI is unknown.*mean HOLDFAST_KEEPER_DIR[?]"),
        ({"HOLDFAST_MY_RETIRES": "3"}, "", UriError, "no option 'retires', which HOLDFAST_MY_RETIRES sets"),
        ({"HOLDFAST_CONFIG": "/gone.toml"}, "", UsageError, "HOLDFAST_CONFIG names '/gone.toml', but there is no such file"),
        ({"HOLDFAST_CONFIG": "gone.toml"}, "", UsageError, "HOLDFAST_CONFIG names 'gone.toml', which is a relative path"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_an_error(
    file: Path, environment: dict[str, str], toml: str, error: type[UsageError], says: str
) -> None:
    """A typo in the file or in the environment is an error."""
    file.write_text(toml)
    with pytest.raises(error, match=says):
        found("my://b?config_profile=p" if "profile.p" in toml else "my://b", environment)


@pytest.mark.parametrize(
    ("how", "toml", "who"),
    [
        ({"uri": "my://b?level=hush"}, "", ""),
        ({"level": "hush"}, "", ", which a keyword sets,"),
        ({"environment": {"HOLDFAST_MY_LEVEL": "hush"}}, "", ", which HOLDFAST_MY_LEVEL sets,"),
        ({}, "[my]\nlevel = 'hush'", r", which /.*holdfast\.toml \[my\] sets,"),
    ],
)
def test_a_wrong_value_names_who_said_it(
    file: Path, how: dict[str, Any], toml: str, who: str
) -> None:
    """The error names the source and the allowed values, but not the value: it may be a secret."""
    file.write_text(toml)
    says = f"option 'level'{who} must be a whole number from 0 to 99"
    with pytest.raises(UriError, match=says) as caught:
        found(**how)
    assert "hush" not in caught.value.message


def test_variables_of_other_programs_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Variables that Kubernetes makes for services named holdfast are ignored, with one warning each."""
    kubernetes = ["HOLDFAST_PORT", "HOLDFAST_SERVICE_HOST", "HOLDFAST_PORT_80_TCP_ADDR"]
    others = [*kubernetes, *(v.replace("HOLDFAST", "HOLDFAST_MY") for v in kubernetes)]
    environment = dict.fromkeys(others, "x") | {"HOLDFAST_MY_LEVEL": "2"}
    for _ in range(2):
        assert found("my://b", environment) == {"level": (2, "HOLDFAST_MY_LEVEL")}
    named = [variable for variable in others for m in caplog.messages if f" {variable} " in m]
    assert named == others
    assert len(caplog.messages) == len(others)


def test_variables_of_other_schemes_are_theirs() -> None:
    """Variables of other schemes are neither used nor checked, even if a scheme's name begins alike."""
    environment = {"HOLDFAST_S3_NONSENSE": "1", "HOLDFAST_MY_X_LEVEL": "5", "HOLDFAST_MY_LEVEL": "2",
                   "HOLDFAST_TEST_S3_URL": "x", "HOLDFAST_CONFIG": "", "HOLDFAST_MY_TOKEN": "", "HOLDFASTER": "1"}  # fmt: skip
    assert found("my://b", environment) == {"level": (2, "HOLDFAST_MY_LEVEL")}
    assert found("my+x://b", environment) == {"level": (5, "HOLDFAST_MY_X_LEVEL")}


def test_a_profile_that_is_not_there_is_an_error(file: Path) -> None:
    """The error lists the profiles of the file, or where a file was looked for."""
    says = "the URI chooses the profile 'q', but there is no holdfast.toml.*HOLDFAST_CONFIG"
    with pytest.raises(UsageError, match=says):
        found("my://b?config_profile=q")
    file.write_text("[profile.b.my]\n[profile.a.my]\n")
    says = r"chooses the profile 'q', which .* does not have.*Its profiles: a, b\."
    with pytest.raises(UsageError, match=says):
        found(config_profile="q")


def test_one_file_is_read_the_first_that_is_there(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOLDFAST_CONFIG, else XDG_CONFIG_HOME, else the home; an empty HOLDFAST_CONFIG reads none."""
    xdg, named = tmp_path / "xdg/holdfast/holdfast.toml", tmp_path / "named.toml"
    xdg.parent.mkdir(parents=True)
    for level, path in ((1, file), (2, xdg), (3, named)):
        path.write_text(f"[my]\nlevel = {level}")
    assert found("my://b")["level"] == (1, f"{file} [my]")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert found("my://b")["level"] == (2, f"{xdg} [my]")
    assert found("my://b", {"HOLDFAST_CONFIG": str(named)})["level"][0] == 3
    assert found("my://b", {"HOLDFAST_CONFIG": ""}) == {}
    home = {"HOLDFAST_CONFIG": "~/.config/holdfast/holdfast.toml"}
    assert found("my://b", home)["level"] == (1, f"{file} [my]")


def test_no_file_of_the_working_directory_is_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone may have written such a file. It is not read, and a warning says so once."""
    work = Path.cwd()
    below = work / "below"
    for folder in (work, work / ".config/holdfast", work / "holdfast", below):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "holdfast.toml").write_text("[my]\nlevel = 9")
    (work / "pyproject.toml").write_text("[tool.holdfast.my]\nlevel = 9")
    for folder in (work, below, below):
        monkeypatch.chdir(folder)
        for value in ("", ".config", "."):
            monkeypatch.setenv("XDG_CONFIG_HOME", value)
            assert found("my://b") == {}
    file.write_text("[my]\nlevel = 1")
    assert found("my://b")["level"][0] == 1
    monkeypatch.chdir(work / "holdfast")
    assert found("my://b", {"HOLDFAST_CONFIG": ""}) == {}
    for folder, hint in zip((work, below), caplog.messages, strict=True):
        assert f"'{folder}/holdfast.toml' is not read" in hint
        assert f"move it to {file}" in hint
        assert "HOLDFAST_CONFIG" in hint


@pytest.mark.parametrize("home", ["", ".", None])
def test_a_home_that_is_no_whole_path_is_that_of_the_password_database(
    file: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """A relative or missing HOME is replaced by the home in the password database."""
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    (folder := Path.cwd() / ".config/holdfast").mkdir(parents=True)
    (folder / "holdfast.toml").write_text("[my]\nlevel = 9")
    expected = Path(pwd.getpwuid(os.geteuid()).pw_dir, ".config/holdfast/holdfast.toml")
    assert file_of_user() == expected
    if not expected.exists():
        assert found("my://b") == {}


@pytest.mark.parametrize("which", ["file", "folder", "folder above", "target of a link"])
def test_a_file_that_others_may_write_to_is_refused(file: Path, which: str) -> None:
    """A file that others may write is refused, unless HOLDFAST_CONFIG names it."""
    file.write_text("[my]\nlevel = 1")
    loose = {"file": file, "folder": file.parent, "folder above": file.parents[1]}.get(which)
    if loose is None:
        loose = Path.cwd() / "shared"
        loose.mkdir()
        file.rename(loose / "mine.toml")
        file.symlink_to(loose / "mine.toml")
        assert found("my://b")["level"][0] == 1
    mode = loose.stat().st_mode
    loose.chmod(mode | 0o002)
    says = rf"others may write to the configuration f\w+ {loose}.*chmod go-w"
    with pytest.raises(UsageError, match=says):
        found("my://b")
    assert found("my://b", {"HOLDFAST_CONFIG": str(file)})["level"][0] == 1
    loose.chmod(mode)
    assert found("my://b")["level"][0] == 1


def test_a_file_that_a_group_may_write_to_is_refused(file: Path) -> None:
    """A file that a group may write is refused, unless it is the user's private group or root's."""
    file.write_text("[my]\nlevel = 1")
    file.chmod(0o664)
    me = pwd.getpwuid(os.geteuid()).pw_name
    others = next(g.gr_gid for g in grp.getgrall() if g.gr_gid and g.gr_name != me)
    try:
        os.chown(file, -1, others)
    except PermissionError:
        pytest.skip("only root gives a file to a group that it does not belong to")
    with pytest.raises(UsageError, match="others may write to"):
        found("my://b")
    os.chown(file, -1, 0)
    assert found("my://b")["level"][0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_file_of_another_user_is_refused(file: Path, which: str) -> None:
    """A file of another user is refused, unless HOLDFAST_CONFIG names it."""
    file.write_text("[my]\nlevel = 1")
    foreign = file if which == "file" else file.parent
    os.chown(foreign, 12345, 12345)
    says = f"the configuration {which} {foreign} belongs to user 12345, but .* runs as user 0"
    with pytest.raises(UsageError, match=says):
        found("my://b")
    assert found("my://b", {"HOLDFAST_CONFIG": str(file)})["level"][0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_may_use_a_file_of_root() -> None:
    """A file of root is trusted by every user, unless others may write to it."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "config/holdfast")
        folder.mkdir(parents=True)
        Path(root).chmod(0o755)
        file = folder / "holdfast.toml"
        file.write_text("[my]\nlevel = 1")
        os.seteuid(12345)
        try:
            check_trusted(file, file.stat())
        finally:
            os.seteuid(0)


def test_opening_a_driver_looks_everywhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are resolved when a driver is opened, and reach the driver and its layers."""
    monkeypatch.delenv("HOLDFAST_CONFIG")
    file.write_text("[file]\nthreads = 3\n[common]\nmax_concurrency = 2\n")
    assert open_driver("/scratch").traits.concurrency == 2
    monkeypatch.setenv("HOLDFAST_MAX_CONCURRENCY", "off")
    assert open_driver("/scratch").traits.concurrency == 3
    monkeypatch.setenv("HOLDFAST_FILE_THREADS", "4")
    assert open_driver("/scratch").traits.concurrency == 4
    assert open_driver("/scratch", threads=5).traits.concurrency == 5
    assert resolved_options(parse("/scratch"))["threads"].source == "HOLDFAST_FILE_THREADS"


@pytest.mark.heavy
def test_storage_options_reach_the_driver_of_every_call(tmp_path: Path) -> None:
    """Every call takes storage options, and refuses unknown ones before any I/O."""
    import holdfast

    uri, good, bad = tmp_path / "c", {"threads": 2, "max_concurrency": 1}, {"thraeds": 2}
    calls = [
        lambda given: holdfast.save(uri, {"a": 1}, storage_options=given),
        lambda given: holdfast.async_save(uri, {"a": 2}, storage_options=given).wait(),
        lambda given: holdfast.load(uri, storage_options=given),
        lambda given: holdfast.open(uri, storage_options=given).close(),
        lambda given: holdfast.list_checkpoints(tmp_path, storage_options=given),
    ]
    for call in calls:
        call(good)
        with pytest.raises(UriError, match="no option 'thraeds', which a keyword sets"):
            call(bad)
    assert holdfast.load(uri) == {"a": 2}


# Values of options, and written ranges


SIZE = size(1, 1 << 40)
DURATION = duration(0.001, 7200)


@pytest.mark.parametrize(
    ("parse", "value", "text"),
    [(SIZE, 32 << 20, "32MiB"), (SIZE, 5 << 30, "5GiB"), (SIZE, 1 << 40, "1TiB"), (SIZE, 4097, "4097B"), (SIZE, 3 << 10, "3KiB"),
     (DURATION, 60.0, "60s"), (DURATION, 0.5, "0.5s"), (or_off(SIZE), 500_000_000, "500000000B"), (or_off(DURATION), 120.0, "120s"),
     (switch, True, "on"), (switch, False, "off"), (integer(0, 9), 7, "7"), (str, "x", "x")],
)  # fmt: skip
def test_a_value_is_written_with_its_unit(
    parse: Callable[[str], Any], value: Any, text: str
) -> None:
    """A value is written as text, with its unit, that parses to the same value."""
    assert Option(parse, None, "").text(value) == text
    assert parse(text) == value


@pytest.mark.parametrize("text", ["on", "true", "True", "yes", "1"])
def test_a_switch_takes_the_usual_words(text: str) -> None:
    """A switch accepts the usual words for on and off."""
    assert switch(text) is True
    assert or_off(DURATION)("off") is None
    assert url("https://[::1]:80/a/b") == "https://[::1]:80/a/b"
    assert switch({"on": "off", "yes": "no", "1": "0"}.get(text, "false")) is False


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        *((SIZE, text, "such as 32MiB") for text in ("", "0", "2TiB")),
        *((DURATION, text, "such as 30s") for text in ("", "0", "nan", "3h")),
        *((switch, text, "on or off") for text in ("", "maybe", "2", "on ")),
        *((url, text, r"http:// or https://, without user, password, query and fragment$") for text in ("", "host:80", "ftp://host", "http://",
          "http://u:p@host", "http://u@host", "http://host?a", "http://host/%3Fa", "http://host#a")),
        (or_off(DURATION), "never", "such as 30s, or off"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_with_what_is_taken(
    parse: Callable[[str], Any], text: str, says: str
) -> None:
    """A ValueError says which values are allowed."""
    with pytest.raises(ValueError, match=says):
        parse(text)


def written(nbytes: int, *pieces: tuple[int, int]) -> Ranges:
    """Return the ranges of an object of which these (start, length) were written."""
    ranges = Ranges(nbytes, uri="memory://x", key="k")
    for start, length in pieces:
        ranges.add(start, length)
    return ranges


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([(0, 5), (4, 6)], "bytes 4:5 of 10 were written twice"),
        ([(0, 10), (9, 1)], "bytes 9:10 of 10 were written twice"),
        ([(0, 1), (0, 10)], "bytes 0:1 of 10 were written twice"),
        ([(0, 5), (6, 4)], "bytes 5:6 of 10 were never written"),
        ([(0, 9)], "bytes 9:10 of 10 were never written"),
        ([(1, 9)], "bytes 0:1 of 10 were never written"),
        ([], "bytes 0:10 of 10 were never written"),
    ],
)
def test_a_hole_or_an_overlap_of_one_byte_is_found(
    pieces: list[tuple[int, int]], says: str
) -> None:
    """A hole or overlap of one byte is found, whatever the order of the pieces."""
    for order in (pieces, pieces[::-1]):
        with pytest.raises(StorageError, match=says):
            written(10, *order).check_complete()


def test_what_is_written_once_is_complete() -> None:
    """Pieces may come in any order, be empty, and end before the declared size."""
    written(10, (5, 5), (0, 5), (3, 0)).check_complete()
    written(10, (0, 4)).check_complete(4)
    written(0).check_complete()
    with pytest.raises(StorageError, match="not inside an object of 3 bytes"):
        written(10, (0, 4)).check_complete(3)
    with pytest.raises(StorageError, match="bytes 4:5 of 5 were never written"):
        written(10, (0, 4)).check_complete(5)
