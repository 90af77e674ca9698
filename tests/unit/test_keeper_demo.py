"""Parts of the demo of keepers; ``tests/crash/test_keeper_demo.py`` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.cli.app import run as run_command
from holdfast.cli.demo.hosts import Hosts
from holdfast.cli.demo.keepers import Accident, Outcome

LOST = Accident("one host lost", 23, ("b",), 23, "parity")


def outcome(step: int | None = 23, **tiers: int) -> Outcome:
    """Return an outcome of :data:`LOST`."""
    return Outcome(LOST, step, tiers, 0.25, 12.0)


@pytest.mark.parametrize(
    "found",
    [outcome(20, parity=1), outcome(23, own=1), outcome(None)],
    ids=["step", "tier", "none"],
)
def test_unexpected_step_or_tier_is_noticed(found: Outcome) -> None:
    """A job that resumes from an earlier step, or from another tier, is not as expected."""
    assert outcome(23, parity=1).as_expected
    assert not found.as_expected


def test_a_folder_or_storage_that_the_demo_cannot_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so before anything starts."""
    with pytest.raises(holdfast.UsageError, match="TMPDIR"):
        Hosts(tmp_path / ("x" * 100))
    assert run_command(["keeper", "demo", "memory://x"]) == 2
    assert "share no memory:// storage" in capsys.readouterr().err
