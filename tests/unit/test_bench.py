"""The arithmetic of the benchmarks, and their checks of loaded data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from holdfast.bench.contest import Contestant, contest, rows
from holdfast.bench.program import TINY_GIB, Options, Program
from holdfast.bench.report import Report, Series, ratio
from holdfast.bench.workloads.sized import scaled_parameters

MIB = 1 << 20


def test_ratios_are_taken_within_rounds() -> None:
    """Ratios are taken within rounds, so a slow round has no effect; otherwise medians count."""
    limit, ours = Series("limit", [1.0, 10.0, 1.0]), Series("holdfast", [2.0, 20.0, 2.0])
    assert ratio(ours, limit) == 2.0
    assert ratio(Series("a", [2.0, 4.0, 6.0]), Series("b", [2.0])) == 2.0


def test_rows_show_ratios_to_limit_and_to_holdfast() -> None:
    """Rows show ratios: the limit takes half of our time, a peer four times as long."""
    found = [
        Series("limit", [1.0], [0]),
        Series("holdfast", [2.0, 2.0, 2.0], [5, MIB << 10, 0]),
        Series("DCP", [8.0]),
    ]
    assert [row[4:] for row in rows(found, 4 * 10**9)] == [
        ["4.00", "–", "–", "0.00 GiB"],
        ["2.00", "50%", "–", "1.00 GiB"],
        ["0.50", "12%", "4.0 ×", "–"],
    ]


def test_contestants_take_turns() -> None:
    """Contestants alternate (A B, B A, A B), and set-up and clean-up are not timed."""
    seen: list[str] = []
    add = seen.append
    contestants = [
        Contestant(n, lambda n=n: add(n), lambda: add("("), lambda: add(")")) for n in "AB"
    ]  # type: ignore[misc]
    assert [len(series.seconds) for series in contest(contestants, 3, 0.0)] == [3, 3]
    assert "".join(seen) == "(A)(B)(B)(A)(A)(B)"


@pytest.mark.parametrize("gib", [0.5, 1.0, 8.0])
def test_states_come_close_to_their_size(gib: float) -> None:
    """A scaled model of whole layers is within 10 % of the requested size."""
    nbytes = sum(math.prod(shape) * 14 for shape in scaled_parameters(gib).values())
    assert nbytes / (1 << 30) == pytest.approx(gib, rel=0.1)


def test_tiny_overrules_size_and_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tiny runs one round of a small state and overrides all other options.

    It writes the figures to the given file, and leaves nothing else.
    """
    seen: list[Options] = []

    def report(given: Options, folder: Path) -> Report:
        seen.append(given)
        (folder / "file").write_text("x")
        return Report("T", ["", "s"], [["A", "1"]])

    file = tmp_path / "out.json"
    arguments = ["--tiny", "--gib", "7", "--runs", "9", "--dir", str(tmp_path / "dir")]
    assert Program("p", "Doc.", report)([*arguments, "--json", str(file)]) == 0
    assert [(given.gib, given.runs) for given in seen] == [(TINY_GIB, 1)]
    found = json.loads(file.read_text())
    assert (found["program"], found["rows"]) == ("p", [["A", "1"]])
    assert "cpu" in found["machine"]
    assert "A  1" in capsys.readouterr().out
    assert list((tmp_path / "dir").iterdir()) == []
