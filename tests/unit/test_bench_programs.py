"""Programs below bench/: a tiny run ends well, and a wrong result is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.bench import parity


def test_tiny_run_ends_well(tmp_path: Path) -> None:
    """It has a row for each contestant, and leaves only the file that was asked for."""
    file = tmp_path / "out.json"
    assert parity.main(["--tiny", "--dir", str(tmp_path / "dir"), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    names = [row[0] for row in found["rows"]]
    assert names[:3] == ["memcpy", "XOR 3+1", "P+Q 4+2"]
    assert [series["name"] for series in found["series"]] == names
    assert all(series["own_processor_s"] for series in found["series"])
    assert list((tmp_path / "dir").iterdir()) == []


def test_wrong_parity_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity is checked after each run."""

    def lazy_xor(out: np.ndarray, blocks: list[np.ndarray]) -> None:
        np.copyto(out, blocks[0])

    monkeypatch.setattr(parity, "make_xor", lazy_xor)
    with pytest.raises(AssertionError, match="the parity that was made is wrong"):
        parity.main(["--tiny", "--dir", str(tmp_path)])
