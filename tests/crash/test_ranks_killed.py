"""Test kill -9 of one of two saving ranks: the other says so, and one whole checkpoint exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.aftermath import check, check_next_save, some
from support.rank_processes import Failed, Gone, RankProcesses
from support.victims import save_as_rank

import holdfast

DEADLINE_S = 2.0
POINTS = 2


@pytest.mark.nightly(8)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [0, 1], ids=["the leader", "another rank"])
def test_one_rank_of_two_dies_before_a_system_call(tmp_path: Path, victim: int, seed: int) -> None:
    """The survivor raises, or has saved if it was committed."""
    uri = tmp_path / "c"
    with RankProcesses(2) as ranks:
        most = ranks.run(save_as_rank, str(uri), 1, victim, 0, DEADLINE_S)[victim]
    check(uri, {1})
    found = []
    for at in some(range(1, most + 1), POINTS, seed):
        check_next_save(uri, 1)
        with RankProcesses(2) as ranks:
            outcomes = ranks.outcomes(
                ranks.begin(save_as_rank, str(uri), 2, victim, at, DEADLINE_S)
            )
        survivor = outcomes[1 - victim]
        if isinstance(survivor, Failed):
            assert isinstance(survivor.error, holdfast.CoordinationError)
            found.append(check(uri, {1, 2}))
        else:
            found.append(check(uri, {2}))
        assert outcomes[victim] == Gone()
        check_next_save(uri, 3)
    assert found[0] == 1
    assert found == sorted(found)
