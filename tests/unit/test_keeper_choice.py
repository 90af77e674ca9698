"""What a restart can go on from, by what all keepers that can be reached hold."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.planner.parity import Mode
from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import GenerationEntry, Inventory, ParityEntry
from holdfast.storage.keeper.decisions.choice import Choice, Stock, choices

NAMES = "abcd"
"""Hosts, of which each had one rank when the images were captured."""


def id(step: int, epoch: int = 0) -> GenerationId:
    """Of a step."""
    return GenerationId(epoch, step)


def group(mode: Mode = "xor", names: str = NAMES) -> GuardedGroup:
    """Hosts that guard each other."""
    return GuardedGroup(mode, tuple(names), tuple((NAMES.index(name),) for name in names))


def held(step: int, *ranks: int, epoch: int = 0, world: int = 4, agreed: bool = True) -> object:
    """Images."""
    return GenerationEntry(id(step, epoch), world, ranks, agreed)


def guard(name: str, step: int, of: GuardedGroup | None = None) -> object:
    """The parity that a host has."""
    of = of or group()
    return ParityEntry(id(step), 4, of, of.names.index(name))


def stock(name: str, *what: object) -> Stock:
    """What the keeper of a host has."""
    generations = tuple(one for one in what if isinstance(one, GenerationEntry))
    guards = tuple(one for one in what if isinstance(one, ParityEntry))
    return Stock(KeeperHost(name, name, name), Inventory(0, generations, guards))


def chosen(
    stocks: Iterable[Stock],
    rebuilders: Iterable[str] = NAMES,
    damaged: Iterable[tuple[GenerationId, int, str]] = (),
    newer_than: int = 0,
) -> tuple[list[Choice], list[str]]:
    """The choices, and what is wrong with those that are better."""
    return choices(list(stocks), list(rebuilders), lambda one: one.step > newer_than, set(damaged))


def all_hold(*steps: int, agreed: bool = True) -> list[Stock]:
    """Each host has its own image of each step."""
    return [
        stock(name, *(held(step, rank, agreed=agreed) for step in steps))
        for rank, name in enumerate(NAMES)
    ]


def test_the_newest_step_of_which_all_images_are_there_comes_first() -> None:
    """Those before follow. Each image is where it was captured."""
    found, problems = chosen(all_hold(3, 5))
    assert [choice.generation for choice in found] == [id(5), id(3)]
    assert found[0] == Choice(id(5), 4, (("a",), ("b",), ("c",), ("d",)))
    assert problems == []


def test_of_two_lines_that_come_by_a_step_the_later_one_is_better() -> None:
    """An epoch that a resume has begun is after the one before."""
    stocks = [stock(name, held(5, i), held(5, i, epoch=1)) for i, name in enumerate(NAMES)]
    assert [choice.generation for choice in chosen(stocks)[0]] == [id(5, 1), id(5, 0)]


def test_one_keeper_that_knows_that_a_step_is_agreed_on_is_enough() -> None:
    """The others were not told before the job ended. What nobody knows to be agreed on is not gone
    on from."""
    stocks = all_hold(5, agreed=False)
    assert chosen(stocks) == ([], [])
    knows = stock("b", held(5, 1))
    assert [choice.generation for choice in chosen([stocks[0], knows, *stocks[2:]])[0]] == [id(5)]


def test_what_is_of_no_use_is_not_offered() -> None:
    """Storage has something newer."""
    assert [choice.generation for choice in chosen(all_hold(3, 5), newer_than=3)[0]] == [id(5)]


def test_images_of_another_size_of_the_job_are_not_mixed() -> None:
    """A step of four ranks, and one of two with the same number, are two things."""
    odd = stock("d", held(5, 1, world=2))
    found, (problem,) = chosen([*all_hold(5)[:3], odd])
    assert found == []
    assert problem.startswith("step 5 in memory is lost: the image of rank ")


@pytest.mark.parametrize(("mode", "may_lose"), [("xor", 1), ("copy", 1), ("pq", 2)])
def test_lost_hosts_are_made_up_for_by_parity(mode: Mode, may_lose: int) -> None:
    """As many of a group as its parity makes good; those that make images again share the work."""
    of = group(mode, "ab" if mode == "copy" else NAMES)
    everyone = [
        stock(name, held(5, rank), *([guard(name, 5, of)] if name in of.names else []))
        for rank, name in enumerate(NAMES)
    ]
    left = everyone[may_lose:]
    names = NAMES[may_lose:]
    (choice,), problems = chosen(left, names)
    assert problems == []
    assert [lost.rank for lost in choice.rebuilt] == list(range(may_lose))
    assert [lost.lost for lost in choice.rebuilt] == [tuple(range(may_lose))] * may_lose
    assert len({lost.at for lost in choice.rebuilt}) == may_lose
    for lost in choice.rebuilt:
        assert lost.at in names
        assert choice.holders[lost.rank] == (lost.at,)
    found, problems = chosen(everyone[may_lose + 1 :], names[1:])
    assert found == []
    assert problems[0].startswith("step 5 in memory is lost: ")


def test_a_member_without_its_parity_is_as_good_as_lost() -> None:
    """What it has of parity is wanted to make up for another one."""
    stocks = [stock(name, held(5, rank), guard(name, 5)) for rank, name in enumerate(NAMES)]
    without = stock("d", held(5, 3))
    assert chosen([*stocks[1:3], without], "bcd")[0] == []
    (choice,), _ = chosen([*stocks[1:]], "bcd")
    assert [lost.rank for lost in choice.rebuilt] == [0]


def test_an_image_that_was_struck_out_is_made_again() -> None:
    """It is damaged there, and nowhere else."""
    stocks = [stock(name, held(5, rank), guard(name, 5)) for rank, name in enumerate(NAMES)]
    (choice,), _ = chosen(stocks, damaged=[(id(5), 2, "c")])
    assert [lost.rank for lost in choice.rebuilt] == [2]
    found, _ = chosen(stocks, damaged=[(id(5), 2, "c"), (id(5), 3, "d")])
    assert found == []


def test_damage_in_two_lanes_is_one_loss_in_each() -> None:
    """Each lane has parity of its own. In one lane, two are too many."""
    of = GuardedGroup("xor", ("a", "b", "c"), ((0, 1), (2, 3), (4,)))
    stocks = [
        stock(name, held(5, *ranks, world=5), ParityEntry(id(5), 5, of, member))
        for member, (name, ranks) in enumerate(zip(of.names, of.ranks, strict=True))
    ]
    (choice,), _ = chosen(stocks, "abc", damaged=[(id(5), 0, "a"), (id(5), 3, "b")])
    assert [(lost.rank, lost.lost) for lost in choice.rebuilt] == [(0, (0,)), (3, (1,))]
    for struck in ([0, 2], [1, 3], [2, 4]):
        holders = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
        found, _ = chosen(stocks, "abc", damaged=[(id(5), rank, holders[rank]) for rank in struck])
        assert found == []


def test_the_step_that_was_protected_before_follows_where_the_newest_is_lost() -> None:
    """With what is wrong with that one."""
    stocks = [
        stock(name, held(7, rank), held(5, rank), guard(name, 5)) for rank, name in enumerate(NAMES)
    ]
    (choice,), problems = chosen(stocks[1:], "bcd")
    assert choice.generation == id(5)
    assert problems == [
        "step 7 in memory is lost: the image of rank 0 is lost, and no keeper has parity of it"
    ]


def test_nothing_is_made_again_where_no_keeper_of_the_job_can() -> None:
    """Those of others are only asked."""
    stocks = [stock(name, held(5, rank), guard(name, 5)) for rank, name in enumerate(NAMES)]
    found, problems = chosen(stocks[1:], "")
    assert found == []
    assert problems == ["step 5 in memory is lost: no keeper can rebuild images"]


def test_images_that_several_keepers_have_can_be_had_from_each() -> None:
    """One was made again, and its host has come back."""
    stocks = [*all_hold(5), stock("e", held(5, 3))]
    (choice,), _ = chosen(stocks, [*NAMES, "e"])
    assert choice.holders[3] == ("d", "e")
    assert choice.rebuilt == ()
