"""Values of one rank each, in jobs whose number of ranks changes."""

from __future__ import annotations

import random
from pathlib import Path

from support.loading import own_values, part_of_an_epoch
from support.rank_processes import RankProcesses

SAMPLES = 103


def test_each_sample_of_an_epoch_is_read_once_by_four_then_two_then_three_ranks(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Each job stops in the middle of the epoch, and the next one goes on with what is left,
    through StatefulDataLoader."""
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    read = ranks.run(part_of_an_epoch, None, first, SAMPLES, 3, world=4)
    assert [len(samples) for samples, _ in read] == [9] * 4
    read += ranks.run(part_of_an_epoch, first, second, SAMPLES, 5, world=2)
    read += ranks.run(part_of_an_epoch, second, None, SAMPLES, -1, world=3)
    assert sorted(sample for samples, _ in read for sample in samples) == list(range(SAMPLES))


def test_the_same_number_of_ranks_goes_on_as_if_nothing_had_been(
    ranks: RankProcesses, tmp_path: Path
) -> None:
    """Each rank reads just what it would have read, in the same order, and rolls the same dice."""
    uri = str(tmp_path / "c")
    whole = ranks.run(part_of_an_epoch, None, None, SAMPLES, -1, world=3)
    begun = ranks.run(part_of_an_epoch, None, uri, SAMPLES, 4, world=3)
    ended = ranks.run(part_of_an_epoch, uri, None, SAMPLES, -1, world=3)
    assert [a[0] + b[0] for a, b in zip(begun, ended, strict=True)] == [
        samples for samples, _ in whole
    ]
    for rank, drawn in enumerate(zip(begun, ended, strict=True)):
        dice = random.Random(rank)
        assert [number for _, number in drawn] == [dice.random(), dice.random()]


def test_ranks_may_have_values_of_different_structure(ranks: RankProcesses, tmp_path: Path) -> None:
    """Lists of other lengths, dicts of other keys: each gets its own, and nothing of another's."""
    assert ranks.run(own_values, str(tmp_path / "c")) == [None] * 4
