"""Saves and loads by some ranks of a job, without the others."""

from __future__ import annotations

from pathlib import Path

from support.rank_processes import RankProcesses
from support.rank_tasks import actor_and_critic, copies_of_one, runs_of_groups


def test_two_groups_save_a_checkpoint_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each group saves a checkpoint of two ranks, numbered from 0, without waiting for the other."""
    found = ranks.run(actor_and_critic, str(tmp_path))
    assert [one["world"] for one in found] == [2] * 4
    assert all(one["whole"] for one in found)
    assert [one["own"] for one in found] == [0.0, 1.0, 2.0, 3.0]
    assert [one["data"] for one in found] == [{"at": rank} for rank in range(4)]
    assert sorted(path.name for path in (tmp_path / "half-1" / "data").glob("*/*.safetensors")) == [
        "0.safetensors",
        "1.safetensors",
    ]


def test_two_groups_train_with_a_checkpointer_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """They save and resume at steps of their own."""
    assert ranks.run(runs_of_groups, str(tmp_path)) == [2, 2, 3, 3]


def test_a_rank_alone_saves_what_it_has_whole(ranks: RankProcesses, tmp_path: Path) -> None:
    """It saves a replicated tensor; a sharded one is refused by name."""
    for said in ranks.run(copies_of_one, str(tmp_path), world=2):
        assert "w: [3:5,0:3] is missing" in said or "w: [0:3,0:3] is missing" in said
