"""One keeper and its trainers' connections in one process: refusals, failed flushes, survival."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from support.drivers import asynchronous
from support.kept_memory import (
    DEADLINE_S,
    RUN,
    Told,
    capture,
    capture_until,
    entered,
    kept,
    pinned,
    planned,
    trainer,
)

import holdfast
from holdfast.errors import DamagedError
from holdfast.planner.image import ImageLayout
from holdfast.storage.arenas import arena as arena_module
from holdfast.storage.arenas.arena import Arena, KeeperLost
from holdfast.storage.arenas.client import KeeperClient, Refusal
from holdfast.storage.arenas.folder import KeeperFolder
from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.memory import Memory, read_sealed, reserved_memory, sealed_bytes
from holdfast.storage.arenas.messages import (
    VERSION,
    Agreed,
    Captured,
    Enter,
    Fill,
    Filled,
    Flush,
    FlushEnd,
    Hello,
    Inventory,
    Local,
    LookUp,
    Sealed,
    Voided,
    Welcome,
    decode,
    encode,
)
from holdfast.storage.arenas.sockets import (
    Line,
    MessageError,
    Received,
    connected,
    listening,
)
from holdfast.storage.keeper import slot_memory as held
from holdfast.storage.keeper.keeper import Keeper
from holdfast.storage.keeper.options import RATE_VARIABLE, KeeperOptions
from holdfast.storage.keeper.trainers import PROGRESS_S

NBYTES = 100_000
HELLO = Hello(VERSION, RUN, 0, 1, "here")


def lines() -> list[Line]:
    """Return the two ends of a connection."""
    return [Line(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]


async def problem_of(folder: KeeperFolder, hello: Hello = HELLO) -> str:
    """Return why a keeper does not take a trainer."""
    arena = Arena(folder, hello, DEADLINE_S)
    assert not await arena.open()
    return arena.problem


@asynchronous
async def test_memory_that_has_changed_is_not_flushed(tmp_path: Path) -> None:
    """The generation is void, no peer can read its images, and storage stays empty."""
    told = Told()
    async with entered() as (keeper, arena):
        slot = await capture(arena, 5, told)
        await told.until(Agreed)
        assert len(keeper.pool.images(GenerationId(0, 5))) == 1
        slot.memory.view[9000] ^= 1
        await arena.flush(Flush(5, str(tmp_path / "c")))
        failed = await told.until(FlushEnd)
        assert isinstance(failed, FlushEnd)
        assert failed.final
        assert "has changed in memory" in failed.problem
        assert keeper.inventory().generations == ()
        assert keeper.pool.images(GenerationId(0, 5)) == []
    assert holdfast.list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (Hello(VERSION + 1, RUN, 0, 1, "here"), "speaks version"),
        (Hello(VERSION, "1" * 32, 0, 1, "here"), "belongs to the run"),
        (Hello(VERSION, RUN, 2, 2, "here"), "rank 2 of 2"),
    ],
    ids=["version", "run", "rank"],
)
@asynchronous
async def test_a_stranger_is_refused_with_the_reason(hello: Hello, said: str) -> None:
    """The keeper counts the refusal, and serves the next trainer."""
    async with kept() as (keeper, folder):
        assert said in await problem_of(folder, hello)
        assert keeper.status().counters.refused == 1
        async with trainer(folder) as other:
            assert await other.enter(Enter(0, None))


@pytest.mark.parametrize(
    "sent",
    [
        b"[]",
        b"x" * (80 << 10),
        encode(1, Fill(1, 100, 1.0)),
        encode(1, Agreed(GenerationId(1, 1))),
        b'["_Numbered",1,"Hello",5]\nabc',
    ],
    ids=["list", "huge", "no hello", "event", "cut"],
)
def test_malformed_input_closes_the_connection(sent: bytes) -> None:
    """The keeper serves the next connection, and leaks no descriptor."""

    async def body() -> None:
        async with kept() as (_, folder):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(folder.socket)
                with contextlib.suppress(OSError):
                    socket.send_fds(sock, [sent], [0, 1])
                    sock.settimeout(0.01)
                    await asyncio.sleep(0.05)
                    assert sock.recv(100) == b""
            async with trainer(folder) as arena:
                assert await arena.enter(Enter(0, None))

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == before


@asynchronous
async def test_a_step_does_not_wait_for_memory_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is skipped, and a later one uses the memory, which is allocated only once."""
    begun: list[int] = []
    may_go_on = threading.Event()

    def slowly(nbytes: int, *, node: int) -> Memory:
        begun.append(nbytes)
        assert may_go_on.wait(60)
        return reserved_memory(nbytes, node=node)

    monkeypatch.setattr("holdfast.storage.keeper.slot_memory.reserved_memory", slowly)
    monkeypatch.setattr(arena_module, "_MAKING_SHARE", 0.01)  # not as long as the other deadlines
    async with entered() as (keeper, arena):
        assert await arena.fill(1, NBYTES) is None
        assert "still being allocated" in arena.problem
        assert arena.is_open
        assert keeper.status().held_nbytes == 0
        may_go_on.set()
        while keeper.status().held_nbytes == 0:
            await asyncio.sleep(0.01)
        assert await arena.fill(2, NBYTES) is not None
        assert begun == [NBYTES]


@asynchronous
async def test_requests_that_make_no_sense_are_refused() -> None:
    """The keeper waits for no memory without limit, maps none of no bytes, and trusts no sizes."""
    told = Told()
    async with entered() as (keeper, arena):
        assert arena._client is not None
        for within_s in (-1.0, math.nan):
            with pytest.raises(Refusal, match="memory is wanted within"):
                await arena._client.ask(Fill(1, NBYTES, within_s), Filled)
        assert await arena.fill(1, 0) is None
        assert "memory of 0 bytes cannot be mapped" in arena.problem
        slot = await arena.fill(2, 8192)
        assert slot is not None
        assert list(keeper.pool.generations.slots) == list(keeper.pool.slots)
        none = np.empty(0, np.int64)
        layout = ImageLayout(b"", none, none, 1 << 30, 1 << 30, 8192)
        sizes = layout.hashed_end, layout.chunk_nbytes, layout.block_nbytes
        captured = Captured(slot.number, 2, *sizes, 0.0)
        assert not await arena.captured(captured, b"x", told.take)
        assert "contradicts itself" in arena.problem
        with pytest.raises(DamagedError, match="no image of rank 3 of step 7"):
            await arena.image(GenerationId(0, 7), 3)
    assert told.events == []


async def cut(arena: Arena) -> None:
    """Cut the connection between a rank and its keeper. The keeper keeps running."""
    assert arena._client is not None
    await arena._client.close()
    arena._lost()


@asynchronous
async def test_a_rank_that_reconnects_learns_how_its_flush_has_ended(tmp_path: Path) -> None:
    """It hands over its images and repeats its request, even if the flush had already ended."""
    told = [Told(), Told()]
    (tmp_path / "file").write_bytes(b"")
    async with entered() as (keeper, arena):
        await capture(arena, 1, told[0])
        assert await arena.flush(Flush(1, str(tmp_path / "file" / "c")))
        await told[0].until(FlushEnd)
        await cut(arena)
        (tmp_path / "file").unlink()
        await told[0].until_durable()
        assert keeper.status().counters.flushed == 1
        await capture(arena, 2, told[1])
        assert await arena.flush(Flush(2, str(tmp_path / "d")))
        await told[1].until(Sealed)
        await cut(arena)
        await told[1].until_durable()
        assert keeper.status().counters.flushed == 2
        assert pinned(keeper.pool.generations) == []
    assert [KeeperLost in map(type, one.events) for one in told] == [True, True]


@asynchronous
async def test_a_flush_that_is_requested_without_a_keeper_is_done_by_the_next(
    tmp_path: Path,
) -> None:
    """A keeper that dies between a capture and the request takes neither along."""
    told = Told()
    async with entered() as (_, arena):
        await capture(arena, 1, told)
        await told.until(Sealed)
        await cut(arena)
        assert await arena.flush(Flush(1, str(tmp_path / "c")))
        await told.until_durable()


@asynchronous
async def test_of_two_checkpointers_of_a_process_the_later_one_keeps_the_keeper() -> None:
    """They do not replace each other in turn. The earlier one says why it keeps no steps."""
    async with kept() as (keeper, folder), trainer(folder) as earlier:
        assert await earlier.enter(Enter(0, None))
        async with trainer(folder) as later:
            assert await later.enter(Enter(1, None))
            while earlier.is_open:
                await asyncio.sleep(0.01)
            assert earlier._reopening is None
            assert await earlier.fill(1, NBYTES) is None
            assert earlier.problem.startswith("another Checkpointer of this process")
            await capture_until(later, 1, Agreed)
        assert len(list(keeper._trainers)) == 1


@asynchronous
async def test_processes_that_nothing_identifies_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux before 6.9 gives processes of other PID namespaces the number 0."""
    async with kept() as (_, folder):
        monkeypatch.setattr(Line, "peer_identity", lambda self, pidfd: 0)
        assert "shareProcessNamespace" in await problem_of(folder)


@asynchronous
async def test_no_step_is_captured_until_the_next_keeper_has_all_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A keeper takes a rank that captures a new step for one without earlier images."""
    told = Told()
    goes_on = asyncio.Event()
    has_entered = asyncio.Event()
    async with entered() as (_, arena):
        await capture(arena, 1, told)
        await told.until(Sealed)
        enter = arena.enter

        async def slowly(enters: Enter) -> bool:
            found = await enter(enters)
            has_entered.set()
            await goes_on.wait()
            return found

        monkeypatch.setattr(arena, "enter", slowly)
        await cut(arena)
        await has_entered.wait()
        assert await arena.fill(2, 8192) is None
        assert arena.problem == "images are still being handed to the next keeper"
        goes_on.set()
        assert arena._reopening is not None
        await arena._reopening
        await capture(arena, 3, told)


@asynchronous
async def test_a_step_that_is_voided_before_it_is_handed_over_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next keeper may void a step once a rank has entered, before it has the rank's image."""
    told = Told()
    (tmp_path / "file").write_bytes(b"")
    async with entered() as (keeper, arena):
        await capture(arena, 1, told)
        assert await arena.flush(Flush(1, str(tmp_path / "file" / "c")))
        await told.until(FlushEnd)
        enter = arena.enter

        async def voided(enters: Enter) -> bool:
            found = await enter(enters)
            await keeper._tell_all(Voided(GenerationId(0, 1), "lost"))
            await told.until(Voided)
            return found

        monkeypatch.setattr(arena, "enter", voided)
        await cut(arena)
        await told.until(Voided)
        assert arena._reopening is not None
        await arena._reopening
        assert arena._wishes == {}


@asynchronous
async def test_a_step_that_goes_to_storage_is_not_waited_for_where_no_keeper_comes(
    tmp_path: Path,
) -> None:
    """Without a keeper, a rank waits for its flush no longer than a keeper may take to answer."""
    told = Told()
    (tmp_path / "file").write_bytes(b"")
    async with AsyncExitStack() as keeper:
        _, folder = await keeper.enter_async_context(kept())
        async with trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            await capture(arena, 1, told)
            assert await arena.flush(Flush(1, str(tmp_path / "file" / "c")))
            await told.until(FlushEnd)
            arena._deadline_s = 0.1
            await keeper.aclose()
            await told.until(KeeperLost)
            await told.until(Voided)
            assert not await arena.flush(Flush(1, str(tmp_path / "c")))


@asynchronous
async def test_where_no_keeper_listens_that_is_said_at_once() -> None:
    """Opening fails at once if no keeper listens, not after the deadline."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        folder = KeeperFolder.of(RUN, Path(base))
        arena = Arena(folder, HELLO, 1000.0)
        assert not await arena.open()
        assert "no keeper listens at" in arena.problem
        assert arena.is_silent  # a service that is about to start may hold steps


@asynchronous
async def test_a_keeper_may_take_longer_to_start_than_to_answer() -> None:
    """A busy host loads programs slowly. Only a keeper that listens is expected to answer soon."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        folder = KeeperFolder.of(RUN, Path(base))
        folder.make()
        async with AsyncExitStack() as stack:
            sock: list[socket.socket] = []

            async def start(takes_over: bool) -> None:
                if not sock:
                    sock.append(stack.enter_context(listening(folder.socket)))
                    stack.callback(answering.cancel)
                    asyncio.get_running_loop().call_later(1.0, welcoming.set)

            async def answer() -> None:
                await welcoming.wait()
                loop = asyncio.get_running_loop()
                while True:
                    line = Line((await loop.sock_accept(sock[0]))[0])
                    stack.callback(line.close)
                    number, _ = decode((await line.receive()).data)
                    await line.send(encode(number, Welcome(1, KeeperHost("a", "a"))))

            welcoming = asyncio.Event()
            answering = asyncio.ensure_future(answer())
            arena = Arena(folder, HELLO, 0.3, start)
            assert await arena.open(), arena.problem
            await arena.close()
            welcoming.clear()
            answering.cancel()
            assert not await arena.open()
            assert arena.is_silent


@asynchronous
async def test_a_keeper_of_another_user_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody who can create a socket there could otherwise read the state."""
    async with kept() as (_, folder):
        monkeypatch.setattr(Line, "peer_uid", property(lambda self: os.getuid() + 1))
        assert "another user" in await problem_of(folder)


@asynchronous
async def test_a_running_keeper_applies_the_options_of_a_restarted_trainer(tmp_path: Path) -> None:
    """The keeper names the options that need a new keeper. Without options, it stays as it is."""
    steps = itertools.count(1)
    async with kept() as (keeper, folder):

        async def connect(options: str) -> tuple[str, ...]:
            arena = Arena(folder, Hello(VERSION, RUN, 0, 1, "here", options), DEADLINE_S)
            assert await arena.open(), arena.problem
            fixed = arena.fixed
            await arena.enter(Enter(0, None))
            await capture_until(arena, next(steps), Agreed)
            await arena.close()
            return fixed

        assert await connect("") == ()
        budget_nbytes = keeper.status().budget_nbytes
        options = KeeperOptions(RUN, "rack", 1 << 28, 60.0, str(tmp_path), max_bytes_per_s=10**9)
        assert await connect(json.dumps(asdict(options))) == ()
        assert keeper.options == options
        assert keeper.host.domain == "rack"
        assert os.environ[RATE_VARIABLE] == "1000000000"
        while not any(tmp_path.rglob("*.label")):
            await asyncio.sleep(0.01)
        assert keeper.status().budget_nbytes == 1 << 28
        again = KeeperOptions(RUN, "rack", None, serve="127.0.0.1", certificate="c.pem")
        assert await connect(json.dumps(asdict(again))) == ("serve", "certificate")
        assert RATE_VARIABLE not in os.environ
        assert keeper.status().budget_nbytes > budget_nbytes // 2
        bad = KeeperOptions(RUN, "rack", cpus="4095")
        assert await connect(json.dumps(asdict(bad))) == ("options",)
        assert await connect("[1]") == ("options",)


@asynchronous
async def test_a_line_that_is_closed_wakes_who_waits_for_it() -> None:
    """By then, its descriptor may belong to another connection."""
    async with kept() as (_, folder):
        line = connected(folder.socket)
        waiting = asyncio.ensure_future(line.receive())
        await asyncio.sleep(0.01)
        line.close()
        with pytest.raises(ConnectionError):
            await waiting


@asynchronous
async def test_large_messages_arrive_with_their_descriptors() -> None:
    """They travel in separate memory. A forged one is an error, and leaks nothing."""
    data = os.urandom(1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines = [Line(end) for end in pair]
    for given in ([], [0], [0, 1]):
        await lines[0].send(data, given)
        received = await lines[1].receive()
        assert (received.data, len(received.fds)) == (data, len(given))
        received.close()
    with tempfile.TemporaryFile() as unsealed:
        for fds in ([], [unsealed.fileno()]):
            socket.send_fds(pair[0], [b"\0"], fds)
            with pytest.raises(MessageError, match="a large message"):
                await lines[1].receive()
    for line in lines:
        line.close()
    assert len(os.listdir("/proc/self/fd")) == before


@asynchronous
async def test_a_queued_descriptor_is_that_of_the_file_that_was_given() -> None:
    """A queued descriptor refers to the same file, even if its number is reused meanwhile."""
    ours, theirs = lines()
    sent = [asyncio.ensure_future(ours.send(b"before"))]
    await asyncio.sleep(0)
    while sent[-1].done():
        sent.append(asyncio.ensure_future(ours.send(b"before")))
        await asyncio.sleep(0)
    given, other = sealed_bytes(b"given"), sealed_bytes(b"other")
    sent.append(asyncio.ensure_future(ours.send(b"it", [given])))
    await asyncio.sleep(0)
    os.dup2(other, given)
    received = await theirs.receive()
    while received.data != b"it":
        received = await theirs.receive()
    assert read_sealed(received.fds[0], 10) == b"given"
    await asyncio.gather(*sent)
    received.close()
    ours.close()
    theirs.close()
    os.close(given)
    os.close(other)


@pytest.mark.parametrize("what", ["budget", "system"])
@asynchronous
async def test_a_keeper_with_less_memory_loads_the_newest_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Older images stay on the local level if the budget or the system has no room for them."""
    given = {"local": tmp_path.as_uri(), "local_every": 1}
    async with entered(**given) as (_, arena):
        for step in (1, 2):
            await capture_until(arena, step, Local)
    nbytes = planned(1).layout.nbytes
    budget_nbytes = nbytes if what == "budget" else None
    if what == "system":
        left = [1 << 30, held.RESERVE_NBYTES + nbytes, 0]
        monkeypatch.setattr(held, "available_nbytes", lambda: left.pop(0))
    async with kept(budget_nbytes=budget_nbytes, **given) as (keeper, _):
        assert [one.generation.step for one in keeper.inventory().generations] == [2]


@asynchronous
async def test_memory_that_cannot_be_mapped_costs_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank reconnects, since a keeper sends each memory once per connection."""

    def refused(fd: int, nbytes: int) -> Memory:
        os.close(fd)
        raise OSError("no addresses are left")

    async with entered() as (keeper, rank):
        with monkeypatch.context() as patched:
            patched.setattr(arena_module, "Memory", refused)
            assert await rank.fill(1, NBYTES) is None
        assert rank.problem == "no addresses are left"
        assert rank._reopening is not None
        await rank._reopening
        for step in range(2, 6):
            slot = await rank.fill(step, NBYTES)
            assert slot is not None, rank.problem
            await rank.dropped(slot)
        assert len(keeper.pool.slots) == 1


@asynchronous
async def test_descriptors_of_an_answer_that_nobody_waits_for_any_more_are_closed() -> None:
    """Descriptors of an answer that arrives just as its wait is cancelled are closed."""
    ours, theirs = lines()
    client = KeeperClient(ours, DEADLINE_S, lambda event, fds: None)
    asking = asyncio.ensure_future(client.ask(Fill(1, NBYTES, 1.0), Filled))
    number, _ = decode((await theirs.receive()).data)
    fd = sealed_bytes(b"given")
    client._take(Received(encode(number, Filled(0, NBYTES)), (fd,)))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    await client.close()
    theirs.close()


@asynchronous
async def test_a_keeper_that_is_told_to_end_goes_on_for_its_trainers(tmp_path: Path) -> None:
    """A keeper that is asked to end serves its trainers until they have left."""
    async with kept() as (keeper, folder):
        async with trainer(folder) as rank:
            await rank.enter(Enter(0, None))
            ending = asyncio.ensure_future(keeper.finish(1000.0))
            told = await capture_until(rank, 1, Agreed)
            assert await rank.flush(Flush(1, str(tmp_path / "c")))
            await told.until_durable()
            assert not ending.done()
        await ending  # ends long before its timeout
    assert [type(event) for event in told.events] == [Sealed, Agreed, FlushEnd]
    with holdfast.open(tmp_path / "c") as checkpoint:
        checkpoint.verify()


@pytest.mark.nightly(4)
@pytest.mark.clocked
@asynchronous
async def test_trainers_are_let_in_once_the_keeper_has_what_it_begins_with() -> None:
    """A trainer that connects early waits while the starting keeper makes progress."""
    ours, theirs = lines()
    keeper = Keeper(KeeperOptions(RUN, "here"), "keeper")
    keeper.run_later(keeper.attend(theirs))
    client = KeeperClient(ours, 3 * PROGRESS_S, lambda event, fds: None)
    heard: list[float] = []
    asking = asyncio.ensure_future(
        client.ask(HELLO, Welcome, goes_on=lambda: heard.append(time.monotonic()))
    )
    for _ in range(8):
        await asyncio.sleep(PROGRESS_S)
        keeper._startup.moved()
    assert not keeper.status().ready
    assert not asking.done()
    assert len(heard) > 3
    keeper.welcomes()
    welcome, _ = await asking
    assert welcome.host.name == "keeper"
    assert keeper.status().ready
    await client.close()
    await keeper.close()


@asynchronous
async def test_a_stale_connection_replaces_no_newer_one() -> None:
    """A stale connection does not replace a newer one of the same trainer."""
    keeper = Keeper(KeeperOptions(RUN, "here"), "keeper")
    lines = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    clients = [KeeperClient(Line(of), DEADLINE_S, lambda *_: None) for of, _ in lines]
    asking = [asyncio.ensure_future(client.ask(HELLO, Welcome)) for client in clients]
    await asyncio.sleep(0.1)
    asking[0].cancel()
    await clients[0].close()
    for _, theirs in reversed(lines):  # the stale one comes last
        keeper.run_later(keeper.attend(Line(theirs)))
        await asyncio.sleep(0.1)
    keeper.welcomes()
    await asking[1]
    await asyncio.sleep(2 * PROGRESS_S)
    found, _ = await clients[1].ask(LookUp(), Inventory)
    assert found.epoch == -1
    await clients[1].close()
    await keeper.close()
