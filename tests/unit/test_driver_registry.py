"""Test the way from a URI to a driver: schemes, options and third-party drivers."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch
from support.commands import finished

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import GROUP, driver_class, open_driver, schemes
from holdfast.drivers.schemes import SCHEMES, check_installed
from holdfast.drivers.uri import join, parse
from holdfast.errors import UriError


class OtherDriver(MemoryDriver):
    """A third party's."""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install entry points of another package; our own metadata is stale and lists nothing."""
    ours, gone = f"{__name__}:OtherDriver", "holdfast_no_such_module:Driver"
    named = {"other": ours, "file": ours, "gone": gone, "wrong": "builtins:dict"}
    found = [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in named.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


def test_a_path_opens_the_local_driver(tmp_path: Path) -> None:
    """A path, its URI and a parsed URI open the same driver, without I/O."""
    path = tmp_path / "run"
    for uri in (str(path), path, f"file://{path}", parse(path)):
        driver = open_driver(uri)
        assert isinstance(driver, LocalDriver)
        assert driver.uri == f"file://{path}"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_scheme_names_the_known_ones() -> None:
    """The error for an unknown scheme lists the known ones."""
    with pytest.raises(UriError, match=r"no driver for s4://.*file.*memory"):
        open_driver("s4://bucket")


@pytest.mark.usefixtures("other")
def test_a_third_party_cannot_take_a_built_in_scheme(tmp_path: Path) -> None:
    """An entry point cannot replace a built-in scheme."""
    assert type(open_driver(tmp_path)) is LocalDriver
    assert schemes()["file"] == "holdfast.drivers.local.driver:LocalDriver"
    assert {"file", "gone", "memory", "other", "wrong"} <= set(schemes())


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(
    ("scheme", "why"), [("gone", "holdfast_no_such_module"), ("wrong", "not a Driver")]
)
def test_a_broken_entry_point_is_named(scheme: str, why: str) -> None:
    """An entry point that cannot be imported, or is no driver, is an error."""
    with pytest.raises(UriError, match=why):
        driver_class(scheme)


def test_our_own_metadata_lists_the_built_in_drivers() -> None:
    """The entry points in pyproject.toml equal the table of schemes."""
    listed = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}
    table = {name: scheme.driver for name, scheme in SCHEMES.items()}
    assert {name: listed.get(name) for name in table} == table


@pytest.mark.parametrize("page", ["README.md", "docs/reference/api.md"])
def test_every_built_in_scheme_is_in_the_tables(page: str) -> None:
    """Pages that list the schemes list all of them."""
    text = (Path(__file__).parents[2] / page).read_text()
    named = {"http": "https", "fsspec": "fsspec+X"}
    missing = [name for name in SCHEMES if f"{named.get(name, name)}://" not in text]
    assert missing == []


def test_what_an_extra_brings_may_be_missing_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing module of a missing package is reported as an error with advice."""
    check_installed("memory", "memory://x", "json.decoder")
    with pytest.raises(UriError, match=r"needs no_such_package\.module"):
        check_installed("memory", "memory://x", "no_such_package.module")


@pytest.mark.heavy
def test_importing_the_registry_is_cheap() -> None:
    """The registry imports no driver, numpy or importlib.metadata."""
    code = (
        # whatever the start of the interpreter needed it for
        "import sys; sys.modules.pop('importlib.metadata', None)\n"
        "from holdfast.drivers.registry import open_driver\nprint(*sys.modules)\n"
        "open_driver('memory://x')\nprint(*sys.modules)"
    )
    done = finished([sys.executable, "-I", "-c", code])
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert before.isdisjoint({"holdfast.drivers.memory", "holdfast.drivers.local.driver"})
    assert "holdfast.drivers.memory" in after
    assert after.isdisjoint({"numpy", "importlib.metadata"})


@pytest.mark.parametrize("name", ["a b", "größe", "100%", "a%20b", "x?y", "x#y", "a&b=c"])
@pytest.mark.parametrize("scheme", ["memory", "file", "fsspec+memory", "fsspec+file"])
@pytest.mark.heavy
def test_a_path_of_a_listing_leads_back(scheme: str, name: str, tmp_path: Path) -> None:
    """The path of a listed checkpoint can be joined to the base, whatever characters it has."""
    base = f"{scheme}://{tmp_path}/run" if "file" in scheme else f"{scheme}:/{tmp_path}"
    uri = str(join(base, name))
    holdfast.save(uri, {"w": torch.ones(1)})
    (listed,) = holdfast.list_checkpoints(base)
    assert listed.path == name
    again = join(base, listed.path)
    assert list(holdfast.load(str(again))) == ["w"]


@pytest.mark.parametrize("scheme", ["s3", "az", "gs", "memory", "fsspec+memory", "hdfs"])
@pytest.mark.parametrize("path", ["a/../b", "a%2F%2Fb", "a/%2E%2E/b", "%2e/a"])
@pytest.mark.heavy
def test_a_root_that_has_two_spellings_is_refused(scheme: str, path: str) -> None:
    """A root with ``..`` or encoded slashes is refused before any I/O."""
    with pytest.raises(holdfast.UriError):
        holdfast.list_checkpoints(f"{scheme}://bucket/{path}")
