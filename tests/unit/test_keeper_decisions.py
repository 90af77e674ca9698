"""Decisions of keepers that the simulation does not check: limits, fairness, messages to users.

``tests/simulation/test_keepers.py`` proves which steps a restart finds, and that keepers agree.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest
from support.clock import in_virtual_time

from holdfast.planner.parity import Mode
from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import (
    Enter,
    FlushEnd,
    GenerationEntry,
    Inventory,
    ParityEntry,
    decode,
    encode,
)
from holdfast.storage.keeper.decisions.choice import Choice, DamagedImage, Stock, choices
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.slots import Grant, Reason, Refusal
from holdfast.storage.keeper.decisions.standing import Report, Standing
from holdfast.storage.keeper.decisions.votes import KEPT, Ballot, Outcome, Vote
from holdfast.storage.keeper.reporting import Reporting
from holdfast.storage.training.epochs import Epochs
from holdfast.storage.training.keeper_inventory import (
    GuardOption,
    Tried,
    Unheard,
    awaited,
    kept_in_memory,
    meeting,
)

SIZE = 100
A, B = 1, 2
"""Clients of ranks 0 and 1."""
NAMES = "abcd"
"""Keepers of the ranks 0 to 3."""


def id(step: int, epoch: int = 0) -> GenerationId:
    """Return the id of a step."""
    return GenerationId(epoch, step)


# Slots.


def entered(*clients: int, budget: int = 10_000) -> Generations:
    """Return the slots of a keeper that clients of ranks 0, 1 and so on use."""
    generations = Generations(budget)
    for rank, client in enumerate(clients):
        assert generations.enter(client, rank, 0, None) is None
    return generations


def granted(generations: Generations, client: int, step: int, world: int = 1) -> int:
    """Return the slot granted to a client."""
    grant = generations.fill(client, client - 1, step, SIZE, world)
    assert isinstance(grant, Grant), grant
    if grant.fresh:
        generations.made(grant.slot)
    return grant.slot


def agreed(generations: Generations, step: int) -> int:
    """Return the slot of a step that the only client has captured."""
    slot = granted(generations, A, step)
    generations.captured(slot)
    generations.sealed(slot)
    assert generations.agreed(id(step))
    return slot


def reason(answer: Grant | Refusal | int) -> Reason:
    """Return the reason of a refusal."""
    assert isinstance(answer, Refusal), answer
    return answer.reason


def test_three_slots_are_filled_in_turn() -> None:
    """A rank takes memory for three images; then the oldest step is overwritten."""
    generations = entered(A)
    slots = [agreed(generations, step) for step in range(1, 8)]
    assert len(set(slots)) == 3
    assert slots[:3] == slots[3:6]
    assert [held.generation.step for held in generations.restorable()] == [7, 6, 5]


def test_a_step_that_is_over_gets_no_slot() -> None:
    """A rank captures no step twice, none before its last one, and none that is already void."""
    generations = entered(A)
    agreed(generations, 5)
    assert reason(generations.fill(A, 0, 5, SIZE, 1)) is Reason.OLD_STEP
    assert reason(generations.fill(A, 0, 4, SIZE, 1)) is Reason.OLD_STEP
    generations.void(id(6))
    assert reason(generations.fill(A, 0, 6, SIZE, 1)) is Reason.NO_FREE_SLOT
    granted(generations, A, 7)


def test_too_little_memory_is_refused_with_the_sum() -> None:
    """Before the first step, a keeper checks that three images of each rank fit."""
    generations = entered(A, B, budget=6 * SIZE - 1)
    answer = generations.fill(A, 0, 1, SIZE, 2)
    assert reason(answer) is Reason.NO_MEMORY
    assert isinstance(answer, Refusal)
    assert answer.text.startswith("3 images of 100 B for 2 ranks take 600 B")
    assert generations.slots == set()
    granted(entered(A, B, budget=6 * SIZE), A, 1, 2)


def test_an_image_that_is_handed_over_displaces_older_ones() -> None:
    """Trainers also hand over images that the previous keeper had discarded. Images that may be
    needed stay. If there is no room, nobody waits for the image."""
    generations = entered(A, B, budget=3 * SIZE)
    for step in (1, 2, 3):
        assert isinstance(generations.adopt(A, id(step), 0, 2, SIZE), int)
    assert generations.agreed(id(3))
    assert isinstance(generations.adopt(B, id(3), 1, 2, SIZE), int)
    assert [held.generation.step for held in generations.restorable()] == [3, 2]
    assert isinstance(generations.adopt(B, id(4), 1, 2, SIZE), int)
    assert [held.generation.step for held in generations.restorable()] == [4, 3]
    assert not generations.will_not_come(id(4))
    assert reason(generations.adopt(A, id(4), 0, 2, SIZE)) is Reason.NO_MEMORY
    assert generations.will_not_come(id(4))


def test_no_rank_has_a_third_slot_while_another_has_no_second() -> None:
    """A large image that the job resumed from takes memory until a step is agreed, and no step is
    agreed without an image of every rank."""
    generations = entered(A, budget=6 * SIZE)
    grant = generations.fill(A, 0, 5, 2 * SIZE, 1)
    assert isinstance(grant, Grant)
    generations.made(grant.slot)
    generations.captured(grant.slot)
    generations.sealed(grant.slot)
    assert generations.agreed(id(5))
    generations.client_gone(A)
    for rank, client in enumerate((A, B)):
        assert generations.enter(client, rank, 1, 5) is None
    for step in (6, 7, 8):
        slot = granted(generations, B, step, 2)
        generations.captured(slot)
        generations.sealed(slot)
    for step in (9, 10):
        granted(generations, A, step, 2)
    assert grant.slot in generations.slots
    assert len(generations.slots) == 5


def test_an_offer_outlives_its_trainer_until_the_next_epoch() -> None:
    """The restart may have chosen the step, and recorded that, before the trainer died."""
    generations = entered(A, budget=3 * SIZE)
    for step in (1, 2, 3, 4):
        agreed(generations, step)
        if step == 1:
            generations.offer(B)
            generations.client_gone(B)
    assert [held.generation.step for held in generations.restorable()] == [4, 3, 1]
    generations.client_gone(A)
    assert generations.enter(A, 0, 1, 4) is None
    granted(generations, A, 5, 1)
    assert [held.generation.step for held in generations.restorable()] == [4, 3]


# Votes.


def vote(rank: int, step: int = 7, world: int = 2, plan: str = "plan", **equal: str) -> Vote:
    """Return the vote of one rank."""
    return Vote(id(step), rank, world, plan, equal)


@pytest.mark.parametrize(
    "votes",
    [
        [vote(0), vote(0, plan="other")],
        [vote(0), vote(1, world=3)],
        [vote(0), vote(2)],
        [vote(0), vote(-1)],
    ],
)
def test_votes_that_cannot_be_of_one_job_void_a_generation(votes: list[Vote]) -> None:
    """The order of votes does not matter, and a late vote gets the same outcome."""
    for order in (votes, votes[::-1]):
        ballot = Ballot()
        assert [ballot.cast(one) for one in order][-1] is Outcome.VOID
        assert ballot.cast(vote(1)) is Outcome.VOID


def test_old_generations_without_an_outcome_are_forgotten() -> None:
    """Votes take bounded memory."""
    ballot = Ballot()
    for step in range(KEPT + 1):
        ballot.cast(vote(0, step))
    assert ballot.open == [id(step) for step in range(1, KEPT + 1)]


# The leader.


def hear(lead: Lead, name: str, *steps: int, **news: object) -> None:
    """Report to the leader that a keeper has sealed these steps, and other news."""
    votes = tuple(vote(NAMES.index(name), step) for step in steps)
    lead.hear(Report(name, 0, votes, seen=lead.version, **news))  # type: ignore[arg-type]


def leader(*, heard: bool = True) -> Lead:
    """Return the leader of a protected job, which has heard both keepers."""
    lead = Lead("x").begin(0, NAMES[:2], guards=True)
    for name in NAMES[:2] if heard else ():
        hear(lead, name)
    return lead


def test_one_agreed_step_at_a_time_is_protected() -> None:
    """The next step waits until all keepers know that the previous one is encoded."""
    lead = leader(heard=False)
    hear(lead, "a", agreed=id(1))
    assert lead.standing().guard is None  # the other keeper may know of a newer step
    hear(lead, "b")
    assert lead.standing().guard == id(1)
    lead.void(id(1))
    assert lead.standing().guard is None
    for name in NAMES[:2]:
        hear(lead, name, 2, 3)
    guards = []
    for news in ({"guarded": id(3)}, {"guarded_by_all": id(3)}):
        for name in NAMES[:2]:
            hear(lead, name, 4, **news)
            guards.append((lead.standing().guard, lead.standing().protected))
    assert guards == [(id(3), None), (None, None), (None, None), (id(4), id(3))]


def test_after_each_failure_to_protect_more_steps_are_skipped() -> None:
    """Protected steps take memory that new ones need. A success ends the back-off."""
    lead, tried = leader(), []

    def fail() -> None:
        standing = lead.standing()
        hear(lead, "b", unguarded=standing.guard, attempt=standing.attempt)

    def take(step: int) -> None:
        for name in NAMES[:2]:
            hear(lead, name, step)

    for step in range(1, 151):
        take(step)
        if lead.standing().guard is not None:
            tried.append(step)
            fail()
    assert [b - a for a, b in itertools.pairwise(tried)] == [1, 2, 4, 8, 16, 32, 32, 32]
    while lead.standing().guard is None:
        step += 1
        take(step)
    for news in ({"guarded": id(step)}, {"guarded": id(step), "guarded_by_all": id(step)}):
        for name in NAMES[:2]:
            hear(lead, name, **news)
    assert lead.standing().protected == id(step)
    for after in (1, 2):
        take(step + after)
        assert lead.standing().guard == id(step + after)
        fail()


def test_the_newest_agreed_generation_is_not_forgotten() -> None:
    """The leader remembers a bounded number of outcomes, and says which ones it has forgotten."""
    lead = leader()
    for name in NAMES[:2]:
        hear(lead, name, 1, 2)
    hear(lead, "a", *range(3, 40))
    hear(lead, "b", missing=tuple(map(id, range(3, 40))))
    standing = lead.standing()
    assert standing.agreed == (id(2),)
    assert standing.void == tuple(map(id, range(40 - KEPT, 40)))
    assert standing.settled == id(39 - KEPT)
    hear(lead, "b", missing=(id(2),))
    assert lead.standing() == standing


def test_a_flush_that_has_ended_is_not_wanted_again() -> None:
    """A report that was in flight when the flush ended does not repeat it."""
    lead = leader()
    hear(lead, "b", agreed=id(9), wanted=(id(4),))
    assert lead.wanted == {id(4)}
    lead.end(FlushEnd(id(4), "", problem="storage is away", final=False))
    assert lead.wanted == {id(4)}
    lead.end(FlushEnd(id(4), "attempt"))
    hear(lead, "b", wanted=(id(4),))
    assert lead.wanted == frozenset()


def test_a_new_leader_learns_which_flush_has_ended() -> None:
    """The old leader may have died after it told only some trainers or keepers. The others would
    wait forever. An older end changes nothing."""
    lead = leader()
    hear(lead, "b", wanted=(id(4),))
    end = FlushEnd(id(4), "attempt", 1)
    before = lead.version
    hear(lead, "a", ended=end)
    assert lead.wanted == frozenset()
    assert lead.standing().ended == end
    assert lead.version != before
    for older in (id(3), id(4)):
        hear(lead, "b", ended=FlushEnd(older, "", problem="it was not told"))
    assert lead.standing().ended == end


# A follower.


class Reporter(Reporting):
    """The keeper ``b``, whose reports the test answers."""

    def __init__(self) -> None:
        super().__init__("b", lambda: Report("b", 1), self.follow, self.lost, lambda work: None)
        self.questions: asyncio.Queue[asyncio.Future[Standing]] = asyncio.Queue()
        self.followed: list[str] = []

    async def follow(self, standing: Standing) -> None:
        self.followed.append(standing.version)

    async def lost(self, problem: str) -> None:
        raise AssertionError(problem)

    async def _sent(self, host: KeeperHost, report: Report) -> Standing:
        answer: asyncio.Future[Standing] = asyncio.get_running_loop().create_future()
        self.questions.put_nowait(answer)
        return await answer


HOSTS = (KeeperHost("a", "a", ranks=(0,)), KeeperHost("b", "b", ranks=(1, 2)))


@in_virtual_time
async def test_a_late_answer_of_a_dead_leader_is_ignored() -> None:
    """Its question was sent before the next leader's first answer."""
    keeper = Reporter()
    keeper.enter(1, HOSTS, ())
    first = await keeper.questions.get()  # it waits for news
    await keeper.tell()
    (await keeper.questions.get()).set_result(Standing("y/1", 1))
    await asyncio.sleep(1)
    first.set_result(Standing("x/7", 1))
    (await keeper.questions.get()).set_result(Standing("z/1", 1))
    await keeper.questions.get()
    assert keeper.followed == ["y/1", "z/1"]
    await keeper.close()


# The choice of a restart.


def stock(name: str, *entries: GenerationEntry | ParityEntry) -> Stock:
    """Return the stock of a keeper with these entries."""
    generations = tuple(one for one in entries if isinstance(one, GenerationEntry))
    guards = tuple(one for one in entries if isinstance(one, ParityEntry))
    return Stock(KeeperHost(name, name, name), Inventory(0, generations, guards))


def image(step: int, rank: int, *, epoch: int = 0, agreed: bool = True) -> GenerationEntry:
    """Return the entry of one image of a job of four ranks."""
    return GenerationEntry(id(step, epoch), 4, (rank,), agreed)


def chosen(
    stocks: Iterable[Stock],
    rebuilders: Iterable[str] = NAMES,
    damaged: Iterable[tuple[GenerationId, int, str]] = (),
) -> tuple[list[Choice], list[str]]:
    """Return the choices of a restart that finds step 2 in storage, and the problems."""
    struck = {DamagedImage(*one) for one in damaged}
    return choices(list(stocks), list(rebuilders), lambda one: one.step > 2, struck)


def test_the_newest_agreed_step_with_all_images_comes_first() -> None:
    """A step of a later epoch is newer. One keeper that knows of an agreement is enough. Steps that
    storage also has are left out."""
    images = [(2, 0, True), (3, 0, True), (5, 0, True), (5, 1, True), (6, 1, False)]
    stocks = [
        stock(name, *(image(step, rank, epoch=at, agreed=known) for step, at, known in images))
        for rank, name in enumerate(NAMES)
    ]
    found, problems = chosen(stocks)
    assert [choice.generation for choice in found] == [id(5, 1), id(5), id(3)]
    assert found[0] == Choice(id(5, 1), 4, (("a",), ("b",), ("c",), ("d",)))
    assert problems == []
    stocks.append(stock("e", image(6, 3, epoch=1)))
    assert chosen(stocks)[0][0].holders[3] == ("d", "e")


@pytest.mark.parametrize(("mode", "may_lose"), [("xor", 1), ("copy", 1), ("pq", 2)])
def test_parity_makes_up_for_as_many_hosts_as_it_can(mode: Mode, may_lose: int) -> None:
    """Lost and damaged images are rebuilt on different hosts. The problem names what is lost."""
    names = NAMES[:2] if mode == "copy" else NAMES
    of = GuardedGroup(mode, tuple(names), tuple((rank,) for rank in range(len(names))))
    everyone = [
        stock(name, image(5, rank), *([ParityEntry(id(5), 4, of, rank)] if name in names else []))
        for rank, name in enumerate(NAMES)
    ]
    (choice,), problems = chosen(everyone[may_lose:], NAMES[may_lose:])
    assert problems == []
    lost = list(range(may_lose))
    assert [one.rank for one in choice.rebuilt] == lost
    assert [one.lost for one in choice.rebuilt] == [tuple(lost)] * may_lose
    assert {one.at for one in choice.rebuilt} <= set(NAMES[may_lose:])
    assert len({one.at for one in choice.rebuilt}) == may_lose
    damaged = [(id(5), rank, NAMES[rank]) for rank in range(may_lose)]
    assert [one.rank for one in chosen(everyone, damaged=damaged)[0][0].rebuilt] == lost
    found, problems = chosen(everyone[may_lose + 1 :], NAMES[1:])
    assert found == []
    assert problems[0].startswith("step 5 in memory is lost: ")
    assert chosen(everyone[1:], "")[1] == ["step 5 in memory is lost: no keeper can rebuild images"]


def test_damage_in_two_lanes_is_one_loss_in_each() -> None:
    """Each lane has its own parity."""
    of = GuardedGroup("xor", ("a", "b", "c"), ((0, 1), (2, 3), (4,)))
    stocks = [
        stock(name, GenerationEntry(id(5), 5, ranks, True), ParityEntry(id(5), 5, of, member))
        for member, (name, ranks) in enumerate(zip(of.names, of.ranks, strict=True))
    ]
    (choice,), _ = chosen(stocks, "abc", damaged=[(id(5), 0, "a"), (id(5), 3, "b")])
    assert [(lost.rank, lost.lost) for lost in choice.rebuilt] == [(0, (0,)), (3, (1,))]
    assert chosen(stocks, "abc", damaged=[(id(5), 0, "a"), (id(5), 2, "b")])[0] == []


# The keepers that a restart waits for.


BEGUN = Epochs().with_next(0, None)


def stocks(
    agreed: int, protected: int | None, mode: Mode = "xor", encoding: Collection[str] = ()
) -> dict[str, Stock]:
    """Return the keepers of a job of one rank per host, with their images of steps ``protected``
    and ``agreed``. Those named in ``encoding`` have parity of the latter, too."""
    hosts = tuple(KeeperHost(name, name, f"{name}:1", ranks=(i,)) for i, name in enumerate(NAMES))
    group = GuardedGroup(mode, tuple(NAMES), tuple(host.ranks for host in hosts))
    found = {}
    for member, host in enumerate(hosts):
        steps = sorted({agreed, *([] if protected is None else [protected])})
        guarded = [step for step in steps if step == protected or host.name in encoding]
        inventory = Inventory(
            0,
            tuple(GenerationEntry(GenerationId(0, step), 4, host.ranks, True) for step in steps),
            tuple(ParityEntry(GenerationId(0, step), 4, group, member) for step in guarded),
            hosts,
        )
        found[host.name] = Stock(host, inventory)
    return found


def waits(
    known: dict[str, Stock],
    silent: str = "",
    unreachable: str = "",
    gone: str = "",
    stored: int = 0,
    fails: bool = False,
) -> bool:
    """Return whether a restart waits if these hosts do not answer. ``fails``: its load from the
    other hosts has failed."""
    heard = [stock for name, stock in known.items() if name not in silent + unreachable + gone]
    unheard = [Unheard(known[name].host, True) for name in silent]
    unheard += [Unheard(known[name].host, False) for name in unreachable]
    kept, _ = kept_in_memory(heard, [], len(heard), stored, BEGUN)
    tried = Tried(failed=kept if fails else [])
    kept, _ = kept_in_memory(heard, [], len(heard), stored, BEGUN, tried)
    newest = kept[0].generation.step if kept else stored
    return awaited(heard, unheard, newest, BEGUN, in_memory=bool(kept), tried=tried)


def test_nobody_is_waited_for_if_a_lost_host_can_be_made_up_for() -> None:
    """The usual loss of a host delays nothing, whether its address refuses or drops requests."""
    for known in (stocks(5, 5), stocks(6, 5), stocks(6, 5, encoding="ab")):
        assert not waits(known)
        assert not waits(known, gone="d")
        assert not waits(known, unreachable="d")
    assert not waits(stocks(5, 5), silent="d")
    assert not waits(stocks(5, None), gone="d")
    assert not waits(stocks(5, None), unreachable="d", stored=5)


def test_a_host_that_may_have_the_newest_step_is_waited_for() -> None:
    """A host that accepts connections is not lost. A restart waits for an unreachable one if parity
    of an encoded step cannot replace it, or if memory has no other step."""
    assert waits(stocks(6, 5), silent="d")
    assert waits(stocks(5, 5), unreachable="cd")
    assert waits(stocks(5, None), unreachable="d")
    assert waits(stocks(5, None), silent="d", stored=4)
    assert not waits(stocks(5, 5), unreachable="cd", stored=5)
    assert not waits(stocks(5, 5), silent="d", gone="bc", stored=4)  # it would not help


def test_a_host_that_may_have_more_than_others_know_is_waited_for() -> None:
    """Others may have restarted, with or without their images, or may hold damaged ones."""
    known = stocks(5, 5)
    for name in "abc":
        inventory = known[name].inventory
        known[name] = replace(known[name], inventory=replace(inventory, guards=()))
    assert waits(known, silent="d", gone="c", stored=4)
    for name in "abc":
        inventory = known[name].inventory
        known[name] = replace(known[name], inventory=replace(inventory, generations=()))
    assert waits(known, silent="d", gone="c", stored=4)
    assert waits(stocks(5, 5), silent="d", fails=True)
    assert not waits(stocks(5, 5), fails=True)


def test_a_host_whose_contents_nobody_knows_is_waited_for() -> None:
    """The exception is a run that never had a keeper: it has nothing to lose."""
    own = Unheard(KeeperHost("of rank 0", ""), True)
    fresh = Stock(KeeperHost("new", "new"), Inventory(-1, ()))
    for heard in ([], [fresh]):
        assert awaited(heard, [own], -1, BEGUN, in_memory=False)
        assert not awaited(heard, [own], -1, Epochs(), in_memory=False)
    assert not awaited([fresh], [], -1, BEGUN, in_memory=False)


def test_a_host_that_may_have_what_the_newest_epoch_began_from_is_waited_for() -> None:
    """Before a step of that epoch is agreed, only the host that held it may know of it."""
    resumed = Epochs(((1, 5),))
    known = stocks(4, None)["a"]
    heard = [replace(known, inventory=replace(known.inventory, epoch=1))]
    silent = [Unheard(KeeperHost("d", "d"), True)]
    assert awaited(heard, silent, 4, resumed, in_memory=True)
    assert not awaited(heard, silent, 5, resumed, in_memory=False)
    assert not awaited(heard, silent, 4, resumed, in_memory=True, allows=lambda step: step < 5)


# Size.


@pytest.mark.timeout(60)
def test_two_thousand_hosts_choose_and_agree_within_seconds() -> None:
    """No decision compares all pairs of hosts. Rebuilds are spread over the hosts."""
    count, ranks, lost = 2000, 8, 50
    world = count * ranks
    hosts = [
        KeeperHost(
            f"k{at}", f"node{at}", f"node{at}:1", ranks=tuple(range(at * ranks, (at + 1) * ranks))
        )
        for at in range(count)
    ]
    met = meeting([Stock(host, Inventory(0, ())) for host in hosts], world, GuardOption("pq"))
    assert decode(encode(1, Enter(1, 5, met.hosts, met.groups))) == (
        1,
        Enter(1, 5, met.hosts, met.groups),
    )
    of_name = {name: group for group in met.groups for name in group.names}
    stocks = []
    for at, host in enumerate(hosts):
        held = GenerationEntry(id(5), world, host.ranks, agreed=True)
        group = of_name[host.name]
        parity = ParityEntry(id(5), world, group, group.names.index(host.name))
        if at % (count // lost):
            stocks.append(Stock(host, Inventory(0, (held,), (parity,), met.hosts)))
    (choice,), problems = kept_in_memory(stocks, [], world, -1, Epochs())
    assert (choice.generation, problems) == (id(5), [])
    assert len(choice.rebuilt) == lost * ranks
    assert len({one.at for one in choice.rebuilt}) == lost * ranks

    names = [host.name for host in hosts]
    lead = Lead("first").begin(0, names, guards=True)
    for host in hosts:
        votes = tuple(Vote(id(1), rank, world, "plan", {}) for rank in host.ranks)
        lead.hear(Report(host.name, 0, votes, seen=lead.version))
    for _ in range(2):
        for name in names:
            report = Report(name, 0, (), guarded=id(1), guarded_by_all=lead.standing().guarded)
            lead.hear(replace(report, seen=lead.version))
    assert lead.standing().protected == id(1)
    assert lead.standing().agreed == (id(1),)
