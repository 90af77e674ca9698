"""One keeper and its trainers' connections in one process: refusals, failed flushes, survival."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from support.kept_memory import (
    DEADLINE_S,
    RUN,
    Told,
    capture,
    in_loop,
    kept,
    pinned,
    planned,
    run,
    trainer,
)

import holdfast
from holdfast.errors import DamagedError, StorageDownError
from holdfast.planner.image import ImageLayout
from holdfast.storage.arenas import arena as arena_module
from holdfast.storage.arenas.arena import Arena, Capture, KeeperLost
from holdfast.storage.arenas.client import KeeperClient, Refusal
from holdfast.storage.arenas.folder import KeeperFolder
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.memory import Memory, read_sealed, reserved_memory, sealed_bytes
from holdfast.storage.arenas.messages import (
    VERSION,
    Agreed,
    Durable,
    Enter,
    Fill,
    Filled,
    Flush,
    FlushFailed,
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
from holdfast.storage.arenas.sockets import Line, Received, connected
from holdfast.storage.keeper import slot_memory as held
from holdfast.storage.keeper.flushing import writing
from holdfast.storage.keeper.keeper import Keeper
from holdfast.storage.keeper.options import KeeperOptions
from holdfast.storage.keeper.slot_memory import PooledSlot, SlotPool
from holdfast.storage.keeper.trainers import PROGRESS_S

NBYTES = 100_000


def test_a_step_is_sealed_agreed_and_flushed(tmp_path: Path) -> None:
    """A step is sealed, agreed and durable, in that order, and storage then holds the captured
    state.
    """
    told = Told()

    async def body() -> None:
        async with kept() as (_, folder), trainer(folder) as arena:
            assert await arena.enter(Enter(0, None))
            await capture(arena, 5, told)
            assert await arena.flush(Flush(5, str(tmp_path / "c")))
            await told.until(Durable)

    run(body)
    assert [type(event) for event in told.events] == [Sealed, Agreed, Durable]
    loaded = holdfast.load(tmp_path / "c")
    assert isinstance(loaded, dict)
    assert (loaded["w0"] == 5).all()
    with holdfast.open(tmp_path / "c") as checkpoint:
        assert checkpoint.step == 5
        checkpoint.verify()


def test_a_flush_that_fails_is_tried_again_until_storage_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer hears of each failed attempt, and the keeper keeps later steps meanwhile."""
    told = Told()
    later = Told()
    flush = writing.flush
    tried = 0

    async def failing(*given: object) -> tuple[str, int]:
        nonlocal tried
        tried += 1
        if tried <= 3:
            raise StorageDownError("no storage today")
        return await flush(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "flush", failing)
    monkeypatch.setattr(writing, "FLUSH_PAUSES_S", (0.05,))

    async def body() -> None:
        async with kept() as (keeper, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            await capture(arena, 1, told)
            await arena.flush(Flush(1, str(tmp_path / "c")))
            for step in range(2, 6):
                later.events.clear()
                await capture(arena, step, later)
                await later.until(Agreed)
            await told.until(Durable)
            assert keeper.status().counters.flush_failures == 3

    run(body)
    failures = [event for event in told.events if isinstance(event, FlushFailed)]
    assert ["no storage today" in event.text for event in failures] == [True] * 3
    assert not any(event.final for event in failures)
    loaded = holdfast.load(tmp_path / "c")
    assert isinstance(loaded, dict)
    assert (loaded["w0"] == 1).all()


def test_memory_that_has_changed_is_not_flushed(tmp_path: Path) -> None:
    """The generation is void, and nothing is in storage."""
    told = Told()

    async def body() -> None:
        async with kept() as (_, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            slot = await capture(arena, 5, told)
            await told.until(Agreed)
            slot.memory.view[9000] ^= 1
            await arena.flush(Flush(5, str(tmp_path / "c")))
            failed = await told.until(FlushFailed)
            assert isinstance(failed, FlushFailed)
            assert failed.final
            assert "has changed in memory" in failed.text
            inventory = await arena.look_up()
            assert inventory is not None
            assert inventory.generations == ()

    run(body)
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
@in_loop
async def test_a_stranger_is_refused_with_the_reason(hello: Hello, said: str) -> None:
    """The keeper lives, and counts it."""
    async with kept() as (keeper, folder):
        arena = Arena(folder, hello, DEADLINE_S)
        assert not await arena.open()
        assert said in arena.problem
        assert keeper.status().counters.refused == 1
        async with trainer(folder) as other:
            assert await other.enter(Enter(0, None))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"[]",
        b"\xff" * 100,
        b"x" * (80 << 10),
        encode(1, Fill(1, 100, 1.0)),
        encode(1, Agreed(GenerationId(1, 1))),
        b'["_Numbered",1,"Hello",5]\nabc',
    ],
    ids=["nothing", "list", "bytes", "huge", "no hello", "event", "cut"],
)
def test_whatever_comes_over_a_line_the_keeper_lives(sent: bytes) -> None:
    """After malformed input the keeper closes that connection and serves the next one."""

    async def body() -> None:
        async with kept() as (_, folder):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(folder.socket)
                try:
                    socket.send_fds(sock, [sent], [0, 1])
                    sock.settimeout(0.01)
                    await asyncio.sleep(0.05)
                    assert sock.recv(100) == b""
                except (TimeoutError, OSError):
                    pass
            async with trainer(folder) as arena:
                assert await arena.enter(Enter(0, None))

    before = len(os.listdir("/proc/self/fd"))
    run(body)
    assert len(os.listdir("/proc/self/fd")) == before


@in_loop
async def test_a_slot_that_was_dropped_is_given_again() -> None:
    """The step is left out."""
    async with kept() as (keeper, folder), trainer(folder) as arena:
        await arena.enter(Enter(0, None))
        for step in range(1, 10):
            slot = await arena.fill(step, 8192)
            assert slot is not None, arena.problem
            await arena.dropped(slot)
        assert keeper.status().held_nbytes == 8192


def test_a_step_does_not_wait_for_memory_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is skipped while its memory is still being mapped, and a later step uses that memory.

    The memory is mapped only once.
    """
    begun: list[int] = []
    may_go_on = threading.Event()

    def slowly(nbytes: int) -> Memory:
        begun.append(nbytes)
        assert may_go_on.wait(60)
        return reserved_memory(nbytes)

    monkeypatch.setattr("holdfast.storage.keeper.slot_memory.reserved_memory", slowly)
    monkeypatch.setattr(arena_module, "_MAKING_SHARE", 0.01)  # not as long as the other deadlines

    async def body() -> None:
        async with kept() as (keeper, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            assert await arena.fill(1, NBYTES) is None
            assert "still being allocated" in arena.problem
            assert arena.is_open
            assert keeper.status().held_nbytes == 0
            may_go_on.set()
            while keeper.status().held_nbytes == 0:
                await asyncio.sleep(0.01)
            assert await arena.fill(2, NBYTES) is not None
            assert begun == [NBYTES]

    run(body)


@pytest.mark.parametrize("within_s", [-1.0, math.inf, math.nan])
@in_loop
async def test_nobody_waits_forever_for_memory(within_s: float) -> None:
    """A wait for memory is refused if its limit is negative or not finite."""
    async with kept() as (_, folder), trainer(folder) as arena:
        await arena.enter(Enter(0, None))
        assert arena._client is not None
        with pytest.raises(Refusal, match="memory is wanted within"):
            await arena._client.ask(Fill(1, NBYTES, within_s), Filled)


@in_loop
async def test_memory_of_no_bytes_is_refused() -> None:
    """A request for no bytes is refused and occupies no slot."""
    async with kept() as (keeper, folder), trainer(folder) as arena:
        await arena.enter(Enter(0, None))
        assert await arena.fill(1, 0) is None
        assert "memory of 0 bytes cannot be mapped" in arena.problem
        assert await arena.fill(2, 8192) is not None
        assert list(keeper.pool.generations.slots) == list(keeper.pool.slots)


def test_what_no_image_can_be_is_refused() -> None:
    """A capture that claims more bytes than its slot has is refused.

    Otherwise the keeper would read memory that does not belong to the slot.
    """
    told = Told()

    async def body() -> None:
        async with kept() as (_, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            slot = await arena.fill(1, 8192)
            assert slot is not None
            none = np.empty(0, np.int64)
            layout = ImageLayout(b"", none, none, 1 << 30, 1 << 30, 8192)
            capture = Capture(layout, True, 0.0, b"x")
            assert not await arena.captured(slot, 1, capture, told.take)
            assert "contradicts itself" in arena.problem

    run(body)
    assert told.events == []


@in_loop
async def test_an_image_that_is_not_there_is_damage() -> None:
    """Fetching an image that the keeper does not hold raises DamagedError."""
    async with kept() as (_, folder), trainer(folder) as arena:
        await arena.enter(Enter(0, None))
        with pytest.raises(DamagedError, match="no image of rank 3 of step 7"):
            await arena.image(GenerationId(0, 7), 3)


async def cut(arena: Arena) -> None:
    """Cut the connection between a rank and its keeper. The keeper keeps running."""
    assert arena._client is not None
    await arena._client.close()
    arena._lost()


def test_a_step_that_goes_to_storage_is_waited_for_where_a_line_is_cut(tmp_path: Path) -> None:
    """After a cut connection the rank reconnects, hands over its images and repeats its flush.

    It may reach another keeper. The rank learns the outcome even if the flush had already ended.
    """
    told = [Told(), Told()]
    (tmp_path / "file").write_bytes(b"")

    async def body() -> None:
        async with kept() as (keeper, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            await capture(arena, 1, told[0])
            assert await arena.flush(Flush(1, str(tmp_path / "file" / "c")))
            await told[0].until(FlushFailed)
            await cut(arena)
            (tmp_path / "file").unlink()
            assert isinstance(await told[0].until((Durable, Voided)), Durable)
            assert keeper.status().counters.flushed == 1
            await capture(arena, 2, told[1])
            assert await arena.flush(Flush(2, str(tmp_path / "d")))
            await told[1].until(Sealed)
            await cut(arena)
            assert isinstance(await told[1].until((Durable, Voided)), Durable)
            assert keeper.status().counters.flushed == 2
            assert pinned(keeper.pool.generations) == []

    run(body)
    assert [KeeperLost in map(type, one.events) for one in told] == [True, True]


def test_no_step_is_kept_before_the_next_keeper_has_been_handed_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step is kept until the rank has handed its earlier images to the next keeper.

    For a keeper, a rank that keeps a newer step has dropped all earlier ones. It would discard an
    image that arrives late, although other ranks wait for it.
    """
    told = Told()

    async def body() -> None:
        goes_on = asyncio.Event()
        entered = asyncio.Event()

        async with kept() as (_, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            await capture(arena, 1, told)
            await told.until(Sealed)
            enter = arena.enter

            async def slowly(enters: Enter) -> bool:
                found = await enter(enters)
                entered.set()
                await goes_on.wait()
                return found

            monkeypatch.setattr(arena, "enter", slowly)
            await cut(arena)
            await entered.wait()
            assert await arena.fill(2, 8192) is None
            assert arena.problem == "images are still being handed to the next keeper"
            goes_on.set()
            assert arena._reopening is not None
            await arena._reopening
            await capture(arena, 3, told)

    run(body)


def test_a_step_that_goes_to_storage_is_not_waited_for_where_no_keeper_comes(
    tmp_path: Path,
) -> None:
    """Without a keeper, a rank waits for its flush no longer than a keeper may take to answer."""
    told = Told()
    (tmp_path / "file").write_bytes(b"")

    async def body() -> None:
        async with AsyncExitStack() as keeper:
            _, folder = await keeper.enter_async_context(kept())
            async with trainer(folder) as arena:
                await arena.enter(Enter(0, None))
                await capture(arena, 1, told)
                assert await arena.flush(Flush(1, str(tmp_path / "file" / "c")))
                await told.until(FlushFailed)
                arena._deadline_s = 0.1
                await keeper.aclose()
                await told.until(KeeperLost)
                assert isinstance(await told.until((Durable, Voided)), Voided)
                assert not await arena.flush(Flush(1, str(tmp_path / "c")))

    run(body)


@in_loop
async def test_where_no_keeper_listens_that_is_said_at_once() -> None:
    """Opening fails at once if no keeper listens, not after the deadline."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        folder = KeeperFolder.of(RUN, Path(base))
        arena = Arena(folder, Hello(VERSION, RUN, 0, 1, "here"), 1000.0)
        assert not await arena.open()
        assert "no keeper listens at" in arena.problem


@in_loop
async def test_a_keeper_of_another_user_is_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could put a socket there could read the state."""
    async with kept() as (_, folder):
        monkeypatch.setattr(Line, "peer_uid", property(lambda self: os.getuid() + 1))
        arena = Arena(folder, Hello(VERSION, RUN, 0, 1, "here"), DEADLINE_S)
        assert not await arena.open()
        assert "another user" in arena.problem


@in_loop
async def test_a_line_that_is_closed_wakes_who_waits_for_it() -> None:
    """Rather than have it wait for a descriptor that is another line's by then."""
    async with kept() as (_, folder):
        line = connected(folder.socket)
        waiting = asyncio.ensure_future(line.receive())
        await asyncio.sleep(0.01)
        line.close()
        with pytest.raises(ConnectionError):
            await waiting


@in_loop
async def test_what_is_passed_along_is_what_was_given_however_long_it_waits() -> None:
    """A queued descriptor still refers to the same file when it is finally sent.

    A peer that does not read delays the send. Meanwhile the owner may close the descriptor, and its
    number may be reused for another file.
    """
    ours, theirs = map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
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
def test_what_has_no_room_is_left_on_storage_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A keeper that restarts with less memory leaves older images on the host's local storage.

    The limit is its budget or the memory that the system has available. The newest images load
    first.
    """

    async def body() -> None:
        given = {"local": tmp_path.as_uri(), "local_every": 1}
        async with kept(**given) as (_, folder), trainer(folder) as arena:
            await arena.enter(Enter(0, None))
            for step in (1, 2):
                told = Told()
                await capture(arena, step, told)
                await told.until(Local)
            nbytes = planned(1).layout.nbytes
        budget_nbytes = None
        if what == "system":
            monkeypatch.setattr(held, "available_nbytes", spare(held.RESERVE_NBYTES + nbytes))
        else:
            budget_nbytes = nbytes
        async with kept(budget_nbytes=budget_nbytes, **given) as (keeper, _):
            assert [one.generation.step for one in keeper.inventory().generations] == [2]

    def spare(nbytes: int) -> Callable[[], int]:
        left = [nbytes, 0]
        return lambda: left.pop(0)

    run(body)


def test_memory_that_cannot_be_mapped_costs_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper hands out the memory of a slot once a line: over another one, it does so again."""

    async def body() -> None:
        async with kept() as (keeper, folder), trainer(folder) as rank:
            await rank.enter(Enter(0, None))
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

    def refused(fd: int, nbytes: int) -> Memory:
        os.close(fd)
        raise OSError("no addresses are left")

    run(body)


@in_loop
async def test_descriptors_of_an_answer_that_nobody_waits_for_any_more_are_closed() -> None:
    """Descriptors of an answer that arrives just as its wait is cancelled are closed."""
    ours, theirs = map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
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


@in_loop
async def test_a_keeper_that_is_told_to_end_goes_on_for_its_trainers(tmp_path: Path) -> None:
    """A keeper that is asked to end keeps serving until its trainers have left.

    The trainers may have been asked to end too, and are saving their state.
    """
    async with kept() as (keeper, folder):
        async with trainer(folder) as rank:
            await rank.enter(Enter(0, None))
            ending = asyncio.ensure_future(keeper.finish(1000.0))
            told = Told()
            await capture(rank, 1, told)
            assert await rank.flush(Flush(1, str(tmp_path / "c")))
            await told.until(Durable)
            assert not ending.done()
        await ending  # which is not so long
    with holdfast.open(tmp_path / "c") as checkpoint:
        checkpoint.verify()


@pytest.mark.nightly(4)
@pytest.mark.clocked
@in_loop
async def test_trainers_are_let_in_once_the_keeper_has_what_it_begins_with() -> None:
    """A trainer that connects early waits as long as the starting keeper makes progress.

    It passes that progress on to ranks that wait for it. Its deadline counts from the last
    progress.
    """
    ours, theirs = map(Line, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    keeper = Keeper(KeeperOptions(RUN, "here"), "keeper")
    keeper.run_later(keeper.attend(theirs))
    client = KeeperClient(ours, 3 * PROGRESS_S, lambda event, fds: None)
    heard: list[float] = []
    hello = Hello(VERSION, RUN, 0, 1, "here")
    asking = asyncio.ensure_future(
        client.ask(hello, Welcome, goes_on=lambda: heard.append(time.monotonic()))
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


@in_loop
async def test_a_line_that_was_given_up_takes_no_other_ones_place() -> None:
    """A stale connection does not replace a newer one of the same trainer.

    A trainer that waited too long for the keeper to start connects again; its first attempt is
    stale.
    """
    keeper = Keeper(KeeperOptions(RUN, "here"), "keeper")
    hello = Hello(VERSION, RUN, 0, 1, "here")
    lines = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    clients = [KeeperClient(Line(of), DEADLINE_S, lambda *_: None) for of, _ in lines]
    asking = [asyncio.ensure_future(client.ask(hello, Welcome)) for client in clients]
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


def test_a_voided_generation_has_no_images() -> None:
    """A voided generation has no images.

    Its bytes stay until the slot is reused, so a reader could see them being overwritten.
    """
    pool = SlotPool(10 * NBYTES)
    id = GenerationId(1, 2)
    number = pool.generations.recall(id, 0, 1, NBYTES)
    assert isinstance(number, int)
    label = Label("run", id, 0, 1, NBYTES, 0, 1, 1, 0.0)
    pool.slots[number] = PooledSlot(reserved_memory(NBYTES), label)
    assert [image.label for image in pool.images(id)] == [label]
    pool.generations.void(id)
    assert pool.images(id) == []
    pool.close()
