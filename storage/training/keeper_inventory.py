"""Agreement on keepers before a job begins: which exist, what can be resumed, how they are
protected. Each rank states what its own keeper holds. The leader asks keepers of the previous job
that no rank owns now, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ...errors import UsageError
from ...planner.parity import GROUP_HOSTS, HostDomain, Mode, protection
from ..arenas.hosts import GuardedGroup, KeeperHost
from ..arenas.label import GenerationId
from ..arenas.messages import GenerationEntry, Inventory, ParityEntry
from ..keeper.decisions.choice import Choice, DamagedImage, Stock, choices
from ..keeper.reading import Unheard, stock_of
from .epochs import Epochs

NOTHING = Inventory(-1, ())
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuardOption:
    """The protection of images between hosts: see :func:`~holdfast.planner.parity.protection`.
    ``certificate``: a PEM file of the authorities trusted for keepers of other hosts; "" without
    TLS."""

    mode: str = "auto"
    group: int = GROUP_HOSTS
    certificate: str = ""


@dataclass(frozen=True, slots=True)
class InMemory:
    """What a rank's keeper holds. ``host``: None without one. ``damaged``: damaged images.
    ``silent``: the name of a keeper that listens but does not answer, perhaps a placeholder."""

    inventory: Inventory = NOTHING
    host: KeeperHost | None = None
    damaged: tuple[DamagedImage, ...] = ()
    silent: str = ""


@dataclass(frozen=True, slots=True)
class Tried:
    """What attempts to load from memory have found: images that are ``damaged``, and choices that
    have ``failed``."""

    damaged: Collection[DamagedImage] = ()
    failed: Collection[Choice] = ()


NOTHING_TRIED = Tried()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The keepers of a job that work together, with their ranks; empty with a ``problem``.
    ``temporary``: the problem may be solved by keepers that answer later."""

    hosts: tuple[KeeperHost, ...] = ()
    groups: tuple[GuardedGroup, ...] = ()
    problem: str = ""
    temporary: bool = False


def stocks_of(statements: Sequence[InMemory]) -> list[Stock]:
    """Return the keepers of all ranks, each once, with its ranks."""
    found: dict[str, Stock] = {}
    for rank, statement in enumerate(statements):
        host = statement.host
        if host is None:
            continue
        known = found.get(host.name)
        ranks = (rank,) if known is None else (*known.host.ranks, rank)
        found[host.name] = Stock(replace(host, ranks=ranks), statement.inventory)
    return list(found.values())


async def asked(
    statements: Sequence[InMemory], option: GuardOption
) -> tuple[list[Stock], list[Unheard]]:
    """Ask keepers that no rank owns for their inventories. Return the answers, and the keepers that
    have not answered but may do so later."""
    stocks = stocks_of(statements)
    known = {stock.host.name for stock in stocks}
    known |= {statement.silent for statement in statements}
    named = _named(stocks).values()
    absent = [host for host in named if host.address and host.name not in known]
    answers = await asyncio.gather(*(stock_of(host, option.certificate) for host in absent))
    unheard = [answer for answer in answers if isinstance(answer, Unheard)]
    return [answer for answer in answers if isinstance(answer, Stock)], unheard


def silent_among(statements: Sequence[InMemory]) -> list[Unheard]:
    """Return the keepers of ranks that listen but have not answered any rank."""
    silent = {statement.silent for statement in statements if statement.silent}
    if not silent:
        return []
    stocks = stocks_of(statements)
    silent -= {stock.host.name for stock in stocks}
    named = _named(stocks)
    return [Unheard(named.get(name) or KeeperHost(name, ""), True) for name in sorted(silent)]


def _named(stocks: Sequence[Stock]) -> dict[str, KeeperHost]:
    """Return the keepers that these have worked with, as of the newest epoch of each."""
    by_epoch = sorted(stocks, key=lambda stock: stock.inventory.epoch)
    return {host.name: host for stock in by_epoch for host in stock.inventory.hosts}


def next_epoch(stocks: Sequence[Stock], epochs: Epochs) -> int:
    """Return the number of the epoch to begin: above all epochs on record or known to a keeper."""
    return max((epochs.newest, *(stock.inventory.epoch for stock in stocks))) + 1


def kept_in_memory(
    stocks: Sequence[Stock],
    others: Sequence[Stock],
    world: int,
    newer_than: int,
    epochs: Epochs,
    tried: Tried = NOTHING_TRIED,
    allows: Callable[[int], bool] = lambda step: True,
) -> tuple[list[Choice], list[str]]:
    """Return the generations that can be resumed, best first, and why others cannot.

    Those are agreed on, newer than ``newer_than``, not left behind by a later epoch, of a step that
    the request ``allows``, and every image can be read or rebuilt; choices that have been ``tried``
    are left out. ``stocks``: keepers of the job's
    ``world`` ranks; ``others``: keepers that no rank owns.
    """
    everyone_has = {rank for stock in stocks for rank in stock.host.ranks} == set(range(world))
    alone = len(stocks) == 1 and everyone_has

    def is_within_reach(stock: Stock) -> bool:
        return bool(stock.host.address) or alone

    def is_of_use(generation: GenerationId) -> bool:
        step = generation.step
        return step > newer_than and allows(step) and not epochs.has_left(generation)

    found, problems = choices(
        list(filter(is_within_reach, (*stocks, *others))),
        [stock.host.name for stock in filter(is_within_reach, stocks)],
        is_of_use,
        tried.damaged,
    )
    return [one for one in found if one not in tried.failed], problems


def awaited(
    heard: Sequence[Stock],
    unheard: Sequence[Unheard],
    newest: int,
    epochs: Epochs,
    *,
    in_memory: bool,
    tried: Tried = NOTHING_TRIED,
    allows: Callable[[int], bool] = lambda step: True,
) -> bool:
    """Return whether to wait for keepers that have not answered: their answers may make a step
    available that the request ``allows``, by a choice that has not been ``tried``, and newer than
    ``newest``, the newest one that can be resumed now. ``in_memory``: whether that one is in
    memory."""
    if not unheard:
        return False
    listens = any(one.listens for one in unheard)
    # The keepers of the newest epoch know each other, and all steps that were agreed in it, unless
    # they have restarted without memory. They may not know of the step that it began from.
    _, began_from = epochs.begun[-1] if epochs.begun else (-1, -1)
    newest_known = (began_from <= newest or not allows(began_from)) and any(
        stock.inventory.epoch >= epochs.newest
        and stock.inventory.hosts
        and any(held.agreed for held in stock.inventory.generations)
        for stock in heard
    )
    if listens and not newest_known and epochs.newest >= 0:
        return True
    # A host that cannot be reached is probably lost, and with it the steps that were not protected.
    # Nobody waits for those if memory has an earlier step.
    protected_only = in_memory and not listens

    def is_of_use(generation: GenerationId) -> bool:
        step = generation.step
        is_news = step > newest and allows(step) and not epochs.has_left(generation)
        return is_news and not (protected_only and not _is_protected(generation, heard))

    # Sets, since hosts of large jobs mostly know the same.
    known = {
        (held.generation, held.world)
        for stock in heard
        for held in stock.inventory.generations
        if held.agreed or listens
    }
    encoded = {replace(guard, member=0) for stock in heard for guard in stock.inventory.guards}
    known |= {(guard.generation, guard.world) for guard in encoded}
    epoch = max((stock.inventory.epoch for stock in heard), default=-1)
    hopeful = [*heard, *(_most_of(one, known, encoded, epoch) for one in unheard)]
    found, _ = choices(hopeful, [one.host.name for one in hopeful], is_of_use, tried.damaged)
    return any(one not in tried.failed for one in found)


def _most_of(
    one: Unheard,
    known: Collection[tuple[GenerationId, int]],
    encoded: Collection[ParityEntry],
    epoch: int,
) -> Stock:
    """Return the largest inventory that a keeper may have, given what other keepers know. In the
    newest ``epoch``, it has captured images of its own ranks; of earlier generations, it may have
    rebuilt any image, or had other ranks. If none of its group answers, or has lost its parity, it
    may have parity of any image."""
    name = one.host.name
    has_group = {guard.generation for guard in encoded if name in guard.group.names}
    generations = []
    for generation, world in known:
        ranks: Sequence[int] = range(world)
        is_captured = generation.epoch == epoch and generation in has_group
        if is_captured and one.host.ranks:
            ranks = [rank for rank in one.host.ranks if rank < world]
        generations.append(GenerationEntry(generation, world, tuple(ranks), True))
    guards = tuple(
        replace(guard, member=guard.group.names.index(name))
        for guard in encoded
        if name in guard.group.names
    )
    return Stock(one.host, Inventory(-1, tuple(generations), guards))


def _is_protected(generation: GenerationId, heard: Sequence[Stock]) -> bool:
    """Return whether all keepers that answer have encoded their part of a generation's parity."""
    encoded = {
        stock.host.name: guard.group
        for stock in heard
        for guard in stock.inventory.guards
        if guard.generation == generation
    }
    members = set(itertools.chain(*(group.names for group in encoded.values())))
    return bool(encoded) and members & {stock.host.name for stock in heard} <= encoded.keys()


def meeting(stocks: Sequence[Stock], world: int, option: GuardOption) -> Meeting:
    """Return how these keepers work together. Raises UsageError if they are too few."""
    ranks = {rank for stock in stocks for rank in stock.host.ranks}
    if ranks != set(range(world)):
        lacking = sorted(set(range(world)) - ranks)
        problem = f"{len(lacking)} ranks have no keeper, including rank {lacking[0]}"
        return Meeting(problem=problem, temporary=True)
    hosts = tuple(stock.host for stock in sorted(stocks, key=lambda stock: stock.host.ranks))
    unserved = [host for host in hosts if not host.address]
    if len(hosts) > 1 and unserved:
        return Meeting(
            problem=f"the job has {len(hosts)} keepers, but rank {unserved[0].ranks[0]}'s does not "
            f"serve its memory to others: set Keeper(serve=…)"
        )
    return Meeting(hosts, _groups(hosts, option))


def _groups(hosts: Sequence[KeeperHost], option: GuardOption) -> tuple[GuardedGroup, ...]:
    by_name = {host.name: host for host in hosts}
    domains = [HostDomain(host.name, host.domain) for host in hosts]
    try:
        found = protection(domains, cast(Mode, option.mode), option.group)
    except ValueError as error:
        raise UsageError(
            f"Keeper(protect={option.mode!r}): {error}",
            advice='Use more hosts, or protect="auto", which uses the best protection available.',
        ) from error
    if len(hosts) > 1 and found.mode == "off" != option.mode:
        _log.warning("images are not protected against the loss of a host: %s", found.reason)
    return tuple(
        GuardedGroup(found.mode, group, tuple(by_name[name].ranks for name in group))
        for group in found.groups
    )
