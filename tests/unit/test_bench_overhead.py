"""What measuring costs: the figure, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.bench.overhead import BareLoop, Pair, alternated, judged, main
from holdfast.bench.ratios import of_pairs
from holdfast.bench.report import Target
from holdfast.drivers.uri import parse


def test_pairs_take_turns() -> None:
    """A B, B A, A B, after a first pair that does not count; each with its processor time."""
    seen: list[str] = []

    def took(name: str, seconds: float) -> tuple[float, float]:
        seen.append(name)
        return seconds * len(seen), seconds

    pair = Pair("p", lambda: took("A", 2.0), lambda: took("B", 1.0), 1.03)
    measured, bare = alternated(pair, 3)
    assert "".join(seen) == "ABABBAAB"
    assert measured.seconds == [6.0, 12.0, 14.0]
    assert bare.seconds == [4.0, 5.0, 8.0]
    assert (measured.own_processor_s, bare.own_processor_s) == ([2.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("measured", "met"),
    [([1.01, 1.02, 1.0], True), ([1.2, 1.1, 1.15], False), ([1.2, 0.9, 1.02], None)],
)
def test_a_verdict_takes_an_interval_that_decides(measured: list[float], met: bool | None) -> None:
    """A machine that is too noisy to tell is no success."""
    pair = Pair("p", lambda: (0.0, 0.0), lambda: (0.0, 0.0), 1.03)
    found = judged(pair, of_pairs(measured, [1.0] * 3))
    if met is None:
        assert isinstance(found, str)
        assert "times as long: 0.900 to 1.200" in found
    else:
        assert isinstance(found, Target)
        assert found.met == met


def test_the_bare_loop_moves_all_bytes(tmp_path: Path) -> None:
    """As many as the phase that it stands beside."""
    loop = BareLoop(parse(tmp_path), (40 << 20) + 1)
    loop.write()
    assert (tmp_path / "bare").stat().st_size == (40 << 20) + 4096
    loop.read()
    loop.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_measuring_costs_is_measured(tmp_path: Path) -> None:
    """By the clock and by the processor; nothing is left."""
    file = tmp_path / "out.json"
    folder = tmp_path / "dir"
    assert main(["--tiny", "--only", "telemetry", "--dir", str(folder), "--json", str(file)]) == 0
    found = {series["name"]: series for series in json.loads(file.read_text())["series"]}
    assert list(found) == ["telemetry of a save: measured", "telemetry of a save: bare"]
    assert all(series["own_processor_s"][0] > 0 for series in found.values())
    assert list(folder.iterdir()) == []
