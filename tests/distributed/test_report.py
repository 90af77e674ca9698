"""``holdfast report`` names the rank that kept a save waiting, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.rank_processes import RankProcesses
from support.troubled_saves import DELAY_S, LATE_S, troubled_save

import holdfast
from holdfast.cli import app
from holdfast.storage.operations.reporting.findings import Cause, stragglers

NOISE_S = 0.4
"""By so much ranks differ on a busy machine."""


@pytest.mark.nightly(7)
@pytest.mark.clocked
@pytest.mark.parametrize(
    "troubles", [["none", "slow", "late", "retries"], ["late", "throttled", "none", "none"]]
)
def test_the_report_names_each_troubled_rank_and_its_cause(
    ranks: RankProcesses, tmp_path: Path, troubles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow, late, retrying and throttled ranks are named, and no other."""
    for rank in range(4):
        (tmp_path / "packages" / str(rank)).mkdir(parents=True)
    path = tmp_path / "c"
    ranks.run(troubled_save, f"nas://{path}", str(tmp_path / "packages"), troubles)
    with holdfast.open(path) as checkpoint:
        telemetry = checkpoint.telemetry()
    assert telemetry is not None
    causes = {"slow": Cause.SLOW_STORAGE, "late": Cause.LATE, "retries": Cause.RETRIES}
    causes["throttled"] = Cause.THROTTLED
    expected = {(rank, causes[what]) for rank, what in enumerate(troubles) if what in causes}
    found = [slow for slow in stragglers(telemetry) if slow.excess_s > NOISE_S]
    assert {(slow.rank, slow.cause) for slow in found} == expected
    for slow in found:
        if slow.cause is Cause.LATE:
            assert slow.stage == "call"
            assert slow.seconds == pytest.approx(LATE_S, rel=0.5)
        if slow.cause is Cause.SLOW_STORAGE:
            assert "upload_commit" in {slow.stage, *slow.also}
            assert slow.excess_s > DELAY_S
    assert app.run(["report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert app.run(["report", str(path), "--json"]) == 0
    (save,) = json.loads(capsys.readouterr().out)["saves"]
    told = {(slow["rank"], slow["cause"]) for slow in save["stragglers"]}
    for rank, cause in expected:
        assert any(line.startswith(f"rank {rank}: {cause}: ") for line in lines)
        assert (rank, cause) in told
