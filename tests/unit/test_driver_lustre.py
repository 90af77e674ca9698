"""The Lustre driver: it chooses layouts, sets them before the first byte, reads them back and
inherits them.

The tests use a stand-in for Lustre's extended attribute. It shows the layout of a file, and says
nothing about the speed of Lustre.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import drivers

from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.lustre.driver import LustreDriver
from holdfast.drivers.lustre.files import count_osts, layout_of
from holdfast.drivers.lustre.layout import ALL_OSTS, Layout, choose, decode, encode
from holdfast.drivers.mounts import mount_of
from holdfast.drivers.registry import driver_class, open_driver, serving
from holdfast.drivers.uri import join, parse
from holdfast.errors import StorageError, UriError

MIB, GIB = 1 << 20, 1 << 30
COMPOSITE = struct.pack("<IIQQIHH", 0x0BD60BD0, 0, 0, 0, 0, 0, 0)
DEFAULT = encode(Layout(1, MIB))


class Standin:
    """The attribute ``lustre.lov`` of files below ``root``, with Lustre's behaviour.

    Files inherit it from their folder. Lustre silently ignores it once the file has objects. A
    ``deaf`` stand-in ignores every layout, as an old client does. A ``refusing`` one rejects
    layouts of files.
    """

    def __init__(self, root: Path, mode: str = "") -> None:
        self._root = root
        self._mode = mode
        self._layouts: dict[int, bytes] = {}

    def set(self, file: int | Path, name: str, value: bytes) -> None:
        """Stand in for os.setxattr."""
        path = self._path(file)
        if path.is_file():
            if self._mode == "refusing":
                raise OSError(errno.ENOTSUP, "not supported")
            if self._mode == "deaf" or path.stat().st_size:
                return
            wanted = decode(value)
            if wanted.stripe_count == ALL_OSTS:
                value = encode(replace(wanted, stripe_count=8))
        self._layouts[path.stat().st_ino] = value

    def get(self, file: int | Path, name: str) -> bytes:
        """Stand in for os.getxattr."""
        path = self._path(file)
        places = [one for one in (path, *path.parents) if self._root in one.parents]
        default = DEFAULT if path.is_file() else None
        if path.is_file() or not places:
            places.append(self._root)
        layouts = [self._layouts.get(one.stat().st_ino) for one in places]
        found = next(filter(None, [*layouts, default]), None)
        if found is None:
            raise OSError(errno.ENODATA, "no layout")
        return found

    def _path(self, file: int | Path) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{file}")) if isinstance(file, int) else file


@pytest.fixture
def mount(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a stand-in with eight targets; the fixture's parameter is its mode."""
    standin = Standin(tmp_path / "lustre", getattr(request, "param", ""))
    (tmp_path / "lustre").mkdir()
    monkeypatch.setattr(os, "setxattr", standin.set)
    monkeypatch.setattr(os, "getxattr", standin.get)
    return tmp_path / "lustre"


async def stored(driver: LustreDriver, key: str, nbytes: int = 2 * MIB) -> Layout | None:
    """Store an object; return its layout."""
    await drivers.stored(driver, key, bytes(nbytes))
    with open(Path(parse(driver.uri).location, key), "rb") as file:
        return layout_of(file.fileno())


def layout(uri: str, nbytes: int = 2 * MIB, **options: Any) -> Layout | None:
    """Return the layout of a new object that a driver on ``uri`` stores."""

    async def run() -> Layout | None:
        driver = open_driver(uri, **options)
        assert isinstance(driver, LustreDriver)
        try:
            return await stored(driver, "a/image", nbytes)
        finally:
            await driver.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("nbytes", "writers", "osts", "expected"),
    [
        (10 * GIB, 64, 8, 1),  # more files than targets: they are spread by their number
        (10 * GIB, None, 8, 1),
        (500 * GIB, 64, 8, 4),  # very large: no target has to hold a whole one
        (500 * GIB, 64, 2, 2),
        (10 * GIB, 1, 8, 8),  # one file: all targets
        (10 * GIB, 3, 8, 2),
        (2 * GIB, 1, 8, 4),  # only as many as its size can use
        (1, 1, 8, 1),
        (10_000 * GIB, 1, 500, 32),
    ],
)
def test_stripes_follow_size_writers_and_targets(
    nbytes: int, writers: int | None, osts: int, expected: int
) -> None:
    """A file gets one stripe, a few if it is very large, or its share of idle targets."""
    assert choose(nbytes, ost_count=osts, writers=writers) == expected


@pytest.mark.parametrize(
    "made", [Layout(1, MIB), Layout(ALL_OSTS, 4 * MIB), Layout(0, 0), Layout(8, 16 * MIB, "flash")]
)
def test_a_layout_survives_its_bytes(made: Layout) -> None:
    """Decoding reverses encoding, and the bytes are those that Lustre expects."""
    assert decode(encode(made)) == made
    assert len(encode(made)) == (48 if made.pool else 32)
    known = "d00bd10b" + "00" * 20 + "00002000" + "0400" + "ffff"
    assert encode(Layout(4, 2 * MIB)).hex() == known


@pytest.mark.parametrize(
    "value", [COMPOSITE, b"", b"short", struct.pack("<I", 0x0BD80BD0) + bytes(60)]
)
def test_what_is_no_plain_layout_counts_as_composite(value: bytes) -> None:
    """A layout of an unknown kind is never treated as a plain one, and so is kept."""
    assert decode(value).composite is True


def test_a_new_file_gets_its_layout_before_its_first_byte(mount: Path) -> None:
    """A file gets the requested stripe count and size, unless it is tiny."""
    assert layout(f"lustre://{mount}/run?stripe_count=4&stripe_size=4MiB") == Layout(4, 4 * MIB)
    assert layout(f"lustre://{mount}/all?stripe_count=all") == Layout(8, 16 * MIB)
    assert layout(f"lustre://{mount}/small?stripe_count=8", 1000) == Layout(1, MIB)  # the default


@pytest.mark.parametrize(("option", "expected"), [("", 4), ("&writers=64", 1)])
def test_the_number_of_ranks_is_passed_on(mount: Path, option: str, expected: int) -> None:
    """The opener of a driver may give the number of writers; an option in the URI wins."""

    async def run() -> list[Layout]:
        driver = open_driver(f"lustre://{mount}?ost_count=8{option}", 2)
        upload = await driver.create("image", 10 * GIB)
        found = [decode(os.getxattr(file, "lustre.lov")) for file in mount.glob(".image.*")]
        await upload.abort()
        await driver.close()
        return found

    assert asyncio.run(run()) == [Layout(expected, 16 * MIB)]


def test_parts_are_whole_stripes(mount: Path) -> None:
    """The preferred part is a multiple of the stripe size, so that writes share no stripe."""
    for stripe, part_nbytes in (("64KiB", 16 * MIB), ("24MiB", 24 * MIB), ("1GiB", GIB)):
        driver = open_driver(f"lustre://{mount}?stripe_size={stripe}")
        assert driver.traits.part_nbytes == part_nbytes
    assert open_driver(f"lustre://{mount}").traits.shared is True


@pytest.mark.parametrize("default_of", ["", "scratch"])
def test_a_composite_default_is_kept(
    mount: Path, default_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files get the progressive layout of their folder or file system, unless the user sets one."""
    folder = mount / default_of
    folder.mkdir(exist_ok=True)
    os.setxattr(folder, "lustre.lov", COMPOSITE)
    with caplog.at_level(logging.WARNING):
        assert layout(f"lustre://{folder}/run") == Layout(composite=True)
        assert layout(f"lustre://{folder}/run?stripe_count=2") == Layout(2, 16 * MIB)
    assert caplog.records == []


def test_the_folders_pool_is_kept(mount: Path) -> None:
    """Files stay on the targets that the folder's default names; small ones inherit all of it."""
    (mount / "run").mkdir()
    os.setxattr(mount / "run", "lustre.lov", encode(Layout(2, 4 * MIB, "flash")))
    uri = f"lustre://{mount}/run?ost_count=8&writers=1"
    assert layout(uri, 3 * MIB) == Layout(1, 16 * MIB, "flash")
    assert layout(f"lustre://{mount}/run", 1000) == Layout(2, 4 * MIB, "flash")


@pytest.mark.parametrize("mount", ["deaf"], indirect=True)
def test_a_layout_that_is_ignored_is_logged_once(
    mount: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lustre does not report a late layout. The driver reads it back, and the save continues."""

    async def run() -> list[Layout | None]:
        driver = LustreDriver(mount / "run", stripe_count=4)
        found = [await stored(driver, f"data/{n}") for n in range(3)]
        await driver.close()
        return found

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == [Layout(1, MIB)] * 3
    (said,) = caplog.messages
    assert "a file has 1 stripes of 1,024 KiB, not 4 stripes of 16,384 KiB: it was ignored" in said


@pytest.mark.parametrize("mount", ["refusing"], indirect=True)
def test_lfs_sets_what_the_client_does_not(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a file's attribute cannot be set, `lfs setstripe` sets it; `lfs df` counts targets."""
    log = tmp_path / "log"
    lfs = f'echo "$*" >> {log}; test "$1" = df && echo "ost 1 /x[OST:0]" && echo "ost 1 /x[OST:1]"'
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lfs").write_text(f"#!/bin/sh\n{lfs}\nexit 0\n")
    (tmp_path / "bin/lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    layout(f"lustre://{mount}/run?stripe_count=4")
    call = r"^setstripe --stripe-count 4 --stripe-size 16777216 /proc/\d+/fd/\d+/\.image\."
    assert re.search(call, log.read_text(), re.MULTILINE)
    assert count_osts(str(tmp_path), ()) == 2


@pytest.mark.parametrize("mount", ["refusing"], indirect=True)
def test_without_any_way_to_set_a_layout_files_get_the_default(
    mount: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layout of our choice only logs a failure. One of the user's raises, and leaves no file."""
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert layout(f"lustre://{mount}/run") == Layout(1, MIB)
    assert "no layout can be set" in caplog.text
    with pytest.raises(StorageError, match="is refused") as caught:
        layout(f"lustre://{mount}/other?stripe_count=4")
    assert list((mount / "other/a").iterdir()) == []
    assert "stripe_count" in str(caught.value.advice)


def test_targets_are_counted_by_the_kernel_first(tmp_path: Path) -> None:
    """The targets of the path's own file system count. Without a source, the driver guesses."""
    name = mount_of(str(tmp_path)).source.rpartition("/")[2]
    for fs_name, count in ((name, 24), ("other", 7)):
        file = tmp_path / "lov" / f"{fs_name}-clilov-ffff8800" / "activeobd"
        file.parent.mkdir(parents=True)
        file.write_text(f"{count}\n")
    assert count_osts(str(tmp_path), (tmp_path / "nowhere", tmp_path)) == 24
    assert count_osts(str(tmp_path), ()) == 4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("stripe_count=0", "whole number from 1 to 2000"),
        ("stripe_count=many", "whole number"),
        ("stripe_size=1000", "size from"),
        ("stripe_size=100KiB", "multiple of 64KiB"),
        ("stripes=4", "Known options: direct, ost_count, stripe_count"),
    ],
)
def test_options_that_cannot_be_are_refused(option: str, message: str) -> None:
    """The error comes before any I/O, and lists the allowed values."""
    with pytest.raises(UriError, match=message):
        open_driver(f"lustre:///scratch?{option}")


def test_a_lustre_uri_is_a_path() -> None:
    """The path is absolute, on this host. It is decoded, and printed so that it parses again."""
    assert parse("lustre:///a%20b//c").location == "/a b/c"
    child = join("lustre:///a b?stripe_count=2", "x y")
    assert str(child) == "lustre:///a%20b/x%20y?stripe_count=2"
    for wrong in ("lustre://host/a", "lustre://a"):
        with pytest.raises(UriError, match="this host only"):
            parse(wrong)
    assert LustreDriver("/a b").uri == "lustre:///a%20b"


def test_a_file_uri_on_lustre_is_served_by_its_driver() -> None:
    """The mount table decides. Elsewhere ``file`` is the plain local driver."""
    assert serving(parse("file:///scratch/run"), lambda path: "lustre") == "lustre"
    assert serving(parse("file:///scratch/run"), lambda path: "ext4") == "file"
    assert serving(parse("memory://scratch"), lambda path: "lustre") == "memory"
    assert driver_class("lustre") is LustreDriver
    assert issubclass(LustreDriver, LocalDriver)


def test_a_file_uri_on_lustre_stays_what_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver prints the user's URI, and accepts Lustre's options."""
    monkeypatch.setattr("holdfast.drivers.registry.serving", lambda uri: "lustre")
    driver = open_driver(f"file://{tmp_path}?stripe_count=2")
    assert isinstance(driver, LustreDriver)
    assert driver.uri == f"file://{tmp_path}"
