"""Jobs of every layout are killed in the middle of a save, and taken over in another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.killed_jobs import EVERY, losses_of, run_until_killed
from support.rank_processes import Gone, RankProcesses

import holdfast

EXACT = 0.0
ROUNDED = 1e-5
"""Sums over ranks are of other parts, or in another order."""

CASES = [
    ("DDP", 2, "plain", 1, EXACT),
    ("FULL_SHARD", 2, "FULL_SHARD flat", 4, EXACT),
    ("SHARD_GRAD_OP", 2, "HYBRID_SHARD flat", 4, EXACT),
    ("HYBRID_SHARD", 4, "SHARD_GRAD_OP", 2, EXACT),
    ("fsdp", 4, "fsdp", 3, ROUNDED),
    ("hsdp", 4, "zero", 2, EXACT),
    ("tp", 2, "fsdp", 4, ROUNDED),
    ("averaged", 2, "averaged", 4, EXACT),
    ("staged", 2, "staged", 1, EXACT),
    ("zero", 2, "zero", 4, EXACT),
]


@pytest.mark.nightly(37)
@pytest.mark.parametrize(
    ("kind", "world", "other", "others", "tolerance"),
    CASES,
    ids=[f"{kind} on {world}, then {other}" for kind, world, other, *_ in CASES],
)
def test_a_killed_job_ends_in_another_layout_as_if_it_had_never_stopped(
    kind: str,
    world: int,
    other: str,
    others: int,
    tolerance: float,
    ranks: RankProcesses,
    tmp_path: Path,
    seed: int,
) -> None:
    """A rank dies of kill -9 during a save that runs beside the training."""
    uri = str(tmp_path / "run")
    _, whole = ranks.run(losses_of, kind, None, world=world)[0]
    with RankProcesses(world) as killed:
        killed.begin(run_until_killed, kind, uri, 1 + seed % 30)
        assert killed.outcomes(1) == [Gone()]
    assert [found.step for found in holdfast.list_checkpoints(uri)] == [EVERY]
    for begin, losses in ranks.run(losses_of, other, uri, world=others):
        assert begin == EVERY
        assert losses == pytest.approx(whole[EVERY:], rel=tolerance)
    with holdfast.open(sorted((tmp_path / "run").iterdir())[-1]) as last:
        assert not any(t.owners for t in last.tensors.values())
        assert last.step == 3 * EVERY
