"""A keeper service that systemd restarts: its successor has the same images in memory."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.drivers import asynchronous
from support.kept_memory import RUN, Told, capture, kept, state_of, trainer

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.memory import reserved_memory, sealed_bytes
from holdfast.storage.arenas.messages import Agreed, Enter
from holdfast.storage.keeper.descriptor_store import DescriptorStore
from holdfast.storage.keeper.slot_memory import PooledSlot, SlotPool


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    """What keeps descriptors."""
    with service_manager() as made:
        yield made


def store_of(manager: ServiceManager) -> DescriptorStore:
    """As the service has it when it is started now."""
    return DescriptorStore(manager.address, manager.handed_over())


def recalled(store: DescriptorStore, run: str = RUN) -> dict[int, PooledSlot]:
    """Return what a keeper of ``run`` finds in the store."""
    pool = SlotPool()
    store.recall(pool, run)
    return pool.slots


async def two_steps(manager: ServiceManager) -> None:
    """A keeper has two steps of one rank, and is gone."""
    async with kept(store=store_of(manager)) as (_, folder), trainer(folder) as arena:
        assert await arena.enter(Enter(3, None))
        for step in (1, 2):
            told = Told()
            await capture(arena, step, told)
            await told.until(Agreed)


@asynchronous
async def test_a_keeper_that_is_started_anew_has_what_the_one_before_had(
    manager: ServiceManager,
) -> None:
    """Also where no trainer is left to hand it over, and it is known to be agreed on."""
    await two_steps(manager)
    async with kept(store=store_of(manager)) as (keeper, _):
        held = {one.generation: one.agreed for one in keeper.pool.generations.restorable()}
        assert held == {GenerationId(3, 1): True, GenerationId(3, 2): True}
        (image,) = keeper.pool.images(GenerationId(3, 2))
        expected = state_of(2)["w0"].numpy().tobytes()
        assert expected in bytes(image.memory.view)


@asynchronous
async def test_what_is_given_up_is_kept_no_longer(manager: ServiceManager) -> None:
    """A resume drops later steps: a keeper that came after it would not know that."""
    await two_steps(manager)
    assert len(manager.hear()) == 2
    async with kept(store=store_of(manager)) as (keeper, folder), trainer(folder) as arena:
        assert await arena.enter(Enter(4, 1))
        (name,) = manager.hear()
        assert name.startswith("agreed-")
        assert [one.generation for one in keeper.pool.generations.restorable()] == [
            GenerationId(3, 1)
        ]


def test_images_of_another_run_and_what_is_none_are_given_up(manager: ServiceManager) -> None:
    """As where the service was told to keep another run. The keeper begins with nothing."""
    memory = reserved_memory(4096)
    reading, writing = os.pipe()
    label = sealed_bytes(b"no label")
    sent = {"one": [memory.fd], "pipes": [reading, writing], "bad": [label, memory.fd]}
    for name, fds in sent.items():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(manager.address)
            socket.send_fds(sock, [f"FDSTORE=1\nFDNAME={name}".encode()], fds)
        store = store_of(manager)
        assert recalled(store) == {}
        assert manager.hear() == []
    for fd in (reading, writing, label):
        os.close(fd)
    memory.close()

    async def body() -> None:
        await two_steps(manager)
        assert recalled(store_of(manager), "1" * 32) == {}
        assert manager.hear() == []

    asyncio.run(body())


@asynchronous
async def test_a_manager_that_does_not_listen_is_no_reason_to_fail(manager: ServiceManager) -> None:
    """Steps are kept as without it."""
    store = store_of(manager)
    manager.close()
    os.unlink(manager.address)
    async with kept(store=store) as (keeper, folder), trainer(folder) as arena:
        assert await arena.enter(Enter(3, None))
        told = Told()
        await capture(arena, 1, told)
        await told.until(Agreed)
        assert len(keeper.pool.generations.restorable()) == 1


def test_the_environment_says_where_it_is() -> None:
    """And nothing of it is left for processes that a keeper starts."""
    assert DescriptorStore.of_environment({}) is None
    assert DescriptorStore.of_environment({"NOTIFY_SOCKET": "vsock:2:1"}) is None
    of_another = {
        "NOTIFY_SOCKET": "/run/notify",
        "LISTEN_PID": "1",
        "LISTEN_FDS": "2",
        "LISTEN_FDNAMES": "a:b",
        "HOME": "/",
    }
    store = DescriptorStore.of_environment(of_another)
    assert store is not None
    assert recalled(store) == {}
    assert of_another == {"HOME": "/"}


class ServiceManager:
    """``kept``: names and descriptors, the newest first, as systemd 252 hands them over."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.address)
        self._sock.setblocking(False)
        self.kept: list[tuple[str, int]] = []

    def hear(self) -> list[str]:
        """Take what was sent; the names that are kept now."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 4096, 16)
            except BlockingIOError:
                return sorted({name for name, _ in self.kept})
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = lines.get("FDNAME", "")
            if "FDSTOREREMOVE" in lines:
                for one in [one for one in self.kept if one[0] == name]:
                    os.close(one[1])
                    self.kept.remove(one)
            for fd in fds:
                if any(os.path.samestat(os.fstat(fd), os.fstat(other)) for _, other in self.kept):
                    os.close(fd)
                else:
                    self.kept.insert(0, (name, fd))

    def handed_over(self) -> list[tuple[str, int]]:
        """What the service gets when it is started anew: descriptors of its own."""
        self.hear()
        return [(name, os.dup(fd)) for name, fd in self.kept]

    def close(self) -> None:
        """Keep nothing any more."""
        self._sock.close()
        while self.kept:
            os.close(self.kept.pop()[1])


@contextmanager
def service_manager() -> Iterator[ServiceManager]:
    """One that listens. The path of a socket is short."""
    with tempfile.TemporaryDirectory(prefix="sd") as folder:
        manager = ServiceManager(Path(folder) / "notify")
        try:
            yield manager
        finally:
            manager.close()
