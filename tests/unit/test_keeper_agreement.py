"""What a keeper makes of how things stand among the keepers of its job."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from support.clock import in_virtual_time

from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.messages import Agreed, Event, Protected, Voided
from holdfast.storage.keeper.agreement import Agreement
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Grant
from holdfast.storage.keeper.decisions.standing import FlushEnd, FlushOrder, Standing
from holdfast.storage.keeper.status import Counters

HOSTS = (KeeperHost("a", "a", "a", ranks=(0,)), KeeperHost("b", "b", "b", ranks=(1,)))
GROUPS = (GuardedGroup("copy", ("a", "b"), ((0,), (1,))),)
CLIENT = 7
VOID = "the images of the ranks do not match, or a rank has none"


class Parity:
    """The guards of a keeper; parity is there when a test says so."""

    unguarded: GenerationId | None = None
    made: list[GenerationId]
    held: set[GenerationId]

    def __init__(self) -> None:
        self.made = []
        self.held = set()

    @property
    def guarded(self) -> GenerationId | None:
        return max(self.held, default=None)

    def make(self, id: GenerationId, *others: object) -> None:
        self.made.append(id)

    def keep(self, *ids: object) -> None:
        pass

    def stop(self) -> None:
        pass

    def drop_later(self, chosen: int | None) -> None:
        pass

    def holds(self, id: GenerationId) -> bool:
        return id in self.held


class Host:
    """The keeper ``b`` of rank 1, which is not the lead keeper, and hears nothing but what a test
    says."""

    def __init__(self) -> None:
        self.generations = Generations(10_000)
        self.guards = Parity()
        self.told: list[Event] = []
        self.agreement = Agreement(
            "b",
            self,  # type: ignore[arg-type]
            self.guards,  # type: ignore[arg-type]
            Counters(),
            self.tell,
            self.later,
            "",
        )
        self.version = 0

    async def tell(self, event: Event) -> None:
        self.told.append(event)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    def enter(self, epoch: int, chosen: int | None) -> None:
        """The trainer of rank 1 goes on."""
        self.generations.enter(CLIENT, 1, epoch, chosen)
        self.agreement.reporting._stop()
        self.agreement.enter(epoch, chosen, HOSTS, GROUPS)
        self.agreement.reporting._stop()

    def seal(self, *steps: int) -> None:
        """It keeps these steps."""
        for step in steps:
            grant = self.generations.fill(CLIENT, 1, step, 10, 2)
            assert isinstance(grant, Grant), grant
            if grant.fresh:
                self.generations.made(grant.slot)
            self.generations.captured(grant.slot)
            self.generations.sealed(grant.slot)

    def held(self) -> set[GenerationId]:
        """What is there."""
        return {one.generation for one in self.generations.restorable()}

    async def hear(self, lead: str, epoch: int, **how: Any) -> None:
        """How things stand, as that lead keeper says."""
        self.version += 1
        standing = Standing(f"{lead}/{self.version}", epoch)
        await self.agreement.follow(replace(standing, **how))


def id(step: int, epoch: int = 0) -> GenerationId:
    """Of a step."""
    return GenerationId(epoch, step)


@in_virtual_time
async def test_a_keeper_makes_use_of_how_things_stand() -> None:
    """It tells what is agreed on, void and guarded, each once."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2)
    for _ in range(2):
        await host.hear("x", 0, agreed=(id(1),), void=(id(2),), guard=id(1))
        await host.hear("x", 0, agreed=(id(1),), void=(id(2),), guarded=id(1), protected=id(1))
    assert [type(event) for event in host.told] == [Voided, Agreed, Protected]
    assert host.held() == {id(1)}
    assert host.guards.made == [id(1), id(1)]


def works_on(host: Host, *steps: int, epoch: int) -> None:
    """It keeps what it can of further steps."""
    for step in steps:
        grant = host.generations.fill(CLIENT, 1, step, 10, 2)
        if isinstance(grant, Grant):
            host.generations.captured(grant.slot)
            host.generations.sealed(grant.slot)


@in_virtual_time
async def test_what_another_keeper_was_told_is_guarded_is_kept_in_the_next_epoch() -> None:
    """That one has let go of what was guarded before."""
    host = Host()
    host.enter(0, None)
    host.seal(1)
    await host.hear("x", 0, agreed=(id(1),), guarded=id(1), protected=id(1), heard=True)
    host.seal(2)
    await host.hear(
        "x", 0, agreed=(id(2),), guard=id(2), guarded=id(1), protected=id(1), heard=True
    )
    host.guards.held = {id(2)}
    host.enter(1, 2)
    works_on(host, 3, 4, 5, epoch=1)
    await host.hear("x", 1)
    works_on(host, 6, 7, 8, epoch=1)
    assert {id(1), id(2)} <= host.held()
    assert host.agreement.report().guarded_by_all == id(1)
    await host.hear("x", 1, guarded=id(2), heard=True)
    assert host.agreement.report().guarded_by_all == id(2)
    works_on(host, 9, 10, epoch=1)
    assert {id(1), id(2)} <= host.held()
    await host.hear("x", 1, guarded=id(2), protected=id(2), heard=True)
    assert host.agreement.report().guarded_by_all == id(2)
    assert not [event for event in host.told if event == Protected(id(2))]
    works_on(host, 11, 12, epoch=1)
    assert id(1) not in host.held()


@in_virtual_time
async def test_what_is_guarded_is_protected_once_all_keepers_know() -> None:
    """Until then what was protected before is kept beside it, and nobody is told: this keeper may be
    the only one left that knows of either."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2)
    await host.hear("x", 0, agreed=(id(1), id(2)), guarded=id(1), protected=id(1))
    await host.hear("x", 0, agreed=(id(2),), guarded=id(2), protected=id(1))
    assert (host.agreement.report().guarded_by_all, host.agreement.protected) == (id(2), id(1))
    works_on(host, 3, 4, epoch=0)
    assert host.held() == {id(1), id(2), id(3)}
    assert [event for event in host.told if isinstance(event, Protected)] == [Protected(id(1))]
    await host.hear("x", 0, agreed=(id(3),), guarded=id(2), protected=id(2))
    assert host.agreement.protected == id(2)
    assert host.told[-1] == Protected(id(2))
    works_on(host, 5, epoch=0)
    assert host.held() == {id(2), id(3), id(5)}


@in_virtual_time
async def test_a_resume_goes_back_to_what_was_protected_before() -> None:
    """Where it drops what has taken that one's place while it chose: the parity was kept for it."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2)
    await host.hear("x", 0, agreed=(id(1), id(2)), guarded=id(1), protected=id(1))
    host.guards.held = {id(1)}
    await host.hear("x", 0, agreed=(id(2),), guarded=id(2), protected=id(2))
    host.enter(1, 1)
    assert (host.agreement.report().guarded_by_all, host.agreement.protected) == (id(1), id(1))


@in_virtual_time
async def test_what_another_keeper_was_told_is_guarded_is_kept_with_the_next_lead_keeper() -> None:
    """Until that one has heard what each was told."""
    host = Host()
    host.enter(0, None)
    host.seal(1)
    await host.hear("x", 0, agreed=(id(1),), guarded=id(1), protected=id(1), heard=True)
    host.seal(2, 3)
    await host.hear(
        "x", 0, agreed=(id(2),), guard=id(2), guarded=id(1), protected=id(1), heard=True
    )
    await host.hear("y", 0, agreed=(id(3),))
    works_on(host, 4, 5, epoch=0)
    assert host.held() == {id(1), id(2), id(3)}
    await host.hear("y", 0, agreed=(id(3),), guarded=id(1), heard=True)
    works_on(host, 6, epoch=0)
    assert host.held() == {id(1), id(3), id(6)}


@in_virtual_time
async def test_a_keeper_that_has_missed_outcomes_gives_up_what_has_none_any_more() -> None:
    """The lead keeper does not remember them. Kept for ever, they would leave no slot."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2, 3)
    works_on(host, 4, epoch=0)
    assert host.held() == {id(1), id(2), id(3)}
    await host.hear("x", 0, agreed=(id(1),), open=(id(2),), void=(id(40),), settled=id(3))
    assert host.held() == {id(1), id(2)}
    assert host.told == [Voided(id(40), VOID), Voided(id(3), VOID), Agreed(id(1))]
    works_on(host, 41, epoch=0)
    assert id(41) in host.held()


def label_of(step: int, rank: int = 1, world: int = 2) -> Label:
    """Of the image of a rank."""
    return Label("run", id(step), rank, world, 10, 0, 1, 1, 0.0)


OTHER = 8
"""The trainer of rank 2."""
TWO_RANKS = (HOSTS[0], KeeperHost("b", "b", "b", ranks=(1, 2)))


@in_virtual_time
async def test_a_step_of_which_a_rank_here_has_nothing_is_void_though_nobody_else_hears_of_it() -> (
    None
):
    """Votes are told once all ranks of a keeper have voted. Where on each host one of them had no
    memory, no keeper said anything, and trainers waited."""
    host = Host()
    host.generations.enter(CLIENT, 1, 0, None)
    host.generations.enter(OTHER, 2, 0, None)
    host.agreement.enter(0, None, TWO_RANKS, ())
    host.agreement.reporting._stop()
    work: list[Coroutine[Any, Any, None]] = []
    host.agreement._run_later = work.append
    host.seal(1)
    await host.agreement.vote(label_of(1, world=3))
    host.agreement.look_for_missing()
    assert (host.told, work) == ([], [])  # rank 2 may still have it

    grant = host.generations.fill(OTHER, 2, 1, 10, 3)
    assert isinstance(grant, Grant)
    host.generations.unmade(grant.slot)
    host.agreement.look_for_missing()
    for each in work:
        await each
    assert host.told == [Voided(id(1), VOID)]
    assert host.held() == set()
    await host.agreement.vote(label_of(1, world=3))
    assert host.told == [Voided(id(1), VOID)] * 2  # to whoever has sealed it only now


@in_virtual_time
async def test_what_the_keeper_before_had_is_not_void_because_some_of_it_is_still_to_come() -> None:
    """All keepers may have agreed on it. Ranks hand over what they have one after the other."""
    host = Host()
    host.generations.enter(CLIENT, 1, 0, None)
    host.generations.enter(OTHER, 2, 0, None)
    host.agreement.enter(0, None, TWO_RANKS, ())
    host.agreement.reporting._stop()
    for step in (1, 2):
        host.generations.adopt(CLIENT, id(step), 1, 3, 10)
    host.generations.adopt(OTHER, id(2), 2, 3, 10)
    await host.agreement.vote(label_of(1, world=3), handed_over=True)
    assert host.told == []
    host.generations.adopt(OTHER, id(1), 2, 3, 10)
    await host.agreement.vote(label_of(1, 2, world=3), handed_over=True)
    assert len(host.agreement.report().votes) == 2


@in_virtual_time
async def test_a_vote_of_a_former_epoch_voids_nothing() -> None:
    """It comes late, and the resume has gone on from what it is for."""
    host = Host()
    host.enter(0, None)
    host.seal(1)
    await host.hear("x", 0, agreed=(id(1),))
    host.enter(1, 1)
    host.told.clear()
    await host.agreement.vote(label_of(1, rank=2, world=3))
    assert host.told == []
    assert host.held() == {id(1)}
    assert host.agreement.report().votes == ()


@in_virtual_time
async def test_whoever_waits_for_a_step_that_went_by_is_told_when_it_is_forgotten() -> None:
    """The lead keeper has never said anything about it."""
    host = Host()
    host.enter(0, None)
    for step in range(1, 40):
        await host.agreement.vote(label_of(step))
    assert host.told[0] == Voided(id(1), "later steps have overwritten some of its images")


@in_virtual_time
async def test_an_image_that_comes_late_takes_the_outcome_that_is_known() -> None:
    """A trainer has handed it over, or has sealed it, when the others had agreed on it, or had let
    go of it, long before."""
    host = Host()
    host.enter(0, None)
    await host.hear("x", 0, agreed=(id(1),), void=(id(3),))
    host.generations.adopt(CLIENT, id(1), 1, 2, 10)
    host.generations.adopt(CLIENT, id(3), 1, 2, 10)
    assert host.generations.newest_agreed is None
    for step in (1, 3):
        await host.agreement.vote(label_of(step))
    assert host.generations.newest_agreed == id(1)
    assert host.held() == {id(1)}
    assert host.agreement.report().votes == ()
    assert host.told[-1] == Voided(id(3), VOID)  # again: its trainer may not have listened before


@in_virtual_time
async def test_an_image_whose_outcome_is_long_forgotten_is_void() -> None:
    """Its trainer was told when it was not yet listening, and waits."""
    host = Host()
    host.enter(0, None)
    grant = host.generations.fill(CLIENT, 1, 1, 10, 2)
    assert isinstance(grant, Grant)
    host.generations.made(grant.slot)
    await host.hear("x", 0, void=(id(1),))
    await host.hear("x", 0, agreed=(id(30),), settled=id(29))
    host.generations.captured(grant.slot)
    host.generations.sealed(grant.slot)
    await host.agreement.vote(label_of(1))
    host.told.clear()
    await host.hear("x", 0, agreed=(id(30),), settled=id(29))
    assert host.told == [Voided(id(1), VOID)]
    assert host.agreement.report().votes == ()


@in_virtual_time
async def test_nobody_waits_for_a_lead_keeper_that_is_not_heard() -> None:
    """Trainers are told that nothing is known of their steps; these are kept all the same, and may
    yet be agreed on."""
    host = Host()
    host.enter(0, None)
    host.seal(1)
    await host.agreement.vote(label_of(1))
    await host.agreement._unheard("the lead keeper has stopped answering")
    assert host.told == [Voided(id(1), "the lead keeper has stopped answering")]
    assert host.held() == {id(1)}
    await host.hear("x", 0, agreed=(id(1),))
    assert host.told[-1] == Agreed(id(1))


@in_virtual_time
async def test_what_is_protected_is_not_void_when_something_newer_is_guarded() -> None:
    """The lead keeper has forgotten that it was agreed on, and this keeper was never told."""
    host = Host()
    host.enter(0, None)
    host.seal(1)
    await host.hear("x", 0, guarded=id(20), protected=id(1), settled=id(10))
    assert host.held() == {id(1)}


@in_virtual_time
async def test_what_is_guarded_is_agreed_on_though_nothing_else_says_so() -> None:
    """Its outcome was forgotten while parity of it was made."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2)
    await host.hear("x", 0, guard=id(1), agreed=(id(30),), settled=id(29))
    assert host.held() == {id(1)}
    assert host.told == [Voided(id(2), VOID), Agreed(id(1)), *host.told[2:]]


@in_virtual_time
async def test_what_is_guarded_goes_by_a_resume_from_before_it() -> None:
    """Nobody is told of it then."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2)
    await host.hear("x", 0, agreed=(id(2),), guarded=id(2), heard=True)
    host.enter(1, 1)
    assert host.agreement.report().guarded_by_all is None


@in_virtual_time
async def test_what_was_agreed_on_is_not_void_because_a_new_lead_keeper_has_lost_it() -> None:
    """Its keeper has nothing of it, and does not know better. It may be what is guarded."""
    host = Host()
    host.enter(0, None)
    host.seal(1, 2)
    await host.hear("x", 0, agreed=(id(1), id(2)))
    await host.hear("x", 0, agreed=(id(1), id(2)), guarded=id(1))
    await host.hear("y", 0, agreed=(id(2),))
    await host.hear("y", 0, agreed=(id(2),), void=(id(1),))
    assert id(1) in host.held()
    assert not any(isinstance(event, Voided) for event in host.told)


@in_virtual_time
async def test_parity_of_something_newer_does_not_hide_that_of_what_is_asked_for() -> None:
    """A lead keeper has had all make parity of step 2, and has died; the next one asks for that of
    step 1, of which it has heard. Told of step 2 alone, it waited for ever."""
    host = Host()
    host.enter(0, None)
    host.guards.held = {id(1), id(2)}
    await host.hear("one", 0, guard=id(2), attempt="one/1")
    assert host.agreement.report().guarded == id(2)
    await host.hear("other", 0, guard=id(1), attempt="other/1")
    assert host.agreement.report().guarded == id(1)
    assert host.agreement.report().attempt == "other/1"


@in_virtual_time
async def test_what_is_being_flushed_is_agreed_on_however_old_it_is() -> None:
    """A keeper that has taken the place of another is handed an image whose outcome the lead keeper
    has forgotten, as later ones are known; it was void, and the checkpoint never came to storage."""
    flush = FlushOrder(id(1), "attempt")
    failed = FlushEnd(id(1), "attempt", problem="storage is away", final=False)
    for in_flight in ({"flush": flush}, {"ended": failed}):
        host = Host()
        host.enter(0, None)
        host.seal(1)
        await host.agreement.vote(label_of(1), handed_over=True)
        await host.hear("x", 0, agreed=(id(30),), settled=id(29), **in_flight)
        assert Agreed(id(1)) in host.told
        assert host.held() == {id(1)}
    host = Host()
    host.enter(0, None)
    host.seal(1)
    await host.agreement.vote(label_of(1), handed_over=True)
    ended = FlushEnd(id(1), "attempt", problem="nobody has it any more")
    await host.hear("x", 0, agreed=(id(30),), settled=id(29), ended=ended)
    assert host.told[0] == Voided(id(1), VOID)
