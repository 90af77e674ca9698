"""Votes decide whether images that ranks have captured by themselves belong together."""

from __future__ import annotations

import pytest

from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.keeper.decisions.votes import KEPT, Ballot, Outcome, Vote

ID = GenerationId(2, 7)


def vote(
    rank: int, world: int = 2, agreement: str = "plan", id: GenerationId = ID, **equal: str
) -> Vote:
    """One rank's."""
    return Vote(id, rank, world, agreement, equal)


def label(rank: int, world: int, agreement: str = "plan") -> Label:
    """That of an image whose vote it is."""
    return Label("run", ID, rank, world, 16, 0, 65536, 65536, 0.0, agreement)


def test_a_generation_is_agreed_with_the_last_vote() -> None:
    """Nothing is known before; and afterwards each further vote hears the same."""
    ballot = Ballot()
    assert ballot.cast(vote(1, 3)) is None
    assert ballot.cast(vote(0, 3)) is None
    assert ballot.cast(vote(2, 3)) is Outcome.AGREED
    assert ballot.cast(vote(1, 3)) is Outcome.AGREED


def test_a_rank_without_peers_agrees_with_itself() -> None:
    """Its vote is all votes."""
    assert Ballot().cast(vote(0, 1, "")) is Outcome.AGREED


def test_a_vote_that_comes_twice_counts_once() -> None:
    """Two votes of one rank are not two ranks."""
    ballot = Ballot()
    assert ballot.cast(vote(0)) is None
    assert ballot.cast(vote(0)) is None
    assert ballot.cast(vote(1)) is Outcome.AGREED


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (vote(0), vote(1, agreement="other plan")),
        (vote(0, group="aa"), vote(1, group="bb")),
        (vote(0), vote(0, agreement="other plan")),
        (vote(0), vote(1, world=3)),
        (vote(0), vote(2)),
        (vote(0), vote(-1)),
    ],
    ids=["plans", "replicas", "changes its mind", "worlds", "beyond the world", "before the world"],
)
def test_what_does_not_belong_together_is_void(first: Vote, second: Vote) -> None:
    """Whichever vote comes first; and it stays so."""
    for order in ((first, second), (second, first)):
        ballot = Ballot()
        outcomes = [ballot.cast(one) for one in order]
        assert Outcome.VOID in outcomes
        assert ballot.cast(vote(1)) is Outcome.VOID


def test_groups_of_other_ranks_are_compared_by_their_name() -> None:
    """Ranks that have no group in common agree."""
    ballot = Ballot()
    assert ballot.cast(vote(0, 3, left="aa")) is None
    assert ballot.cast(vote(1, 3, left="aa", right="bb")) is None
    assert ballot.cast(vote(2, 3, right="bb")) is Outcome.AGREED


def test_what_turned_out_to_be_damaged_stays_void() -> None:
    """Votes that come again, from a trainer that found its keeper again, change nothing; nor does a
    vote that was still to come."""
    ballot = Ballot()
    ballot.cast(vote(0))
    ballot.cast(vote(1))
    ballot.decide(ID, Outcome.VOID)
    assert ballot.cast(vote(0)) is Outcome.VOID
    other = GenerationId(2, 8)
    ballot.cast(vote(0, id=other))
    ballot.decide(other, Outcome.VOID)
    assert ballot.cast(vote(1, id=other)) is Outcome.VOID


def test_generations_without_an_outcome_are_forgotten() -> None:
    """After so many later ones a vote begins to be counted anew: memory is bounded."""
    ballot = Ballot()
    ballot.cast(vote(0))
    for step in range(8, 8 + KEPT):
        ballot.cast(vote(0, id=GenerationId(2, step)))
    assert ballot.cast(vote(1)) is None
    assert ballot.cast(vote(1, id=GenerationId(2, 7 + KEPT))) is Outcome.AGREED
