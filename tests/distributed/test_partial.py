"""Loads by several ranks that do not fit in all: seen from all ranks together, and said on each."""

from __future__ import annotations

from pathlib import Path

from support.rank_processes import RankProcesses
from support.tied import partial_loads, tied_loads


def test_sharded_weights_that_are_tied_get_one_stored_tensor(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Values that agree are loaded, others refused on all ranks."""
    for found in ranks.run(tied_loads, str(tmp_path / "c"), world=2):
        assert "'model.emb.weight', 'model.head.weight' share memory" in found["differ True"]
        assert found["differ state"] == [2.0]
        assert found["agree True"] == found["agree state"] == [3.0]


def test_what_is_left_is_told_of_all_ranks_on_each(ranks: RankProcesses, tmp_path: Path) -> None:
    """Names that one rank alone misses, and names that no rank has a place for."""
    for missing, unexpected in ranks.run(partial_loads, str(tmp_path / "c"), world=2):
        assert missing == ("new0", "new1")
        assert unexpected == ("extra",)
