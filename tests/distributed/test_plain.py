"""Test plain tensors and values on several ranks: equal ones are stored once, others per rank."""

from __future__ import annotations

from pathlib import Path

from support.rank_processes import RankProcesses
from support.rank_tasks import partial_loads, random_load, random_save, recorded_save


def test_random_states_are_each_ranks_own(ranks: RankProcesses, tmp_path: Path) -> None:
    """Every rank continues its own random sequences."""
    drawn = ranks.run(random_save, str(tmp_path / "c"))
    assert ranks.run(random_load, str(tmp_path / "c")) == [
        [*numbers, rank] for rank, numbers in enumerate(drawn)
    ]
    assert len({str(numbers) for numbers in drawn}) == 4


def test_no_collective_is_called(ranks: RankProcesses, tmp_path: Path) -> None:
    """Saves and loads use no process group."""
    assert ranks.run(recorded_save, str(tmp_path / "c")) == [[]] * 4


def test_what_is_left_is_told_of_all_ranks_on_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each rank reports names that some rank misses, and names without a place on any rank."""
    for missing, unexpected in ranks.run(partial_loads, str(tmp_path / "c"), world=2):
        assert missing == ("new0", "new1")
        assert unexpected == ("extra",)
