"""Agreement on keepers before a job begins: which exist, what can be resumed, how they are
protected. Each rank states what its own keeper holds. The leader asks keepers of the previous job
that no rank owns now, over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ...errors import HoldfastError, UsageError
from ...planner.parity import GROUP_HOSTS, HostDomain, Mode, protection
from ..arenas.hosts import GuardedGroup, KeeperHost
from ..arenas.label import GenerationId
from ..arenas.messages import Inventory
from ..keeper.decisions.choice import Choice, Stock, choices
from ..keeper.reading import opened_peer
from ..ranks.messages import codec
from .epochs import Epochs

ASK_S = 5.0
"""Deadline for the inventory of a keeper that no rank owns."""

NOTHING = Inventory(-1, ())
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DamagedImage:
    """The image of ``rank`` on the keeper ``name`` is damaged or unreachable."""

    generation: GenerationId
    rank: int
    name: str


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
    """What a rank's keeper holds. ``host``: None without one. ``damaged``: damaged images."""

    inventory: Inventory = NOTHING
    host: KeeperHost | None = None
    damaged: tuple[DamagedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The keepers of a job that work together, with their ranks; empty with a ``problem``."""

    hosts: tuple[KeeperHost, ...] = ()
    groups: tuple[GuardedGroup, ...] = ()
    problem: str = ""


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


async def asked(stocks: Sequence[Stock], option: GuardOption) -> list[Stock]:
    """Ask keepers that no rank owns for their inventories; leave out those that do not answer."""
    present = {stock.host.name for stock in stocks}
    absent = {
        host.name: host
        for stock in stocks
        for host in stock.inventory.hosts
        if host.name not in present and host.address
    }
    found = await asyncio.gather(*(_stock(host, option) for host in absent.values()))
    return [stock for stock in found if stock is not None]


async def _stock(host: KeeperHost, option: GuardOption) -> Stock | None:
    try:
        async with asyncio.timeout(ASK_S):
            driver = opened_peer(host, "held", option.certificate, timeout_s=ASK_S, tries=1)
            try:
                data = await driver.get("inventory")
            finally:
                await driver.close()
        return Stock(replace(host, ranks=()), codec(Inventory).decode(data, "an inventory"))
    except (HoldfastError, TimeoutError) as error:
        _log.warning("the keeper %s at %s does not answer: %s", host.name, host.address, error)
        return None


def next_epoch(stocks: Sequence[Stock], epochs: Epochs) -> int:
    """Return the number of the epoch to begin: above all epochs on record or known to a keeper."""
    return max((epochs.newest, *(stock.inventory.epoch for stock in stocks))) + 1


def kept_in_memory(
    stocks: Sequence[Stock],
    others: Sequence[Stock],
    world: int,
    newer_than: int,
    epochs: Epochs,
    damaged: Collection[DamagedImage] = (),
) -> tuple[list[Choice], list[str]]:
    """Return the generations that can be resumed, best first, and why others cannot.

    Those are agreed on, newer than ``newer_than``, not left behind by a later epoch, and every
    image can be read or rebuilt. ``stocks``: keepers of the job's ``world`` ranks; ``others``:
    keepers that no rank owns.
    """
    everyone_has = {rank for stock in stocks for rank in stock.host.ranks} == set(range(world))
    alone = len(stocks) == 1 and everyone_has

    def is_within_reach(stock: Stock) -> bool:
        return bool(stock.host.address) or alone

    def is_of_use(generation: GenerationId) -> bool:
        return generation.step > newer_than and not epochs.has_left(generation)

    return choices(
        list(filter(is_within_reach, (*stocks, *others))),
        [stock.host.name for stock in filter(is_within_reach, stocks)],
        is_of_use,
        {(one.generation, one.rank, one.name) for one in damaged},
    )


def meeting(stocks: Sequence[Stock], world: int, option: GuardOption) -> Meeting:
    """Return how these keepers work together. Raises UsageError if they are too few."""
    ranks = {rank for stock in stocks for rank in stock.host.ranks}
    if ranks != set(range(world)):
        lacking = sorted(set(range(world)) - ranks)
        return Meeting(problem=f"{len(lacking)} ranks have no keeper, including rank {lacking[0]}")
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
        GuardedGroup(found.mode, group.hosts, tuple(by_name[name].ranks for name in group.hosts))
        for group in found.groups
    )
