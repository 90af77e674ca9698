"""``holdfast drivers``: what it says about every storage, about one, and about a URI."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.app import run
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import Option, integer, option_values
from holdfast.drivers.registry import GROUP, schemes
from holdfast.drivers.uri import Uri
from holdfast.errors import UriError


class OtherDriver(MemoryDriver):
    """A driver of a third party, with a secret among its options."""

    OPTIONS = {
        "level": Option(integer(0, 9), 5, "how much"),
        "token": Option(str, None, "to get in"),
    }

    @classmethod
    def open(cls, uri: Uri) -> OtherDriver:
        if option_values(cls.OPTIONS, uri)["level"] == 9:
            raise UriError("other:// needs otherlib", advice="pip install otherlib")
        return cls(uri.location)


@pytest.fixture
def third_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a driver that works, and one that cannot be imported."""
    found = [
        importlib.metadata.EntryPoint("other", f"{__name__}:OtherDriver", GROUP),
        importlib.metadata.EntryPoint("gone", "holdfast_no_such_module:Driver", GROUP),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Return the exit status of ``holdfast drivers`` and its JSON."""
    status = run(["drivers", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_every_scheme_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its driver, traits and options. Ours have no problem in a development environment."""
    status, printed = document(capsys)
    assert status == 0
    assert {one["scheme"]: one["driver"] for one in printed["drivers"]} == schemes()
    assert [
        one["scheme"]
        for one in printed["drivers"]
        if one["problem"] and one["package"] == "holdfast"
    ] == []
    for one in printed["drivers"]:
        assert one["traits"]["part_nbytes"] > 0
        assert {o["name"] for o in one["options"] if o["common"]} >= {
            "retries",
            "op_timeout_s",
            "metrics",
        }


@pytest.mark.usefixtures("third_parties")
def test_driver_that_cannot_be_imported_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The list has the reason. Asked for alone, the status is 1."""
    status, printed = document(capsys)
    found = {one["scheme"]: one for one in printed["drivers"]}
    assert (status, found["other"]["problem"]) == (0, None)
    assert "holdfast_no_such_module" in found["gone"]["problem"]
    status, printed = document(capsys, "gone")
    assert (status, printed["traits"]) == (1, None)
    assert run(["drivers", "gone"]) == 1
    assert "holdfast_no_such_module" in capsys.readouterr().out


@pytest.mark.usefixtures("third_parties")
def test_missing_library_is_named_with_its_package(capsys: pytest.CaptureFixture[str]) -> None:
    """The driver's own advice is shown, and its options are listed."""
    status, printed = document(capsys, "other://x?level=9")
    assert (status, printed["problem"], printed["advice"]) == (
        1,
        "other:// needs otherlib",
        "pip install otherlib",
    )
    assert [o["value"] for o in printed["options"] if o["name"] == "level"] == ["9"]
    run(["drivers", "other://x?level=9"])
    assert "needs otherlib. pip install otherlib" in capsys.readouterr().out


@pytest.mark.usefixtures("third_parties")
def test_each_value_is_shown_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sources are the URI, the environment, a file and the defaults. Secrets are hidden."""
    file = tmp_path / "holdfast.toml"
    file.write_text("[other]\nmax_concurrency = 3\n")
    monkeypatch.setenv("HOLDFAST_CONFIG", str(file))
    monkeypatch.setenv("HOLDFAST_OTHER_TOKEN", "hush")
    monkeypatch.setenv("HOLDFAST_RETRIES", "2")
    status, printed = document(capsys, "other://x/y?level=4")
    told = {o["name"]: (o["value"], o["source"], o["default"]) for o in printed["options"]}
    assert (status, printed["uri"], printed["layers"]) == (0, "memory://x/y", ["retry", "limit"])
    assert told["level"] == ("4", "the URI", "5")
    assert told["token"] == ("***", "HOLDFAST_OTHER_TOKEN", None)
    assert told["retries"] == ("2", "HOLDFAST_RETRIES", "0")
    assert told["max_concurrency"] == ("3", f"{file} [other]", None)
    assert told["metrics"] == ("off", "default", "off")
    assert printed["traits"]["concurrency"] == 3
    assert run(["drivers", "other://x/y?level=4"]) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    assert "HOLDFAST_OTHER_TOKEN" in text
    assert "limit" in text


def test_configuration_file_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file in the working directory is shown as not read."""
    monkeypatch.delenv("HOLDFAST_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "holdfast.toml"
    here.write_text("[common]\nretries = 9\n")
    assert run(["drivers", "memory://x"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^file +none$", text, re.MULTILINE)
    assert re.search(f"^not read +{here}$", text, re.MULTILINE)
    (folder := tmp_path / "config/holdfast").mkdir(parents=True)
    here.rename(folder / "holdfast.toml")
    _, printed = document(capsys, "memory://x")
    assert (printed["config_file"], printed["config_ignored"]) == (
        str(folder / "holdfast.toml"),
        None,
    )
    assert {o["name"]: o["value"] for o in printed["options"]}["retries"] == "9"
