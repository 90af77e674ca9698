"""Programs below bench/: a tiny run ends well, and a wrong result is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.bench import parity, rebuild
from holdfast.errors import DamagedError
from holdfast.storage.keeper.parity import combining


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("main", "names"),
    [
        (parity.main, ["memcpy", "XOR 3+1, numpy", "P+Q 4+2, numpy"]),
        (rebuild.main, ["holdfast", "parity"]),
    ],
    ids=["parity", "rebuild"],
)
def test_tiny_run_ends_well(main: object, names: list[str], tmp_path: Path) -> None:
    """It has a row for each contestant, and leaves only the file that was asked for."""
    file = tmp_path / "out.json"
    assert main(["--tiny", "--dir", str(tmp_path / "dir"), "--json", str(file)]) == 0  # type: ignore[operator]
    found = json.loads(file.read_text())
    rows = [row[0] for row in found["rows"]]
    assert rows[: len(names)] == names
    assert [series["name"] for series in found["series"]] == rows
    assert all(series["own_processor_s"] for series in found["series"])
    assert list((tmp_path / "dir").iterdir()) == []


def test_wrong_parity_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity is checked after each run."""

    def lazy_xor(out: np.ndarray, blocks: list[np.ndarray], isal: object = None) -> None:
        np.copyto(out, blocks[0])

    monkeypatch.setattr(parity, "make_xor", lazy_xor)
    with pytest.raises(AssertionError, match="the parity that was made is wrong"):
        parity.main(["--tiny", "--dir", str(tmp_path)])


@pytest.mark.heavy
def test_wrong_image_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rebuilt image is checked against its label."""
    monkeypatch.setattr(combining.Range, "fill", lambda self, pulled: None)
    with pytest.raises(DamagedError, match="rank 0 of step 1, rebuilt"):
        rebuild.main(["--tiny", "--dir", str(tmp_path)])
