"""The benchmark of hosts that guard each other: that it runs, over real connections, and checks what
was made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.bench import rebuild
from holdfast.errors import DamagedError
from holdfast.storage.keeper.parity import combining

pytestmark = pytest.mark.heavy


def test_a_tiny_run_ends_well(tmp_path: Path) -> None:
    """It has a row for each way, leaves its figures where asked and nothing else, and judges
    nothing."""
    file = tmp_path / "out.json"
    assert rebuild.main(["--tiny", "--dir", str(tmp_path / "dir"), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [row[0] for row in found["rows"]] == ["holdfast", "parity"]
    assert all(series["own_processor_s"] for series in found["series"])
    assert found["targets"] == []
    assert list((tmp_path / "dir").iterdir()) == []


def test_another_image_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it was made."""
    monkeypatch.setattr(combining.Range, "fill", lambda self, pulled: None)
    with pytest.raises(DamagedError, match="rank 0 of step 1, rebuilt"):
        rebuild.main(["--tiny", "--dir", str(tmp_path)])
