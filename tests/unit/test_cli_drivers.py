"""``holdfast drivers``: its output about every storage, about one, and about a URI."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from support.commands import run, run_json

from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import Option, integer, option_values
from holdfast.drivers.registry import GROUP, schemes
from holdfast.drivers.uri import Uri
from holdfast.errors import UriError


class OtherDriver(MemoryDriver):
    """A third-party driver with a secret among its options."""

    OPTIONS = {"level": Option(integer(0, 9), 5, "how"), "token": Option(str, None, "to get in")}

    @classmethod
    def open(cls, uri: Uri) -> OtherDriver:
        if option_values(cls.OPTIONS, uri)["level"] == 9:
            raise UriError("other:// needs otherlib", advice="pip install otherlib")
        return cls(uri.location)


@pytest.fixture
def third_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a driver that works, and one that cannot be imported."""
    named = {"other": f"{__name__}:OtherDriver", "gone": "holdfast_no_such_module:Driver"}
    found = [importlib.metadata.EntryPoint(name, value, GROUP) for name, value in named.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


def test_every_scheme_is_listed() -> None:
    """Each has its driver, traits and options. Ours have no problem in a development environment."""
    drivers = run_json("drivers")["drivers"]
    assert {one["scheme"]: one["driver"] for one in drivers} == schemes()
    for one in drivers:
        assert not (one["problem"] and one["package"] == "holdfast")
        assert one["traits"]["part_nbytes"] > 0
        common = {option["name"] for option in one["options"] if option["common"]}
        assert common >= {"retries", "op_timeout_s", "metrics"}


@pytest.mark.usefixtures("third_parties")
def test_driver_that_cannot_be_imported_is_listed() -> None:
    """The list gives the reason. A request for this driver alone has status 1."""
    found = {one["scheme"]: one for one in run_json("drivers")["drivers"]}
    assert found["other"]["problem"] is None
    assert "holdfast_no_such_module" in found["gone"]["problem"]
    assert run_json("drivers", "gone", status=1)["traits"] is None
    assert "holdfast_no_such_module" in run("drivers", "gone", status=1).stdout


@pytest.mark.usefixtures("third_parties")
def test_missing_library_is_named_with_its_package() -> None:
    """The driver's own advice is shown, and its options are listed."""
    call = ("drivers", "other://x?level=9")
    found = run_json(*call, status=1)
    assert found["problem"] == "other:// needs otherlib"
    assert found["advice"] == "pip install otherlib"
    assert [o["value"] for o in found["options"] if o["name"] == "level"] == ["9"]
    assert "needs otherlib. pip install otherlib" in run(*call, status=1).stdout


@pytest.mark.usefixtures("third_parties")
def test_each_value_is_shown_with_its_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sources are the URI, the environment, a file and the defaults. Secrets are hidden."""
    file = tmp_path / "holdfast.toml"
    file.write_text("[other]\nmax_concurrency = 3\n")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(file))
    monkeypatch.setenv("HOLDFAST_OTHER_TOKEN", "hush")
    monkeypatch.setenv("HOLDFAST_RETRIES", "2")
    printed = run_json("drivers", "other://x/y?level=4")
    told = {o["name"]: (o["value"], o["source"], o["default"]) for o in printed["options"]}
    assert (printed["uri"], printed["layers"]) == ("memory://x/y", ["retry", "limit"])
    assert told["level"] == ("4", "the URI", "5")
    assert told["token"] == ("***", "HOLDFAST_OTHER_TOKEN", None)
    assert told["retries"] == ("2", "HOLDFAST_RETRIES", "0")
    assert told["max_concurrency"] == ("3", f"{file} [other]", None)
    assert told["metrics"] == ("off", "default", "off")
    assert printed["traits"]["concurrency"] == 3
    text = run("drivers", "other://x/y?level=4").stdout
    assert "hush" not in text
    assert "HOLDFAST_OTHER_TOKEN" in text
    assert "limit" in text


def test_configuration_file_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file in the working directory is shown as not read."""
    monkeypatch.delenv("HOLDFAST_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "holdfast.toml"
    here.write_text("[common]\nretries = 9\n")
    text = run("drivers", "memory://x").stdout
    assert re.search(r"^file +none$", text, re.MULTILINE)
    assert re.search(f"^not read +{here}$", text, re.MULTILINE)
    (folder := tmp_path / "config/holdfast").mkdir(parents=True)
    here.rename(folder / "holdfast.toml")
    printed = run_json("drivers", "memory://x")
    assert printed["config_file"] == str(folder / "holdfast.toml")
    assert printed["config_ignored"] is None
    assert {o["name"]: o["value"] for o in printed["options"]}["retries"] == "9"
