"""The Checkpointer on several ranks: all ranks take the same decisions."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.rank_processes import RankProcesses
from support.rank_tasks import damaged_run, skewed_run, stopped_run, timed_run

import holdfast


def steps(uri: Path) -> list[int | None]:
    """Return the stored steps."""
    return [c.step for c in holdfast.list_checkpoints(uri)]


def test_a_save_is_skipped_by_all_or_by_none(ranks: RankProcesses, tmp_path: Path) -> None:
    """All ranks skip the same saves, even if one learns later that the last save has ended."""
    for slow in (0, 2):
        found = ranks.run(skewed_run, str(tmp_path / str(slow)), slow)
        begun = found[0][0]
        assert [b for b, _ in found] == [begun] * 4
        assert steps(tmp_path / str(slow)) == begun
        counts = [(c["due"], c["saved"], c["skipped"], c["failed"]) for _, c in found]
        assert counts == [(12, len(begun), 12 - len(begun), 0)] * 4
        assert len(begun) < 12 or slow != 0


def test_time_is_up_for_all_at_the_same_step(ranks: RankProcesses, tmp_path: Path) -> None:
    """The clock of rank 0 ends the run at the same step on all ranks."""
    found = ranks.run(timed_run, str(tmp_path))
    begun = found[0][0]
    assert [b for b, _ in found] == [begun] * 4
    assert len(begun) > 1
    assert steps(tmp_path) == begun
    assert [c["failed"] for _, c in found] == [0] * 4


def test_all_go_on_from_the_same_step_though_one_alone_finds_damage(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """All ranks resume from the same older step if one of them reads damaged data."""
    assert ranks.run(damaged_run, str(tmp_path)) == [(2, 20.0 + rank) for rank in range(4)]


def test_all_save_the_same_step_before_they_stop(ranks: RankProcesses, tmp_path: Path) -> None:
    """After SIGTERM all ranks save the latest step that any of them has reached."""
    found = ranks.run(stopped_run, str(tmp_path), [3, 5, 4, 3])
    assert [(step, stop) for step, stop, _ in found] == [(5, [signal.SIGTERM])] * 4
    assert steps(tmp_path) == [5]
    with holdfast.open(tmp_path / "step-00000005") as checkpoint:
        assert checkpoint.verify().ok
    assert [c["saved"] for _, _, c in found] == [1] * 4


@pytest.mark.nightly(3)
def test_a_rank_that_is_not_told_to_stop_is_not_waited_for_forever(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """If one rank gets no signal, the others stop after the grace period without a save."""
    found = ranks.run(stopped_run, str(tmp_path), [3, -1, 3, 3])
    assert [stop for _, stop, _ in found] == [
        [signal.SIGTERM],
        [],
        [signal.SIGTERM],
        [signal.SIGTERM],
    ]
    assert steps(tmp_path) == []
