"""A keeper whose memory outlives it. An upgraded keeper hands it to its successor. systemd keeps
the memory of a service that it restarts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import asynchronous
from support.kept_memory import (
    DEADLINE_S,
    RUN,
    capture_until,
    kept,
    state_of,
    trainer,
    two_steps,
)

from holdfast.cli.app import run as main
from holdfast.storage.arenas.arena import Arena
from holdfast.storage.arenas.client import status_of, stop
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.memory import reserved_memory, sealed_bytes
from holdfast.storage.arenas.messages import (
    OTHER_VERSION,
    VERSION,
    Agreed,
    Enter,
    HandedOver,
    Hello,
    Refused,
    TakeOver,
    decode,
    encode,
)
from holdfast.storage.arenas.sockets import connected
from holdfast.storage.keeper.descriptor_store import DescriptorStore
from holdfast.storage.keeper.slot_memory import PooledSlot, SlotPool
from holdfast.storage.training.keeper_option import launch

OPTIONS = {"run": RUN, "host": "here", "budget_nbytes": 64 << 20, "linger_s": 60.0}
NEXT_VERSION = """
import sys
from holdfast.storage.arenas import messages
messages.VERSION += 1
from holdfast.storage.keeper.process import main
sys.exit(main(sys.argv[1:]))
"""

TRAINER = """
import asyncio, pathlib, sys
from support.kept_memory import *
from holdfast.storage.arenas.messages import Refused, TakeOver, decode, encode
from holdfast.storage.arenas.sockets import connected

async def train(folder):
    async with trainer(folder) as arena:
        await two_steps(arena)
        line = connected(folder.socket)
        await line.send(encode(1, TakeOver(VERSION + 1)))
        _, answer = decode((await line.receive()).data)
        assert isinstance(answer, Refused) and "rank 0" in answer.text, answer
        line.close()

asyncio.run(train(KeeperFolder.of(RUN, pathlib.Path(sys.argv[1]))))
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeeperFolder]:
    """Return the folder of a run whose keeper is a process."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        monkeypatch.setenv(KEEPER_DIR_VARIABLE, base)
        made = KeeperFolder.of(RUN, Path(base))
        asyncio.run(launch(OPTIONS, made))
        yield made
        stop(made)


async def opened(folder: KeeperFolder, version: int = VERSION, **options: object) -> Arena:
    """Connect a rank, once the keeper listens."""
    arena = Arena(folder, Hello(version, RUN, 0, 1, "here"), DEADLINE_S, **options)  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        while not await arena.open():
            await asyncio.sleep(0.05)
    return arena


async def check_step_2(arena: Arena) -> None:
    """Check that both steps are agreed, and the bytes of the second one."""
    inventory = await arena.look_up()
    assert inventory is not None
    held = {one.generation: one.agreed for one in inventory.generations}
    assert held == {GenerationId(3, 1): True, GenerationId(3, 2): True}
    _, memory = await arena.image(GenerationId(3, 2), 0)
    assert state_of(2)["w0"].numpy().tobytes() in bytes(memory.view)
    memory.close()


def test_upgrading_a_keeper_retains_its_memory_options_and_trainers(folder: KeeperFolder) -> None:
    """A trainer that understands the new process continues to keep steps."""

    async def body() -> None:
        arena = await opened(folder)
        await two_steps(arena)
        before = status_in(await asyncio.to_thread(status_of, folder))
        assert await asyncio.to_thread(main, ["keeper", "upgrade"]) == 0
        after = status_in(await asyncio.to_thread(status_of, folder))
        assert after["pid"] != before["pid"]
        assert after["budget_nbytes"] == before["budget_nbytes"] == 64 << 20
        async with asyncio.timeout(DEADLINE_S):
            while not arena.is_open:
                await asyncio.sleep(0.05)
            await check_step_2(arena)
            while await arena.fill(3, 1 << 20) is None:
                await asyncio.sleep(0.05)
        await arena.close()

    asyncio.run(body())


def status_in(status: dict[str, object] | None) -> dict[str, object]:
    """Return the status of a keeper that is running."""
    assert status is not None
    return status


def test_a_trainer_of_another_version_replaces_the_keeper(folder: KeeperFolder) -> None:
    """It finds all steps in memory, unless ranks of the former version are still training."""

    keepers: list[subprocess.Popen[bytes]] = []

    async def start(takes_over: bool) -> None:
        assert takes_over
        arguments = ["-c", NEXT_VERSION, f'{{"run": "{RUN}", "host": "there"}}', "--take-over"]
        keepers.append(subprocess.Popen([sys.executable, *arguments]))

    async def restart() -> None:
        arena = await opened(folder, VERSION + 1, start=start)
        assert arena.host is not None
        assert arena.host.domain == "there"
        await check_step_2(arena)
        await arena.close()

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", TRAINER, str(folder.path.parent)]
    subprocess.run(command, check=True, timeout=60, env=environment)
    asyncio.run(restart())
    stop(folder)
    assert [keeper.wait(30) for keeper in keepers] == [0]


@pytest.mark.parametrize("dies", [True, False])
def test_a_keeper_continues_unless_its_successor_serves(
    folder: KeeperFolder, *, dies: bool
) -> None:
    """A successor that dies takes nothing along. Ranks that start at once replace it only once."""

    async def body() -> None:
        arena = await opened(folder)
        await two_steps(arena)
        before = status_in(await asyncio.to_thread(status_of, folder))
        line = connected(folder.socket)
        await line.send(encode(1, TakeOver(VERSION, always=dies)))
        _, answer = decode((await line.receive()).data)
        assert isinstance(answer, HandedOver if dies else Refused)
        line.close()
        async with asyncio.timeout(DEADLINE_S):
            while dies and arena.is_open:
                await asyncio.sleep(0.05)
            while not arena.is_open:
                await asyncio.sleep(0.05)
        after = status_in(await asyncio.to_thread(status_of, folder))
        assert after["pid"] == before["pid"]
        await check_step_2(arena)
        await capture_until(arena, 3, Agreed)
        await arena.close()

    asyncio.run(body())


@asynchronous
async def test_a_keeper_run_by_a_service_manager_stays() -> None:
    """Otherwise the manager would start it again, next to its successor."""
    async with kept() as (keeper, folder), trainer(folder):
        client = connected(folder.socket)
        await client.send(encode(1, TakeOver(VERSION, always=True)))
        _, answer = decode((await client.receive()).data)
        assert isinstance(answer, Refused)
        assert "service manager" in answer.text
        assert not keeper.ended.is_set()
        client.close()


@asynchronous
async def test_a_greeting_that_cannot_be_understood_is_of_another_version() -> None:
    """Its sender learns that the versions differ, not that it is malformed."""
    async with kept() as (_, folder):
        body = b'["Hello",{"version":1}]'
        line = connected(folder.socket)
        await line.send(b'["_Numbered",7,"Hello",%d]\n%s' % (len(body), body))
        number, answer = decode((await line.receive()).data)
        assert isinstance(answer, Refused)
        assert (number, answer.reason) == (7, OTHER_VERSION)
        line.close()


# A service that systemd restarts.


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    """Return a service manager that listens. The path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="sd") as base:
        made = ServiceManager(Path(base) / "notify")
        try:
            yield made
        finally:
            made.close()


def store_of(manager: ServiceManager) -> DescriptorStore:
    """Return the store as the service gets it when it starts now."""
    return DescriptorStore(manager.address, manager.handed_over())


def recalled(store: DescriptorStore, run: str = RUN) -> dict[int, PooledSlot]:
    """Return the contents of the store that a keeper of ``run`` finds."""
    pool = SlotPool()
    store.recall(pool, run)
    return pool.slots


async def two_steps_kept(manager: ServiceManager) -> None:
    """Run a keeper until it has two steps of one rank."""
    async with kept(store=store_of(manager)) as (_, folder), trainer(folder) as arena:
        await two_steps(arena)


@asynchronous
async def test_a_keeper_that_is_started_anew_has_what_the_one_before_had(
    manager: ServiceManager,
) -> None:
    """This holds even if no trainer is left to hand it over. It is known to be agreed."""
    await two_steps_kept(manager)
    async with kept(store=store_of(manager)) as (keeper, _):
        held = {one.generation: one.agreed for one in keeper.pool.generations.restorable()}
        assert held == {GenerationId(3, 1): True, GenerationId(3, 2): True}
        (image,) = keeper.pool.images(GenerationId(3, 2))
        expected = state_of(2)["w0"].numpy().tobytes()
        assert expected in bytes(image.memory.view)


@asynchronous
async def test_what_is_given_up_is_kept_no_longer(manager: ServiceManager) -> None:
    """A resume drops later steps. The next keeper would not know that."""
    await two_steps_kept(manager)
    assert len(manager.hear()) == 2
    async with kept(store=store_of(manager)) as (keeper, folder), trainer(folder) as arena:
        assert await arena.enter(Enter(4, 1))
        (name,) = manager.hear()
        assert name.startswith("agreed-")
        assert [one.generation for one in keeper.pool.generations.restorable()] == [
            GenerationId(3, 1)
        ]


def test_images_of_another_run_and_what_is_none_are_given_up(manager: ServiceManager) -> None:
    """The service may have been configured for another run. The keeper begins with nothing."""
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
        await two_steps_kept(manager)
        assert recalled(store_of(manager), "1" * 32) == {}
        assert manager.hear() == []

    asyncio.run(body())


@asynchronous
async def test_a_manager_that_does_not_listen_is_no_reason_to_fail(manager: ServiceManager) -> None:
    """Steps are kept as if there were no manager."""
    store = store_of(manager)
    manager.close()
    os.unlink(manager.address)
    async with kept(store=store) as (keeper, folder), trainer(folder) as arena:
        assert await arena.enter(Enter(3, None))
        await capture_until(arena, 1, Agreed)
        assert len(keeper.pool.generations.restorable()) == 1


def test_the_environment_says_where_it_is() -> None:
    """Processes that a keeper starts do not inherit it."""
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
        """Process the received messages; return the names that are kept now."""
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
        """Return duplicates of the descriptors, as for a service that starts."""
        self.hear()
        return [(name, os.dup(fd)) for name, fd in self.kept]

    def close(self) -> None:
        """Forget everything."""
        self._sock.close()
        while self.kept:
            os.close(self.kept.pop()[1])
