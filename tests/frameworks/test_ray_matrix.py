"""The checkpoints that Ray Train leaves behind, and ours, on a cluster of this host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.framework_jobs import run_job

pytest.importorskip("ray", reason="not installed: make frameworks")

from support.ray_matrix_job import CASES

# Warnings of Ray and of the packages it imports.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.mark.nightly(90)
def test_same_checkpoints_are_left_as_by_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray keeps the same checkpoints of ours, lists the same ones as best and last, and the losses
    are the same. A step that is saved again has a name of its own, or Ray would delete both."""
    numbers = range(0, len(CASES), 7)
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    run_job("ray_matrix", tmp_path, *map(str, numbers))
    found = json.loads((tmp_path / "found.json").read_text())
    differing = [n for n in numbers if found[f"{n}-False"] != found[f"{n}-True"]]
    assert [(CASES[n], found[f"{n}-True"], found[f"{n}-False"]) for n in differing] == []
