"""Saves and loads by some ranks of a job, without the others."""

from __future__ import annotations

from pathlib import Path

from support.groups import actor_and_critic, alone, copies_of_one, outside, runs_of_groups
from support.rank_processes import RankProcesses


def test_two_groups_save_a_checkpoint_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each is that of a job of two ranks, numbered from 0; neither waits for the other."""
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


def test_one_rank_saves_alone(ranks: RankProcesses, tmp_path: Path) -> None:
    """While the others do something else."""
    assert ranks.run(alone, str(tmp_path), world=2) == [(10.0, 1), None]


def test_a_rank_alone_saves_what_it_has_whole(ranks: RankProcesses, tmp_path: Path) -> None:
    """A replicated tensor; one of which other ranks have parts is refused by name."""
    for said in ranks.run(copies_of_one, str(tmp_path), world=2):
        assert "w: [3:5,0:3] is missing" in said or "w: [0:3,0:3] is missing" in said


def test_a_rank_outside_of_the_group_is_told(ranks: RankProcesses, tmp_path: Path) -> None:
    """And the ranks inside do not notice."""
    inside, other = ranks.run(outside, str(tmp_path), world=2)
    assert inside == ""
    assert "not in the process group" in other
    assert (tmp_path / "outside" / "manifest.safetensors").exists()
