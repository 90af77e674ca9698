"""Keepers of several hosts: agreement, protection of each other's images, and lost hosts.

These are real keepers that serve each other over HTTP within one process.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.drivers import asynchronous
from support.kept_hosts import TOKEN, KeptHosts, kept_hosts
from support.kept_memory import Told, pinned, state_of
from support.servers.proxy import FaultProxy, Faults

import holdfast
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import (
    Agreed,
    Done,
    Durable,
    Flush,
    FlushFailed,
    Protected,
    Rebuild,
)
from holdfast.storage.keeper import slot_memory
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.standing import Report
from holdfast.storage.ranks.messages import codec


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
            told = await job.step(2, Durable)
            await until(
                lambda: all(kinds(one) >= {Agreed, Protected, Durable} for one in told),
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


@pytest.mark.nightly(3)
@pytest.mark.parametrize(
    ("mode", "count", "lost"),
    [("copy", 2, "a"), ("xor", 3, "b"), ("pq", 4, "bd")],
)
@asynchronous
async def test_lost_hosts_are_made_up_for(mode: str, count: int, lost: str) -> None:
    """Images of lost hosts are rebuilt byte for byte on the others; the job resumes protected."""
    async with kept_hosts(mode, *([rank] for rank in range(count))) as job:
        await job.step(1, Protected)
        newest = GenerationId(0, 1)
        images = [await job.image(newest, rank, "abcd"[rank]) for rank in range(count)]
        for name in lost:
            await job.lose(name)
        for name in lost:
            await job.add(f"new-{name}", ["abcd".index(name)])
        (choice,), problems = job.choices()
        assert problems == []
        assert choice.generation == newest
        assert {one.rank for one in choice.rebuilt} == {"abcd".index(name) for name in lost}
        assert await job.rebuild(choice) == []
        for rank, (name, *_) in enumerate(choice.holders):
            assert await job.image(newest, rank, name) == images[rank]
        await job.enter(1)
        await job.step(2, Protected)
        assert {h.keeper.status().protected for h in job.hosts.values()} == {GenerationId(1, 2)}


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
    """The status that the lead keeper answers a report with."""
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
async def test_a_flush_whose_lead_keeper_dies_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """It learns from other keepers that the step was agreed, and from its trainer of the flush."""
    async with kept_hosts("off", [0], [1]) as job:
        a, b = (job.hosts[name] for name in "ab")
        flush = Flush(1, str(tmp_path / "c"))
        assert await b.arenas[1].flush(flush)  # and not by rank 0
        told = await job.step(1)
        later = await job.step(2)
        assert all(Agreed in kinds(one) for one in (*told, *later))
        a.keeper._agreement.reporting.lead = Lead("another")
        a.keeper._agreement.reporting.hosts = ()
        await a.arenas[0].enter(a.arenas[0]._enters)
        assert FlushFailed not in kinds(told[1])
        assert await a.arenas[0].flush(flush)
        for one in told:
            assert isinstance(await one.until((Durable, FlushFailed)), Durable)
        assert pinned(b.keeper.pool.generations) == []


@asynchronous
async def test_what_the_lead_keeper_never_heard_of_takes_no_memory_for_long(tmp_path: Path) -> None:
    """Flushes that only a follower was asked for end, and their slots take later steps."""
    async with kept_hosts("off", [0], [1]) as job:
        told = {}
        for step in (1, 2):
            flush = Flush(step, str(tmp_path / "c"))
            assert await job.hosts["b"].arenas[1].flush(flush)
            _, told[step] = await job.step(step)
        event = await told[1].until(FlushFailed)
        assert isinstance(event, FlushFailed)
        assert event.final
        assert event.text == "a later step is flushed instead of this one"
        for step in (3, 4, 5):
            assert all(Agreed in kinds(one) for one in await job.step(step)), step
        event = await told[2].until(FlushFailed)
        assert isinstance(event, FlushFailed)
        assert event.text.startswith("some images of this step are no longer in memory")
        assert pinned(job.hosts["b"].keeper.pool.generations) == []
