"""Distributed file systems, mounted twice: two clients with caches of their own, as on two hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.conformance_run import run_conformance
from support.servers.cephfs import Cephfs, find_cephfs
from support.servers.moosefs import Moosefs, find_moosefs
from support.servers.mounts import FUSE, fuse_works
from support.servers.own_network import NETWORK, network_works

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.errors import ExistsError

pytestmark = pytest.mark.drill

KIT_S = 280
RACES = 60
SAVES = 8
Mounts = tuple[Path, Path]


@pytest.fixture(scope="module", params=["moosefs", "cephfs"])
def mounts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounts]:
    """Start a file system, mounted at two places."""
    if not fuse_works():
        pytest.skip(FUSE)
    found = find_moosefs() if request.param == "moosefs" else find_cephfs()
    if not found:
        pytest.skip(f"{request.param} is not installed: make test-servers")
    if request.param == "moosefs" and not network_works():
        pytest.skip(NETWORK)
    folder = tmp_path_factory.mktemp(request.param)
    server = Moosefs(folder) if request.param == "moosefs" else Cephfs(folder)
    server.start()
    try:
        yield server.mounts
    finally:
        server.stop()


@pytest.mark.timeout(KIT_S + 60)
def test_the_kit_passes(mounts: Mounts, tmp_path: Path) -> None:
    """Check that every trial that applies passes, and that no deviation is declared."""
    output = run_conformance(str(mounts[0] / "kit"), cwd=tmp_path, timeout_s=KIT_S)
    assert "deviations      0 declared, 0 cases deviated" in output


def test_of_two_exclusive_puts_one_wins(mounts: Mounts) -> None:
    """Check that exactly one succeeds, and that both mounts read its bytes at once."""
    winners = asyncio.run(_races(mounts))
    assert set(winners) <= {0, 1}


async def _races(mounts: Mounts) -> list[int]:
    drivers = [LocalDriver(mount / "races") for mount in mounts]
    winners = []
    try:
        for race in range(RACES):
            key = f"{race % 7}/{race}"
            puts = (
                driver.put(key, b"%d" % rank, exclusive=True) for rank, driver in enumerate(drivers)
            )
            came = await asyncio.gather(*puts, return_exceptions=True)
            lost = [error for error in came if error is not None]
            assert [type(error) for error in lost] == [ExistsError], came
            winner = came.index(None)
            assert [await driver.get(key) for driver in drivers] == [b"%d" % winner] * 2
            winners.append(winner)
    finally:
        for driver in drivers:
            await driver.close()
    return winners


def test_replaced_objects_are_read_whole(mounts: Mounts) -> None:
    """Read through one mount while the other replaces the object again and again: never a mixture,
    never missing, and never older than the read before."""
    asyncio.run(_replaced(mounts))


async def _replaced(mounts: Mounts) -> None:
    writer, reader = (LocalDriver(mount / "replaced") for mount in mounts)
    nbytes = 1 << 20
    try:
        await writer.put("a", bytes([0]) * nbytes)
        writing = asyncio.create_task(_write(writer, nbytes))
        last = 0
        while not writing.done():
            found = await reader.get("a")
            assert found == found[:1] * nbytes
            assert found[0] >= last
            last = found[0]
        await writing
        assert await reader.get("a") == bytes([SAVES]) * nbytes
    finally:
        await writer.close()
        await reader.close()


async def _write(writer: LocalDriver, nbytes: int) -> None:
    for value in range(1, SAVES + 1):
        await writer.put("a", bytes([value]) * nbytes)


def test_what_one_mount_saves_the_other_loads(mounts: Mounts) -> None:
    """Save, overwrite, list and prune through one mount, and look through the other at once, which
    has looked at the same folder just before."""
    first, second = (str(mount / "saved") for mount in mounts)
    assert holdfast.list_checkpoints(second) == []
    for step in range(SAVES):
        there, here = (first, second) if step % 2 == 0 else (second, first)
        state = {"w": torch.full((300_000,), float(step)), "step": step}
        holdfast.save(f"{there}/step-{step}", state, step=step)
        holdfast.save(f"{there}/latest", state, step=step)
        for name in (f"step-{step}", "latest"):
            loaded = holdfast.load(f"{here}/{name}")
            assert loaded["step"] == step
            assert torch.equal(loaded["w"], state["w"])
        assert sum(found.step == step for found in holdfast.list_checkpoints(here)) == 2
        with holdfast.open(f"{here}/latest") as checkpoint:
            assert not checkpoint.verify().damages
    holdfast.prune(first, keep_last=1)
    kept = {found.path for found in holdfast.list_checkpoints(second)}
    assert kept == {f"step-{SAVES - 1}", "latest"}


def test_two_saves_to_one_place_leave_one_state(mounts: Mounts) -> None:
    """Start both at the same time, one through each mount. One takes over from the other, or each
    aborts the other and both say so. Then both mounts load the same whole state: that of a save
    that succeeded, if one did."""
    uris = [str(mount / "contended") for mount in mounts]
    holdfast.save(uris[0], _filled(-1))
    for race in range(SAVES):
        states = [_filled(2 * race + rank) for rank in range(2)]
        handles = [holdfast.async_save(uri, state) for uri, state in zip(uris, states, strict=True)]
        saved = [2 * race + rank for rank, handle in enumerate(handles) if _succeeds(handle)]
        loaded = [holdfast.load(uri) for uri in uris]
        (value,) = {
            float(value) for state in loaded for w in state.values() for value in w.unique()
        }
        assert value in saved or not saved


def _filled(value: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((100_000,), float(value)) for name in "ab"}


def _succeeds(handle: holdfast.SaveHandle) -> bool:
    try:
        handle.wait()
    except holdfast.SupersededError:
        return False
    return True
