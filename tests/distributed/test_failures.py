"""Ranks that fail, die, hang or disagree: no save is committed, and other jobs take over."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.copies import steps_at
from support.killed_jobs import EVERY, losses_of, run_until_killed
from support.rank_processes import Gone, RankProcesses, errors
from support.rank_tasks import (
    damaged_run,
    halting_save,
    hide_folder,
    interrupted_save,
    save_with,
    skewed_run,
    stopped_run,
    timed_run,
    unsavable,
)
from support.shelves import until

import holdfast

pytestmark = pytest.mark.clocked

OLD = {"x": torch.arange(100.0), "y": 1}


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Save a checkpoint that must stay unchanged; return its URI."""
    holdfast.save(tmp_path / "c", OLD)
    return str(tmp_path / "c")


def untouched(uri: str) -> bool:
    """Return whether the old checkpoint is still whole."""
    with holdfast.open(uri) as checkpoint:
        return difference(OLD, holdfast.load(uri)) is None and checkpoint.verify().ok


def files(uri: str) -> list[str]:
    """Return the names of all files at ``uri``."""
    return sorted(p.name for p in Path(uri).rglob("*") if p.is_file())


def test_a_state_that_one_rank_cannot_save_is_told_to_all(uri: str, ranks: RankProcesses) -> None:
    """A rank with a bad state raises StateError, and the others raise RankFailedError at once."""
    before, rank = files(uri), 2
    raised = errors(ranks.outcomes(ranks.begin(save_with, uri, {rank: unsavable})))
    own = raised.pop(rank)
    assert isinstance(own, holdfast.StateError)
    assert [(type(e), e.rank) for e in raised] == [(holdfast.RankFailedError, rank)] * 3
    assert all('state["f"]' in str(e) and e.took_s < 5 for e in raised)
    assert untouched(uri)
    assert files(uri) == before


def test_ctrl_c_on_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    """The others learn which rank was interrupted; the next save works."""
    uri = str(tmp_path / "c")
    with RankProcesses(2) as pair:
        own, other = errors(pair.outcomes(pair.begin(interrupted_save, uri, 1)))[::-1]
        assert isinstance(own, KeyboardInterrupt)
        assert isinstance(other, holdfast.RankFailedError)
        assert (other.rank, other.took_s < 10) == (1, True)
        assert "interrupted" in str(other)
        assert files(uri) == []
        pair.run(save_with, uri, {0: OLD, 1: OLD})
    assert untouched(uri)


@pytest.mark.parametrize(("rank", "moment"), [(2, "create"), (0, "put")])
def test_a_rank_that_is_killed_in_the_middle_of_a_save_is_named(
    rank: int, moment: str, uri: str, tmp_path: Path
) -> None:
    """The others raise DeadlineError, and the next save works."""
    with RankProcesses(3) as doomed:
        world = doomed.begin(halting_save, uri, rank, moment, str(tmp_path / "sign"), 2.0)
        until((tmp_path / "sign").exists, "it halted", 60)
        doomed.kill(rank)
        outcomes = doomed.outcomes(world)
        assert outcomes.pop(rank) == Gone()
        raised = errors(outcomes)
        assert [(type(e), e.rank) for e in raised] == [(holdfast.DeadlineError, rank)] * 2
        assert all(f"rank {rank}" in str(e) for e in raised)
    assert untouched(uri)
    holdfast.save(uri, OLD)
    claimed = moment == "put"
    assert sum(name == "manifest.safetensors" for name in files(uri)) == 1
    assert len(list((Path(uri) / "data").iterdir())) == 1 + claimed
    assert untouched(uri)


def test_storage_that_ranks_do_not_share_is_found_out(tmp_path: Path) -> None:
    """The commit does not see the private file of one rank."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    shared.mkdir()
    private.mkdir()
    with RankProcesses(3) as pair:
        reasons = pair.run(hide_folder, str(shared), 2, str(private))
        if any(reasons):
            pytest.skip(next(filter(None, reasons)))
        own = {rank: {"own": torch.full((9,), float(rank))} for rank in range(3)}
        raised = errors(pair.outcomes(pair.begin(save_with, str(shared / "c"), own)))
    assert [type(e) for e in raised] == [holdfast.InvisibleFilesError] * 3
    assert [e.rank for e in raised] == [2] * 3
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []


EXACT = 0.0
ROUNDED = 1e-5
"""Relative tolerance: layouts sum other parts, or in another order."""

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
    """A rank dies of kill -9 during an asynchronous save."""
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


def test_a_save_is_skipped_by_all_or_by_none(ranks: RankProcesses, tmp_path: Path) -> None:
    """All ranks skip the same saves, even if one learns later that the last save has ended."""
    for slow in (0, 2):
        found = ranks.run(skewed_run, str(tmp_path / str(slow)), slow)
        begun = found[0][0]
        assert [b for b, _ in found] == [begun] * 4
        assert steps_at(tmp_path / str(slow)) == begun
        counts = [(c["due"], c["saved"], c["skipped"], c["failed"]) for _, c in found]
        assert counts == [(12, len(begun), 12 - len(begun), 0)] * 4
        assert len(begun) < 12 or slow != 0


def test_time_is_up_for_all_at_the_same_step(ranks: RankProcesses, tmp_path: Path) -> None:
    """The clock of rank 0 ends the run at the same step on all ranks."""
    found = ranks.run(timed_run, str(tmp_path))
    begun = found[0][0]
    assert [b for b, _ in found] == [begun] * 4
    assert len(begun) > 1
    assert steps_at(tmp_path) == begun
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
    assert steps_at(tmp_path) == [5]
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
    assert steps_at(tmp_path) == []
