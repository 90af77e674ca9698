"""A keeper that is replaced, as after an upgrade of Holdfast, hands its memory to its successor."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import asynchronous
from support.kept_memory import DEADLINE_S, RUN, Told, capture, kept, state_of, trainer

from holdfast.cli.app import run as main
from holdfast.storage.arenas.arena import Arena
from holdfast.storage.arenas.client import status_of, stop
from holdfast.storage.arenas.folder import KEEPER_DIR_VARIABLE, KeeperFolder
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import (
    OTHER_VERSION,
    VERSION,
    Agreed,
    Enter,
    Hello,
    Refused,
    TakeOver,
    decode,
    encode,
)
from holdfast.storage.arenas.sockets import connected
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
from holdfast.storage.arenas.messages import Agreed, Refused, TakeOver, decode, encode
from holdfast.storage.arenas.sockets import connected

async def train(folder):
    async with trainer(folder) as arena:
        assert await arena.enter(Enter(3, None))
        for step in (1, 2):
            told = Told()
            await capture(arena, step, told)
            await told.until(Agreed)
        line = connected(folder.socket)
        await line.send(encode(1, TakeOver(VERSION + 1)))
        _, answer = decode((await line.receive()).data)
        assert isinstance(answer, Refused) and "rank 0" in answer.text, answer
        line.close()

asyncio.run(train(KeeperFolder.of(RUN, pathlib.Path(sys.argv[1]))))
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeeperFolder]:
    """The folder of a run whose keeper is a process."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        monkeypatch.setenv(KEEPER_DIR_VARIABLE, base)
        made = KeeperFolder.of(RUN, Path(base))
        asyncio.run(launch(OPTIONS, made))
        yield made
        stop(made)


async def two_steps(arena: Arena) -> None:
    """Have the keeper agree on two steps of one rank."""
    assert await arena.enter(Enter(3, None))
    for step in (1, 2):
        told = Told()
        await capture(arena, step, told)
        await told.until(Agreed)


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


@asynchronous
async def test_a_keeper_run_by_a_service_manager_stays() -> None:
    """The manager would start it again, next to its successor."""
    async with kept() as (keeper, folder), trainer(folder):
        client = connected(folder.socket)
        await client.send(encode(1, TakeOver(VERSION)))
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
