"""What the lead keeper makes of reports: which generations are agreed on, of which one all make
parity, and what is flushed together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.keeper.decisions.lead import REST_MAX, Lead, is_newer
from holdfast.storage.keeper.decisions.standing import FlushEnd, FlushOrder, Report, Written
from holdfast.storage.keeper.decisions.votes import KEPT, Vote

NAMES = ("a", "b")
"""Keepers of the ranks 0 and 1."""


def id(step: int, epoch: int = 1) -> GenerationId:
    """Of a step."""
    return GenerationId(epoch, step)


def vote(step: int, rank: int, epoch: int = 1, world: int = 2) -> Vote:
    """Of a rank."""
    return Vote(id(step, epoch), rank, world, "plan", {})


def begun(*, guards: bool = False, epoch: int = 1, heard: bool = True) -> Lead:
    """With the keepers ``a`` and ``b``."""
    lead = Lead("x")
    lead.begin(epoch, NAMES, guards=guards)
    for name in NAMES if heard else ():
        says(lead, name, epoch=epoch)
    return lead


def says(
    lead: Lead, name: str, *steps: int, epoch: int = 1, seen: str = "x/0", **news: Any
) -> None:
    """A keeper reports that its rank has sealed these steps, and news."""
    votes = tuple(vote(step, NAMES.index(name), epoch) for step in steps)
    lead.hear(Report(name, epoch, votes, seen=seen, **news))


def fails(lead: Lead, name: str) -> None:
    """A keeper cannot make parity now."""
    standing = lead.standing()
    says(lead, name, unguarded=standing.guard, attempt=standing.attempt)


def protect(lead: Lead, generation: GenerationId) -> None:
    """All have made parity of it, and know that all have."""
    for name in NAMES:
        says(lead, name, guarded=generation)
    for name in NAMES:
        says(lead, name, guarded=generation, guarded_by_all=generation)


def agree(lead: Lead, *steps: int, epoch: int = 1) -> None:
    """All have sealed these steps."""
    for name in NAMES:
        says(lead, name, *steps, epoch=epoch)


def test_a_generation_is_agreed_on_once_all_keepers_have_voted() -> None:
    """It is open before; and a report that comes again, or late, changes nothing."""
    lead = begun()
    says(lead, "a", 1)
    assert (lead.standing().agreed, lead.standing().open) == ((), (id(1),))
    version = lead.version
    says(lead, "a", 1)
    assert lead.version == version
    says(lead, "b", 1)
    assert (lead.standing().agreed, lead.standing().open) == ((id(1),), ())
    assert is_newer(lead.version, version)
    version = lead.version
    says(lead, "a", 1)
    assert lead.version == version


def test_what_a_rank_will_not_vote_for_is_void() -> None:
    """Whoever votes for it later hears that."""
    lead = begun()
    says(lead, "a", 1)
    says(lead, "b", missing=(id(1),))
    assert lead.standing().void == (id(1),)
    says(lead, "b", 1)
    assert (lead.standing().void, lead.standing().agreed) == ((id(1),), ())


def test_the_newest_that_is_agreed_on_is_not_forgotten() -> None:
    """However many steps after it are void: a keeper may yet have to hear of it. Of what is
    forgotten it is told that it is, and votes for it are not counted again."""
    lead = begun()
    agree(lead, 1, 2)
    says(lead, "a", *range(3, 40))
    says(lead, "b", missing=tuple(map(id, range(3, 40))))
    standing = lead.standing()
    assert standing.agreed == (id(2),)
    assert standing.void == tuple(map(id, range(40 - KEPT, 40)))
    assert standing.settled == id(39 - KEPT)
    says(lead, "b", 1, 3)
    assert lead.standing() == standing
    lead.begin(2, NAMES, guards=False)
    assert lead.standing().settled is None


def test_what_a_keeper_knows_to_be_agreed_on_is() -> None:
    """The lead keeper before has told it; that one's votes need not come again."""
    lead = begun()
    says(lead, "a", agreed=id(4))
    assert lead.standing().agreed == (id(4),)
    says(lead, "b", missing=(id(4),))
    assert lead.standing().void == ()


def test_reports_of_others_and_of_other_epochs_say_nothing() -> None:
    """Nor do votes for another epoch's generations, whatever the report's epoch."""
    lead = begun()
    version = lead.version
    lead.hear(Report("c", 1, (vote(1, 0),)))
    says(lead, "a", 1, epoch=0)
    says(lead, "a", 1, epoch=2)
    assert lead.version == version
    lead.hear(Report("a", 1, (vote(1, 0, 0),), missing=(id(1, 0),), agreed=id(2, 0)))
    assert (lead.standing().open, lead.standing().void, lead.standing().agreed) == ((), (), ())


def test_an_epoch_begins_once() -> None:
    """One that is not after the last one does not begin, and its keepers are not those."""
    lead = begun()
    assert (lead.epoch, lead.names) == (1, {"a", "b"})
    for epoch in (0, 1):
        lead.begin(epoch, ("c",), guards=True)
        assert (lead.epoch, lead.names) == (1, {"a", "b"})
    lead.begin(2, ("c",), guards=False)
    assert (lead.epoch, lead.names) == (2, {"c"})


def test_votes_of_a_former_epoch_come_to_nothing() -> None:
    """Each epoch counts anew, also for a step that it has in common with the one before."""
    lead = begun()
    says(lead, "a", 1)
    lead.begin(2, NAMES, guards=False)
    says(lead, "b", 1, epoch=2)
    assert (lead.standing().agreed, lead.standing().open) == ((), (id(1, 2),))


def test_memory_that_no_longer_holds_what_was_sealed_voids_it() -> None:
    """Of a job with one keeper."""
    lead = begun()
    agree(lead, 1)
    lead.void(id(1))
    assert (lead.standing().agreed, lead.standing().void) == ((), (id(1),))


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [
        ("x/2", "x/1", True),
        ("x/10", "x/9", True),
        ("x/1", "x/1", False),
        ("x/1", "x/2", False),
        ("y/1", "x/2", True),
        ("x/1", "", True),
    ],
)
def test_standings_overtake_each_other(version: str, than: str, newer: bool) -> None:
    """Versions of one lead keeper count up; nothing is known of those of two."""
    assert is_newer(version, than) is newer


def test_the_newest_generation_that_is_agreed_on_is_guarded() -> None:
    """One at a time: those that are agreed on meanwhile wait."""
    lead = begun(guards=True)
    agree(lead, 1)
    assert lead.standing().guard == id(1)
    agree(lead, 2, 3)
    assert lead.standing().guard == id(1)
    says(lead, "a", guarded=id(1))
    says(lead, "a", guarded=id(1))
    assert (lead.standing().guard, lead.standing().guarded) == (id(1), None)
    says(lead, "b", guarded=id(1))
    assert (lead.standing().guard, lead.standing().guarded) == (None, id(1))
    says(lead, "a", guarded_by_all=id(1))
    assert (lead.standing().guard, lead.standing().protected) == (None, None)
    says(lead, "b", guarded_by_all=id(1))
    assert (lead.standing().guard, lead.standing().protected) == (id(3), id(1))
    says(lead, "b")
    assert lead.standing().protected == id(1)


def test_nothing_is_guarded_before_all_keepers_are_heard() -> None:
    """One of them may know of what is guarded already."""
    lead = begun(guards=True, heard=False)
    says(lead, "a", agreed=id(2))
    assert lead.standing().guard is None
    says(lead, "b", guarded_by_all=id(1))
    assert (lead.standing().guard, lead.standing().protected) == (None, None)
    says(lead, "a", guarded_by_all=id(1))
    assert (lead.standing().guard, lead.standing().protected) == (id(2), id(1))


def test_nothing_is_guarded_where_keepers_make_no_parity() -> None:
    """Hosts are too few for that, or it is off."""
    lead = begun()
    agree(lead, 1)
    assert lead.standing().guard is None


def test_what_is_void_is_not_guarded_any_more() -> None:
    """The one before is, if it was not yet."""
    lead = begun(guards=True)
    agree(lead, 1)
    lead.void(id(1))
    assert lead.standing().guard is None
    says(lead, "a", guarded=id(1))
    says(lead, "b", guarded=id(1))
    assert lead.standing().guarded is None


def test_parity_of_another_generation_does_not_count() -> None:
    """That of the one before, which a keeper still has."""
    lead = begun(guards=True)
    agree(lead, 1)
    protect(lead, id(1))
    agree(lead, 2)
    says(lead, "a", guarded=id(2))
    says(lead, "b", guarded=id(1))
    assert (lead.standing().guard, lead.standing().guarded) == (id(2), id(1))


def test_after_each_failure_more_generations_are_left_out() -> None:
    """What is guarded takes memory that steps need. After a success it begins anew."""
    lead = begun(guards=True)
    step, tried = 0, []
    for _ in range(150):
        step += 1
        agree(lead, step)
        guard = lead.standing().guard
        if guard is not None:
            tried.append(guard.step)
            fails(lead, "b")
            assert lead.standing().guard is None
    assert [b - a for a, b in itertools.pairwise(tried)] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert REST_MAX == 32
    while lead.standing().guard is None:
        step += 1
        agree(lead, step)
    protect(lead, id(step))
    agree(lead, step + 1)
    fails(lead, "b")
    agree(lead, step + 2)
    assert lead.standing().guard == id(step + 2)


def test_what_could_not_be_guarded_is_tried_again_where_nothing_newer_is_agreed_on() -> None:
    """What was guarded before takes slots, for lack of which all further steps are left out."""
    lead = begun(guards=True)
    agree(lead, 1)
    before = lead.standing().attempt
    fails(lead, "b")
    assert lead.standing().guard is None
    says(lead, "a", 2)
    says(lead, "b", missing=(id(2),))
    assert lead.standing().guard == id(1)
    says(lead, "b", unguarded=id(1), attempt=before)
    assert lead.standing().guard == id(1)
    fails(lead, "b")
    assert lead.standing().guard is None


def test_what_a_keeper_was_told_is_guarded_is_told_to_all() -> None:
    """In the next epoch, and by a lead keeper that begins anew; the newest of it, and nothing that
    a resume has dropped since."""
    lead = begun(guards=True, heard=False)
    assert not lead.standing().heard
    says(lead, "a", guarded_by_all=id(5, 0))
    assert (lead.standing().guarded, lead.standing().heard) == (id(5, 0), False)
    says(lead, "b", guarded_by_all=id(3, 0))
    assert (lead.standing().guarded, lead.standing().heard) == (id(5, 0), True)
    lead.begin(2, NAMES, guards=True)
    assert (lead.standing().guarded, lead.standing().heard) == (None, False)
    says(lead, "a", epoch=2)
    says(lead, "b", guarded_by_all=id(3, 0), epoch=2)
    assert (lead.standing().guarded, lead.standing().heard) == (id(3, 0), True)


def test_a_keeper_is_heard_once_it_knows_who_leads() -> None:
    """What it has sent before may come late, and lack what the lead keeper before has told it since.
    News in it count all the same."""
    lead = begun(guards=True, heard=False)
    says(lead, "a")
    says(lead, "b", seen="")
    says(lead, "b", seen="y/7", agreed=id(1))
    assert (lead.standing().agreed, lead.standing().heard) == ((id(1),), False)
    assert lead.standing().guard is None
    says(lead, "b", seen=lead.version)
    assert (lead.standing().heard, lead.standing().guard) == (True, id(1))


def test_what_is_guarded_is_not_told_back() -> None:
    """A keeper knows of a newer one than that which all have made parity of just now."""
    lead = begun(guards=True)
    says(lead, "a", agreed=id(1))
    assert lead.standing().guard == id(1)
    says(lead, "a", guarded=id(1), guarded_by_all=id(2))
    says(lead, "b", guarded=id(1))
    assert lead.standing().guarded == id(2)


def test_a_flush_is_written_by_all() -> None:
    """Each says what has become of its part of this attempt; another's says nothing."""
    lead = begun()
    lead.order(FlushOrder(id(1), "attempt"))
    assert lead.standing().flush == FlushOrder(id(1), "attempt")
    says(lead, "a", written=Written("attempt", (0,), (7,)))
    says(lead, "b", written=Written("other", (1,), (7,)))
    assert lead.written() == {"a": Written("attempt", (0,), (7,))}
    version = lead.version
    says(lead, "b", written=Written("attempt", problem="full"))
    assert lead.written()["b"].problem == "full"
    assert is_newer(lead.version, version)
    end = FlushEnd(id(1), "attempt", 14)
    lead.end(end)
    assert (lead.standing().flush, lead.standing().ended, lead.written()) == (None, end, {})


def test_a_new_attempt_is_written_anew() -> None:
    """What was written for the one before says nothing."""
    lead = begun()
    lead.order(FlushOrder(id(1), "one"))
    says(lead, "a", written=Written("one"))
    lead.order(FlushOrder(id(1), "two"))
    says(lead, "a", written=Written("one"))
    assert lead.written() == {}


def test_what_was_ordered_is_waited_for_across_epochs() -> None:
    """Or whoever has ordered it would wait for ever. Keepers may say that they have let go of
    it."""
    lead = begun()
    lead.order(FlushOrder(id(1), "attempt"))
    says(lead, "a", written=Written("attempt"))
    lead.begin(2, NAMES, guards=False)
    assert lead.standing().flush == FlushOrder(id(1), "attempt")
    assert lead.written() == {}
    says(lead, "b", epoch=2, written=Written("attempt", problem="let go"))
    assert lead.written()["b"].problem == "let go"


def test_what_waits_at_a_keeper_to_be_written_is_agreed_on() -> None:
    """The lead keeper before knew that, and has died; later steps are agreed on by now."""
    lead = begun()
    says(lead, "b", agreed=id(9), wanted=(id(4),))
    assert lead.standing().agreed == (id(4), id(9))
    assert lead.wanted == {id(4)}
    says(lead, "b", wanted=(id(5, epoch=2),))
    assert lead.wanted == {id(4)}
    lead.end(FlushEnd(id(4), "", problem="storage is away", final=False))
    assert lead.wanted == {id(4)}
    lead.end(FlushEnd(id(4), "attempt"))
    assert lead.wanted == frozenset()
    says(lead, "b", wanted=(id(4),))  # it was on its way
    assert lead.wanted == frozenset()


def test_what_waits_is_forgotten_when_an_epoch_begins() -> None:
    """Keepers say what still does."""
    lead = begun()
    says(lead, "b", wanted=(id(4),))
    lead.begin(2, NAMES, guards=False)
    assert lead.wanted == frozenset()
