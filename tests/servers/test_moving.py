"""Checkpoints on their way to real servers and back, and what is left there when that is
interrupted."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.drivers import HookedDriver
from support.framework_jobs import run_job
from support.inside import after_grace
from support.ranks import save_as_ranks

import holdfast
from holdfast.cli import app
from holdfast.drivers.contract import Driver
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.registry import open_driver
from holdfast.storage.operations.maintenance.copy import Orders, copy_checkpoint
from holdfast.storage.runtime.engine import run


@pytest.fixture(params=["s3", "hdfs"])
def server(request: pytest.FixtureRequest) -> str:
    """An empty root on a real server."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def below(url: str, path: str) -> str:
    """The URI of what lies at ``path`` below ``url``."""
    location, mark, options = url.partition("?")
    return f"{location}/{path}{mark}{options}"


def four_ranks(folder: Path, nbytes: int) -> None:
    """Save a checkpoint of four images."""
    driver = LocalDriver(folder)
    save_as_ranks(
        driver,
        [{"own": torch.full((nbytes,), rank, dtype=torch.uint8), "step": 4} for rank in range(4)],
    )
    run(driver.close())


def keys(url: str) -> list[str]:
    """What is visible there."""

    async def listed(driver: Driver) -> list[str]:
        try:
            return sorted([info.key async for info in driver.list()])
        finally:
            await driver.close()

    return run(listed(open_driver(url)))


@pytest.mark.nightly(10)
def test_there_and_back(server: str, tmp_path: Path) -> None:
    """A checkpoint is copied there, saved compressed, listed, verified, pruned and copied back."""
    state = {"x": torch.randn(6 << 20, dtype=torch.float64), "small": [torch.arange(9), "text"]}
    holdfast.save(tmp_path / "a", state, step=7)
    there = below(server, "run/step-7")
    assert holdfast.copy(tmp_path / "a", there).sent_nbytes > 48 << 20
    assert holdfast.copy(tmp_path / "a", there).sent_nbytes == 0
    for command in ("show", "verify"):
        assert app.run([command, there]) == 0

    # An upload that ends long before the size that it was declared with.
    mask = torch.arange(3 << 20) // (1 << 10)
    report = holdfast.save(below(server, "run/step-8"), {"mask": mask}, step=8, compression="lz4")
    assert report.stored_nbytes < report.nbytes / 2
    with holdfast.open(below(server, "run/step-8")) as c:
        assert torch.equal(
            c.read("mask", rows=slice(2_000_000, 2_000_010)), mask[2_000_000:2_000_010]
        )

    holdfast.copy(server, tmp_path / "back", recursive=True)
    assert difference(state, holdfast.load(tmp_path / "back/run/step-7")) is None
    assert torch.equal(holdfast.load(tmp_path / "back/run/step-8")["mask"], mask)
    holdfast.prune(below(server, "run"), keep_last=1)
    assert [(c.path, c.step) for c in holdfast.list_checkpoints(server)] == [("run/step-8", 8)]
    assert {key.split("/")[1] for key in keys(server)} == {"step-8"}


@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_two_ranks_save_and_load_in_another_layout(server: str, tmp_path: Path) -> None:
    """Under torchrun a tensor is saved by rows and loaded by columns, then read by this process."""
    run_job("torchrun", tmp_path, server, world=2)
    with holdfast.open(server) as c:
        assert c.world == 2
        assert torch.equal(c.read("w"), torch.arange(15.0).reshape(5, 3))


@pytest.mark.nightly(7)
def test_a_copy_that_stops_goes_on(server: str, tmp_path: Path) -> None:
    """Images that are whole on the server are not sent again; nothing is visible before the end."""
    src = tmp_path / "source"
    four_ranks(src, 20 << 20)
    ours, done = open_driver(server), itertools.count()

    async def stop(operation: str, key: str) -> None:
        if operation == "commit" and next(done) == 2:
            raise holdfast.AccessError("injected", key=key)

    async def copy(driver: Driver) -> Any:
        theirs = LocalDriver(src)
        try:
            return await copy_checkpoint(theirs, driver, Orders(False, 256 << 20))
        finally:
            await theirs.close()

    with pytest.raises(holdfast.AccessError):
        run(copy(HookedDriver(ours, before=stop)))
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.open(server)
    whole = [key for key in keys(server) if key.endswith(".safetensors")]
    assert len(whole) >= 2
    pair, sent_nbytes = run(copy(ours))
    run(ours.close())
    assert sent_nbytes == pair.nbytes * (4 - len(whole)) // 4
    assert torch.equal(holdfast.load(server)["own"], torch.zeros(20 << 20, dtype=torch.uint8))
    assert len(keys(server)) == 4 + 2


@pytest.mark.nightly(4)
def test_a_copy_that_is_killed_while_it_commits_leaves_an_attempt_for_an_hour(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has claimed its fate, and might still be about to put the manifest, for all that others
    can know. The next copy does not go on with it, and spares it; once its time is over whoever
    writes there next collects it."""
    src = tmp_path / "source"
    four_ranks(src, 1 << 20)
    dies = (
        "import os, sys, holdfast, holdfast.storage.protocol.commit as c; c.check_images = lambda "
        "*_: os.kill(os.getpid(), 9); "
    )
    done = subprocess.run(
        [sys.executable, "-c", dies + "holdfast.copy(*sys.argv[1:])", src, server],
        timeout=100,
        check=False,
    )
    assert done.returncode == -9

    def attempts() -> set[str]:
        return {key.split("/")[1] for key in keys(server) if key.startswith("data/")}

    (killed,) = attempts()
    holdfast.copy(src, server)
    assert len(attempts()) == 2
    assert killed in attempts()
    after_grace(monkeypatch, clocks_differ_s=3600.0)
    last = holdfast.save(server, {"step": 5}).attempt
    assert attempts() == {last}
