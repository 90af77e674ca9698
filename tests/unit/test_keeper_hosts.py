"""Keepers of several hosts: agreement, protection of each other's images, lost hosts, and bit flips.

These are real keepers that serve each other over HTTP within one process.
"""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import kept_memory
from support.bits import fresh_uri
from support.drivers import asynchronous
from support.kept_memory import RUN, TOKEN, KeptHosts, Told, kept_hosts, pinned, state_of
from support.servers.proxy import FaultProxy, Faults

import holdfast
from holdfast.drivers.pieces import cut
from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.memory import Memory, sealed_bytes, sealed_memory
from holdfast.storage.arenas.messages import (
    Agreed,
    Done,
    Flush,
    FlushEnd,
    FlushLost,
    Inventory,
    LookUp,
    Protected,
    Rebuild,
)
from holdfast.storage.arenas.sockets import connected, listening
from holdfast.storage.keeper import reading, reporting, slot_memory
from holdfast.storage.keeper.decisions.choice import Choice, DamagedImage
from holdfast.storage.keeper.decisions.standing import Report
from holdfast.storage.keeper.slot_memory import PooledSlot
from holdfast.storage.keeper.tiers import LocalImage, PeerImage, TiersDriver
from holdfast.storage.operations.options import LoadOptions
from holdfast.storage.ranks.messages import codec
from holdfast.storage.runtime import engine
from holdfast.storage.training.keeper_inventory import (
    GuardOption,
    InMemory,
    Unheard,
    asked,
    silent_among,
)
from holdfast.storage.training.memory_level import MemoryLevel


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something to become true."""
    end_s = time.monotonic() + 50
    while not holds():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.01)


def kinds(told: Told) -> set[type]:
    """Return the types of the events received."""
    return {type(event) for event in told.events}


def test_a_step_is_agreed_on_and_protected_and_written_by_all_keepers(tmp_path: Path) -> None:
    """Each keeper writes its images, the lead keeper commits, and all trainers are notified."""

    async def body() -> None:
        async with kept_hosts("xor", [0], [1], [2]) as job:
            for host in job.hosts.values():
                arena = host.arenas[min(host.arenas)]
                assert await arena.flush(Flush(2, str(tmp_path / "c")))
            await job.step(1, Protected)
            told = await job.step(2, FlushEnd)
            await until(
                lambda: all(kinds(one) >= {Agreed, Protected, FlushEnd} for one in told),
                "everything is told to all",
            )
            for host in job.hosts.values():
                status = host.keeper.status()
                assert status.protected == GenerationId(0, 2)
                assert status.protection == "xor"
                assert status.counters.flushed == 1
                assert status.counters.agreed == status.counters.protected == 2
                assert status.parity_nbytes > 0

    asyncio.run(body())
    loaded = holdfast.load(tmp_path / "c")
    assert isinstance(loaded, dict)
    expected = {k: v for rank in range(3) for k, v in state_of(2, rank).items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    with holdfast.open(tmp_path / "c") as checkpoint:
        checkpoint.verify()


@pytest.mark.parametrize(("mode", "count"), [("pq", 4), ("xor", 3)])
@asynchronous
async def test_a_host_that_is_lost_during_a_rebuild(mode: str, count: int) -> None:
    """The rebuild leaves that host out if parity allows, or else ends with the reason."""
    async with kept_hosts(mode, *([rank] for rank in range(count))) as job:
        await job.step(1, Protected)
        await job.lose("a")
        (choice,), _ = job.choices()
        (lost,) = choice.rebuilt
        gone = next(name for name in "bcd" if name != lost.at)
        with FaultProxy(("127.0.0.1", job.hosts[gone].port)) as proxy:
            keeper = job.hosts[gone].keeper
            keeper.serves_at(proxy.endpoint.removeprefix("http://"), TOKEN)
            proxy.faults = Faults(refuse=True)
            problems = await job.rebuild(choice)
        await job.lose(gone)
        if mode == "xor":
            assert "cannot be rebuilt" in problems[0]
            assert job.choices()[0] == []
            return
        assert problems == []
        (choice,), _ = job.choices()
        assert [one.rank for one in choice.rebuilt] == ["abcd".index(gone)]
        assert await job.rebuild(choice) == []


@asynchronous
async def test_an_image_rebuilt_for_a_trainer_that_has_ended_is_not_pinned() -> None:
    """An image rebuilt for a trainer that has ended is not pinned: nobody would ever release it."""
    async with kept_hosts("xor", [0], [1], [2]) as job:
        await job.step(1, Protected)
        await job.lose("a")
        (choice,), _ = job.choices()
        (lost,) = choice.rebuilt
        keeper = job.hosts[lost.at].keeper
        (trainer,) = keeper._trainers
        gone = replace(trainer, number=99, pid=-1)
        peers = tuple(stock.host for stock in job.stocks())
        request = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, peers)
        answer, _ = await keeper._rebuild(gone, request, [])
        assert isinstance(answer, Done)
        assert not any(slot.readers for slot in keeper.pool.generations._slots.values())


@asynchronous
async def test_an_offered_step_stays_protected_though_its_trainer_has_ended() -> None:
    """The job may have recorded that it resumes from that step; then a host may be lost as well."""
    async with kept_hosts("copy", [0], [1]) as job:
        await job.step(1, Protected)
        for host in job.hosts.values():
            (trainer,) = host.keeper._trainers
            reader = replace(trainer, number=99, left=True)
            await host.keeper._look_up(reader, LookUp(), [])
            host.keeper._gone(reader)
        for step in (2, 3, 4):
            await job.step(step, Protected)
        await job.lose("a")
        found, _ = job.choices()
        assert [one.generation.step for one in found] == [4, 1]


@asynchronous
async def test_an_image_that_is_made_again_is_told_of_once_it_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other keepers may request a rebuilt image as soon as it is announced."""
    async with kept_hosts("xor", [0], [1], [2]) as job:
        await job.step(1, Protected)
        await job.lose("a")
        (choice,), _ = job.choices()
        keeper = job.hosts[choice.rebuilt[0].at].keeper

        async def offload(work: Callable[..., object], *args: object) -> object:
            for held in keeper.inventory().generations:
                images = keeper.pool.images(held.generation)
                assert [image.label.rank for image in images] == list(held.ranks)
            looked.append(work)
            return await real(work, *args)

        looked: list[object] = []
        real = slot_memory.offload
        monkeypatch.setattr(slot_memory, "offload", offload)
        assert await job.rebuild(choice) == []
        assert looked != []


@asynchronous
async def test_all_hosts_hear_that_a_rank_has_died() -> None:
    """The keeper of each host notifies its trainers, once."""
    async with kept_hosts("off", [0], [1], [2]) as job:
        heard: list[int] = []
        for host in job.hosts.values():
            for arena in host.arenas.values():
                arena._rank_lost = heard.append
        for rank, name in ((1, "b"), (0, "a")):
            heard.clear()
            job.hosts[name].keeper._agreement.rank_lost(rank)
            await until(lambda: len(heard) == 3, "all ranks hear of it")
            assert set(heard) == {rank}
        await job.enter(chosen=None)
        told = await job.step(1)
        assert all(Agreed in kinds(one) for one in told)
        assert len(heard) == 3


async def posted(job: KeptHosts, body: bytes, token: str = TOKEN) -> int:
    """Return the status of the lead keeper's answer to a report."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{job.hosts['a'].port}/v1/report",
        body,
        {"Authorization": f"Bearer {token}"},
        method="POST",
    )

    def post() -> int:
        try:
            with urllib.request.urlopen(request, timeout=50) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(post)


@asynchronous
async def test_reports_that_make_no_sense_are_refused() -> None:
    """A report with a wrong key, host, epoch or format is refused, and the keeper survives."""
    async with kept_hosts("off", [0], [1]) as job:
        report = codec(Report).encode
        assert await posted(job, report(Report("b", 0))) == 200
        assert await posted(job, report(Report("b", 0)), "0" * 32) == 401
        assert await posted(job, report(Report("x", 0))) == 409
        assert await posted(job, report(Report("b", -1))) == 409
        assert await posted(job, report(Report("b", 7))) == 503
        for nonsense in (b"", b"[]", b"\0" * 1000, report(Report("b", 0))[:-3]):
            assert await posted(job, nonsense) == 400
        told = await job.step(1)
        assert all(Agreed in kinds(one) for one in told)


@asynchronous
async def test_what_the_lead_keeper_never_heard_of_takes_no_memory_for_long(tmp_path: Path) -> None:
    """Flushes requested only from a follower end, and their slots take later steps."""
    async with kept_hosts("off", [0], [1]) as job:
        told = {}
        for step in (1, 2):
            flush = Flush(step, str(tmp_path / "c"))
            assert await job.hosts["b"].arenas[1].flush(flush)
            _, told[step] = await job.step(step)
        event = await told[1].until(FlushLost)
        assert isinstance(event, FlushLost)
        assert event.problem == "a later step is flushed instead of this one"
        for step in (3, 4, 5):
            assert all(Agreed in kinds(one) for one in await job.step(step)), step
        event = await told[2].until(FlushEnd)
        assert isinstance(event, FlushEnd)
        assert event.final
        assert event.problem.startswith("some images of this step are no longer in memory")
        assert pinned(job.hosts["b"].keeper.pool.generations) == []


@pytest.mark.parametrize("shares", [False, True], ids=["copies", "links"])
@asynchronous
async def test_a_flush_borrows_from_an_earlier_checkpoint(
    shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keepers borrow from the checkpoint that the leader has chosen. The trainers learn it."""
    monkeypatch.setattr(kept_memory, "state_of", lambda step, rank=0: state_of(1, rank))
    monkeypatch.setattr("holdfast.drivers.local.driver.can_copy", lambda mount: False)
    uri = f"file://{tmp_path}" if shares else fresh_uri()
    ends = []
    async with kept_hosts("off", [0], [1]) as job:
        for step, base in ((1, ""), (2, "1"), (3, "9"), (4, None)):
            for rank, host in enumerate(job.hosts.values()):
                assert await host.arenas[rank].flush(Flush(step, f"{uri}/{step}", base=base))
            told = await job.step(step)
            ends.append([await one.until_durable() for one in told])
    for one, other in ends:
        assert one == other
    first, second, third, fourth = (one for one, _ in ends)
    assert isinstance(second, FlushEnd)
    assert (second.base, second.why_whole) == (f"{uri}/1", "")
    assert 0.99 * second.nbytes < second.borrowed_nbytes <= second.nbytes
    reasons = [one.why_whole for one in (first, third, fourth) if isinstance(one, FlushEnd)]
    assert reasons == ["there is no earlier checkpoint", "the earlier checkpoint is gone", ""]
    with holdfast.open(f"{uri}/2") as checkpoint:
        assert checkpoint.verify().ok
    if shares:
        assert len(list((tmp_path / "2").rglob("lent/*/*"))) == 2


@asynchronous
async def test_a_flush_outlives_the_silence_of_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper tells its trainers that the flush has failed, but still writes its part once the
    leader answers. Otherwise a step that the leader's trainers wait for would never be durable."""
    flush = Flush(1, str(tmp_path / "c"))
    async with kept_hosts("off", [0], [1]) as job:
        with FaultProxy(("127.0.0.1", job.hosts["a"].port)) as proxy:
            job.hosts["a"].keeper.serves_at(proxy.endpoint.removeprefix("http://"), TOKEN)
            await job.enter()
            assert await job.hosts["b"].arenas[1].flush(flush)
            leading, following = await job.step(1)
            monkeypatch.setattr(reporting, "UNHEARD_S", 0.0)
            proxy.faults = Faults(refuse=True)
            proxy.cut_all()
            event = await following.until(FlushLost)
            assert isinstance(event, FlushLost)
            assert event.problem == "the lead keeper has stopped answering"
            monkeypatch.undo()
            proxy.faults = Faults()
            assert await job.hosts["a"].arenas[0].flush(flush)
            await leading.until_durable()
            await until(lambda: not pinned(job.hosts["b"].keeper.pool.generations), "it is pinned")


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


# Bit flips in memory.


HOSTS = "abcd"
NEWEST = GenerationId(0, 2)


def slot_of(job: KeptHosts, name: str, rank: int) -> PooledSlot:
    """Find the slot with the newest image of a rank."""
    slots = job.hosts[name].keeper.pool.slots.values()
    labels = [(slot, slot.label) for slot in slots if slot.label is not None]
    (slot,) = (s for s, label in labels if (label.generation, label.rank) == (NEWEST, rank))
    return slot


def flip_image(job: KeptHosts, name: str) -> None:
    """Flip a bit in the newest image of the host's own rank."""
    slot_of(job, name, HOSTS.index(name)).memory.view[4096] ^= 1


def flip_label(job: KeptHosts, name: str) -> None:
    """Flip a bit in the label of that image, as trainers of this host read it."""
    slot = slot_of(job, name, HOSTS.index(name))
    assert slot.label is not None
    data = bytearray(slot.label.encode())
    data[len(data) // 2] ^= 1
    slot.label_fd = sealed_bytes(bytes(data))


def flip_parity(job: KeptHosts, name: str) -> None:
    """Flip a bit in each parity block of the newest step on the host."""
    for parity in job.hosts[name].keeper._guards._held[NEWEST].parities:
        if parity.memory is not None:
            parity.memory.view[17] ^= 1


async def loaded(job: KeptHosts, choice: Choice, name: str) -> set[DamagedImage]:
    """Load on one host, check the values, and return the images that are struck instead."""
    level = MemoryLevel(holdfast.Keeper(starts=False), "memory://run/")
    level._run = RUN
    level._arena = next(iter(job.hosts[name].arenas.values()))
    ranks = range(job.world)
    into = {key: torch.zeros_like(x) for rank in ranks for key, x in state_of(0, rank).items()}
    hosts = [stock.host for stock in job.stocks()]
    try:
        await asyncio.to_thread(level.load, choice, hosts, into, LoadOptions(), set())
    except holdfast.DamagedError:
        assert level._damaged
        return set(level._damaged)
    for rank in ranks:
        for key, wanted in state_of(choice.generation.step, rank).items():
            assert torch.equal(into[key], wanted)
    return set()


@pytest.mark.parametrize(
    ("flip", "mode", "name"),
    [
        (flip_image, "copy", "b"),
        (flip_image, "xor", "b"),
        (flip_label, "xor", "b"),
        (flip_image, "pq", "d"),
    ],
)
def test_a_bit_flip_on_one_host_is_repaired_from_parity(
    mode: str, name: str, flip: Callable[[KeptHosts, str], None]
) -> None:
    """The keeper is alive and still has the image, but does not count as a holder."""
    count = {"copy": 2, "xor": 3, "pq": 4}[mode]

    async def body() -> None:
        async with kept_hosts(mode, *([rank] for rank in range(count))) as job:
            await job.step(1, Protected)
            await job.step(2, Protected)
            flip(job, name)
            (choice, *_), _ = job.choices()
            assert choice.generation == NEWEST
            struck = await loaded(job, choice, name)
            assert struck != set()
            (repaired, *_), _ = job.choices(struck)
            assert repaired.generation == NEWEST
            assert await job.rebuild(repaired) == []
            for reader in (name, HOSTS[0]):
                assert await loaded(job, repaired, reader) == set()

    engine.run(asyncio.wait_for(body(), 60))


def test_a_keeper_repairs_its_own_damaged_image() -> None:
    """It repairs in place, for existing mappings. A failed rebuild leaves the image as it is."""

    async def body() -> None:
        async with kept_hosts("xor", [0], [1], [2]) as job:
            await job.step(1, Protected)
            await job.step(2, Protected)
            image = await job.image(NEWEST, 0, "a")
            request = Rebuild(NEWEST, 0, job.group(), (0,), tuple(s.host for s in job.stocks()))
            arena, keeper = job.hosts["a"].arenas[0], job.hosts["a"].keeper
            assert await arena.rebuild(request)
            assert keeper.status().counters.rebuilt == 0
            held = slot_of(job, "a", 0)
            mapped = held.memory.view
            flip_image(job, "a")
            flip_label(job, "a")
            assert await arena.rebuild(request)
            assert keeper.status().counters.rebuilt == 1
            assert await job.image(NEWEST, 0, "a") == image == bytes(mapped)
            assert pinned(keeper.pool.generations) == []
            flip_image(job, "a")
            flip_parity(job, "b")
            flip_parity(job, "c")
            assert not await arena.rebuild(request)
            assert "does not match its label" in arena.problem
            assert await job.image(NEWEST, 0, "a") != image

    engine.run(asyncio.wait_for(body(), 60))


def test_an_image_that_a_peer_cannot_provide_is_named_by_its_own_key() -> None:
    """The resume can then exclude it, if it is missing there or truncated."""
    label = Label(RUN, NEWEST, 1, 3, 16, 16, 16, 16, 0.0, digests=bytes(16))
    nowhere = holdfast.drivers.memory.MemoryDriver("memory://nowhere")
    driver = TiersDriver("memory://run/", b"{}", [PeerImage(label, nowhere, "b")])
    with pytest.raises(holdfast.DamagedError, match="the keeper b cannot provide it") as raised:
        engine.run(driver.read(label.key, 0, memoryview(bytearray(16))))
    assert raised.value.key == label.key


@pytest.mark.parametrize("peers_piece_nbytes", [None, 1 << 20, 0])
def test_images_of_all_hosts_are_read_in_pieces_of_one_size(peers_piece_nbytes: int | None) -> None:
    """A load plans them for the checkpoint; a peer whose driver has none makes them whole reads."""
    content = np.random.default_rng(0).bytes((9 << 20) + 5)
    labels = [
        Label(RUN, NEWEST, rank, 2, len(content), 0, 16, 16, 0.0, digests=bytes(16))
        for rank in range(2)
    ]
    memory = Memory(sealed_memory(len(content)), len(content))
    memory.view[:] = content
    images: list[LocalImage | PeerImage] = [LocalImage(labels[0], memory)]
    peer = holdfast.drivers.memory.MemoryDriver("pieces")
    if peers_piece_nbytes is not None:
        peer.traits = replace(peer.traits, piece_nbytes=peers_piece_nbytes)
        images.append(PeerImage(labels[1], peer, "b"))
    driver = TiersDriver("memory://run/", b"{}", images)

    async def check(key: str, start: int, nbytes: int) -> None:
        pieces: list[bytes] = []
        await driver.read_pieces(key, start, nbytes, lambda piece: pieces.append(bytes(piece)))
        wanted = memoryview(content)[start : start + nbytes]
        assert pieces == list(cut(wanted, start, driver.traits.piece_nbytes))
        into = memoryview(bytearray(nbytes))
        await driver.read(key, start, into)
        assert into == wanted

    async def body() -> None:
        await peer.put("1.safetensors", content)
        for image in images:
            await check(image.label.key, 3, len(content) - 3)
            await check(image.label.key, 4 << 20, 4 << 20)
            with pytest.raises(holdfast.DamagedError, match="ends at byte") as raised:
                await driver.read_pieces(image.label.key, 1, len(content), lambda piece: None)
            assert raised.value.key == image.label.key

    engine.run(body())
    read = 2 * (len(content) - 3 + (4 << 20))
    assert (driver.own_nbytes, driver.peer_nbytes) == (read, read * (len(images) - 1))
