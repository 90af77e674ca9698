"""Which keepers a restart waits for before it gives up steps in their memory."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path

import pytest
from support.drivers import asynchronous
from support.kept_hosts import kept_hosts

from holdfast.planner.parity import Mode
from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import GenerationEntry, Inventory, ParityEntry
from holdfast.storage.arenas.sockets import connected, listening
from holdfast.storage.keeper import reading
from holdfast.storage.keeper.decisions.choice import Stock
from holdfast.storage.training.epochs import Epochs
from holdfast.storage.training.keeper_inventory import (
    GuardOption,
    InMemory,
    Unheard,
    asked,
    awaited,
    kept_in_memory,
    silent_among,
)

NAMES = "abcd"
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
) -> bool:
    """Return whether a restart waits, if these hosts do not answer."""
    heard = [stock for name, stock in known.items() if name not in silent + unreachable + gone]
    unheard = [Unheard(known[name].host, True) for name in silent]
    unheard += [Unheard(known[name].host, False) for name in unreachable]
    kept, _ = kept_in_memory(heard, [], len(heard), stored, BEGUN)
    newest = kept[0].generation.step if kept else stored
    return awaited(heard, unheard, newest, BEGUN, in_memory=bool(kept))


def test_nobody_is_waited_for_if_a_lost_host_can_be_made_up_for() -> None:
    """The usual loss of a host delays nothing, whether its address refuses or swallows requests."""
    for known in (stocks(5, 5), stocks(6, 5), stocks(6, 5, encoding="ab")):
        assert not waits(known)
        assert not waits(known, gone="d")
        assert not waits(known, unreachable="d")
    assert not waits(stocks(5, 5), silent="d")
    assert not waits(stocks(5, None), gone="d")
    assert not waits(stocks(5, None), unreachable="d", stored=5)


def test_a_host_that_may_have_the_newest_step_is_waited_for() -> None:
    """A host that accepts connections is not lost. One that cannot be reached is waited for if
    parity of an encoded step cannot replace it, or if memory has no other step."""
    assert waits(stocks(6, 5), silent="d")
    assert waits(stocks(5, 5), unreachable="cd")
    assert waits(stocks(5, None), unreachable="d")
    assert waits(stocks(5, None), silent="d", stored=4)
    assert not waits(stocks(5, 5), unreachable="cd", stored=5)
    assert not waits(stocks(5, None), silent="d", gone="c", stored=4)  # it would not help


def test_a_host_whose_contents_nobody_knows_is_waited_for() -> None:
    """Unless the run has never had a keeper, so that there is nothing to lose."""
    own = Unheard(KeeperHost("of rank 0", ""), True)
    fresh = Stock(KeeperHost("new", "new"), Inventory(-1, ()))
    for heard in ([], [fresh]):
        assert awaited(heard, [own], -1, BEGUN, in_memory=False)
        assert not awaited(heard, [own], -1, Epochs(), in_memory=False)
    assert not awaited([fresh], [], -1, BEGUN, in_memory=False)


@asynchronous
async def test_keepers_that_do_not_answer_are_told_from_those_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refused connection is the end of a keeper; a connection without an answer is not."""
    monkeypatch.setattr(reading, "ASK_S", 0.5)
    async with kept_hosts("off", [0], [1]) as job:
        await job.step(1)
        own = job.stocks()[0]
        statement = InMemory(own.inventory, own.host)
        found, unheard = await asked([statement], GuardOption())
        assert ([stock.host.domain for stock in found], unheard) == (["b"], [])
        with socket.create_server(("127.0.0.1", 0)) as mute:
            at = f"127.0.0.1:{mute.getsockname()[1]}"
            hosts = (own.host, KeeperHost("b", "b", at, ranks=(1,)))
            statement = InMemory(Inventory(0, (), (), hosts), own.host)
            found, unheard = await asked([statement], GuardOption())
            assert (found, unheard) == ([], [Unheard(hosts[1], True)])
        assert await asked([statement], GuardOption()) == ([], [])
        silent = [statement, InMemory(silent="b"), InMemory(silent=own.host.name)]
        assert await asked(silent, GuardOption()) == ([], [])
        assert silent_among(silent) == [Unheard(hosts[1], True)]


def test_connecting_to_a_keeper_that_hangs_never_blocks(tmp_path: Path) -> None:
    """Its queue of connections fills up; the event loop must not wait for that."""
    path = str(tmp_path / "socket")
    lines = []
    with listening(path):
        try:
            while len(lines) < 10_000:
                lines.append(connected(path))
        except BlockingIOError:
            pass
    assert 0 < len(lines) < 10_000
    for line in lines:
        line.close()
