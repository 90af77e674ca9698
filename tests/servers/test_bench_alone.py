"""A driver alone, and tuning, on real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bench_job import keys_at

from holdfast.bench.measured.result import decoded
from holdfast.cli import app
from holdfast.drivers.registry import resolved_options
from holdfast.drivers.uri import parse


@pytest.mark.nightly(11)
@pytest.mark.parametrize("kind", ["s3", pytest.param("hdfs", marks=pytest.mark.drill)])
def test_a_server_is_measured_without_checkpoints(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of an object in each way that it can be written and read, and small objects; nothing
    is left."""
    uri: str = request.getfixturevalue(f"{kind}_url")
    raw = ["--workload", "raw", "--size", "24MiB", "--part-sizes", "8MiB", "--concurrencies", "1,3"]
    assert app.run(["bench", uri, *raw, "--runs", "1", "--json"]) == 1
    found = decoded(capsys.readouterr().out, "x")
    points = found.config["points"]
    operations = [points[phase.name]["operation"] for phase in found.phases]
    assert operations == [each for each in ("write", "read", "random read") for _ in range(2)]
    assert {of.count for phase in found.phases for of in phase.operations.values()} == {3}
    meta = ["--workload", "meta", "--objects", "8", "--runs", "1", "--json"]
    assert app.run(["bench", uri, *meta]) == 1
    found = decoded(capsys.readouterr().out, "x")
    assert len(found.phases) == 12
    assert keys_at(uri) == []


@pytest.mark.nightly(3)
@pytest.mark.parametrize("kind", ["s3", pytest.param("hdfs", marks=pytest.mark.drill)])
def test_a_server_is_tuned_for(
    kind: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Choices are tried within the time; a profile is kept if and only if a gain is shown, and then
    drivers use it; nothing is left."""
    uri: str = request.getfixturevalue(f"{kind}_url")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HOLDFAST_CONFIG")
    arguments = ["--tune", "--size", "16MiB", "--time-limit", "2s", "--json"]
    assert app.run(["bench", uri, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"][0]["options"] == found["default"]
    shown = found["gain"] is not None and (found["gain"]["low"] or 0) > 1
    file = tmp_path / "holdfast/tuned.toml"
    assert (found["kept"] == str(file)) == shown == file.exists()
    options = resolved_options(parse(uri))
    changed = {n for n, text in found["best"].items() if text != found["default"][n]}
    for name in changed:
        assert options[name].source.startswith(str(file)) == shown
    assert keys_at(uri) == []
