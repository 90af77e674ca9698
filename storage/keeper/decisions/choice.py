"""Chooses the generation to resume from, given the inventories of all reachable keepers. Pure.

A generation is usable if the image of every rank is available: held by a keeper, or recoverable
from the parity of a group that has lost no more members than its mode tolerates.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....planner.parity import parity_of
from ...arenas.hosts import GuardedGroup, KeeperHost
from ...arenas.label import GenerationId
from ...arenas.messages import Inventory, ParityEntry


@dataclass(frozen=True, slots=True)
class Stock:
    """A keeper and its inventory."""

    host: KeeperHost
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class Lost:
    """An image to be rebuilt by the keeper ``at``, from the members of ``group`` that are not in
    ``lost``."""

    rank: int
    at: str
    group: GuardedGroup
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DamagedImage:
    """The image of ``rank`` on the keeper ``name`` is damaged or unreachable."""

    generation: GenerationId
    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A generation to resume from. ``holders``: for each rank, the names of the keepers that hold
    its image, or will hold it after the rebuild."""

    generation: GenerationId
    world: int
    holders: tuple[tuple[str, ...], ...]
    rebuilt: tuple[Lost, ...] = ()


def choices(
    stocks: Sequence[Stock],
    rebuilders: Sequence[str],
    is_of_use: Callable[[GenerationId], bool],
    damaged: Collection[DamagedImage] = (),
) -> tuple[list[Choice], list[str]]:
    """Return the usable generations, best first, and the reasons why newer ones are not usable.

    ``rebuilders``: names of keepers that may rebuild images; one whose own copy is damaged does so
    only if no other can. ``is_of_use``: whether a generation is worth considering. ``damaged``:
    images that do not count.
    """
    worlds: dict[GenerationId, int] = {}
    for stock in stocks:
        for held in stock.inventory.generations:
            if held.agreed:
                worlds[held.generation] = held.world
        for guard in stock.inventory.guards:
            worlds[guard.generation] = guard.world
    found: list[Choice] = []
    problems: list[str] = []
    for generation in sorted(worlds, key=lambda id: (id.step, id.epoch), reverse=True):
        if not is_of_use(generation):
            continue
        outcome = _choice(generation, worlds[generation], stocks, rebuilders, damaged)
        if isinstance(outcome, Choice):
            found.append(outcome)
        elif not found:
            problems.append(f"step {generation.step} in memory is lost: {outcome}")
    return found, problems


def _choice(
    generation: GenerationId,
    world: int,
    stocks: Sequence[Stock],
    rebuilders: Sequence[str],
    damaged: Collection[DamagedImage],
) -> Choice | str:
    holders: list[list[str]] = [[] for _ in range(world)]
    for stock in stocks:
        for held in stock.inventory.generations:
            if held.generation == generation and held.world == world:
                for rank in held.ranks:
                    if DamagedImage(generation, rank, stock.host.name) not in damaged:
                        holders[rank].append(stock.host.name)
    missing = [rank for rank in range(world) if not holders[rank]]
    guards = {
        stock.host.name: guard
        for stock in stocks
        for guard in stock.inventory.guards
        if guard.generation == generation
    }
    order = {name: number for number, name in enumerate(rebuilders)}
    load = Counter(name for names in holders for name in names if name in order)
    groups = _groups_by_rank(guards.values()) if missing else {}
    rebuilt: list[Lost] = []
    for rank in missing:
        outcome = _rebuilt(rank, groups.get(rank, ()), holders, guards)
        if isinstance(outcome, str):
            return outcome
        if not rebuilders:
            return "no keeper can rebuild images"
        bad = {one.name for one in damaged if (one.generation, one.rank) == (generation, rank)}
        intact = [name for name in rebuilders if name not in bad]
        at = min(intact or rebuilders, key=lambda name: (load[name], order[name]))
        load[at] += 1
        rebuilt.append(Lost(rank, at, *outcome))
    for lost in rebuilt:
        holders[lost.rank] = [lost.at]
    return Choice(generation, world, tuple(tuple(names) for names in holders), tuple(rebuilt))


def _groups_by_rank(guards: Iterable[ParityEntry]) -> dict[int, list[GuardedGroup]]:
    """Return the groups with parity of each rank's image."""
    found: dict[int, list[GuardedGroup]] = {}
    for group in dict.fromkeys(guard.group for guard in guards):
        for rank in itertools.chain(*group.ranks):
            found.setdefault(rank, []).append(group)
    return found


def _rebuilt(
    rank: int,
    groups: Sequence[GuardedGroup],
    holders: Sequence[Sequence[str]],
    guards: Mapping[str, ParityEntry],
) -> tuple[GuardedGroup, tuple[int, ...]] | str:
    """Return which of ``groups`` can rebuild an image, and its lost members in the lane of that
    image (lanes are independent); otherwise the reason why none can."""
    problem = f"the image of rank {rank} is lost, and no keeper has parity of it"
    for group in groups:
        number = group.ranks[group.member_of(rank)].index(rank)
        lost = tuple(
            member
            for member, name in enumerate(group.names)
            if name not in guards
            or any(name not in holders[of] for of in group.ranks[member][number : number + 1])
        )
        if len(lost) <= parity_of(group.mode):
            return group, lost
        problem = (
            f"{len(lost)} of {len(group.names)} hosts of a group are lost, and {group.mode} "
            f"tolerates {parity_of(group.mode)}"
        )
    return problem
