"""Shares of a whole job: small cases with the answers written out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.planner.balance import SHARE_UNIT, Group, balance


def written(held: Mapping[Group, int], world: int) -> dict[Group, list[Any]]:
    """What each member of each group writes, in bytes that compare by ``pytest.approx``."""
    shares = balance(held, world)
    return {
        group: [
            pytest.approx(held[group] * (b - a) / SHARE_UNIT, abs=1e-3)
            for a, b in itertools.pairwise(cuts)
        ]
        for group, cuts in shares.items()
    }


def test_what_is_even_stays_as_it_is() -> None:
    """One group, groups of no overlap, a mesh whose rows and columns hold alike, and what differs
    by a percent only."""
    assert balance({}, 4) == {}
    assert balance({(0, 1): 0}, 2) == {}
    assert balance({(0, 1, 2): 1000, (0,): 9, (1,): 10, (2,): 10}, 3) == {}
    assert balance({(0, 1): 70, (2, 3): 70, (0, 2): 8, (1, 3): 8, (0, 1, 2, 3): 1}, 4) == {}


def test_who_has_more_alone_writes_less_of_what_is_shared() -> None:
    """So that both write 80."""
    assert written({(0, 1): 100, (0,): 60}, 2) == {(0, 1): [20, 80]}


def test_who_has_too_much_alone_writes_nothing_that_is_shared() -> None:
    """The others divide it evenly."""
    assert written({(0, 1, 2): 100, (1,): 300}, 3) == {(0, 1, 2): [50, 0, 50]}


def test_nothing_is_changed_where_nothing_helps() -> None:
    """Of two groups without a common member, one holds more."""
    assert balance({(0, 1): 100, (2, 3): 900}, 4) == {}


def test_a_smaller_group_is_filled_first() -> None:
    """Stages of different size, and a tensor that all hold: it goes to the smaller stage, as far as
    it reaches."""
    assert written({(0, 1): 100, (2, 3): 20, (0, 1, 2, 3): 40}, 4) == {
        (0, 1): [50, 50],
        (2, 3): [10, 10],
        (0, 1, 2, 3): [0, 0, 20, 20],
    }


def test_groups_that_cross_are_balanced_together() -> None:
    """Bytes move along a chain of groups, through ranks that two of them have in common: all write
    85."""
    loads = [60.0, 0.0, 0.0, 0.0]
    for group, parts in written({(0,): 60, (0, 1): 40, (1, 2): 120, (2, 3): 120}, 4).items():
        for rank, part in zip(group, parts, strict=True):
            loads[rank] += part.expected
    assert loads == pytest.approx([85] * 4, rel=0.01)
