"""Checkpoints on their way to real servers and back, and what is left there when that is
interrupted."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference
from support.drivers import HookedDriver
from support.inside import after_grace
from support.ranks import save_as_ranks

import holdfast
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


def source(folder: Path, nbytes: int) -> Path:
    """A checkpoint of four images."""
    driver = LocalDriver(folder)
    save_as_ranks(
        driver,
        [{"own": torch.full((nbytes,), rank, dtype=torch.uint8), "step": 4} for rank in range(4)],
    )
    run(driver.close())
    return folder


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
    """The same to the bit, and every byte of it verifies there; listing and showing work there as
    anywhere."""
    state = {
        "x": torch.randn(6 << 20, dtype=torch.float64),
        "small": [torch.arange(9), "text"],
        "step": 7,
    }
    holdfast.save(tmp_path / "a", state)
    there = below(server, "run/step-7")
    assert holdfast.copy(tmp_path / "a", there).sent_nbytes > 48 << 20
    assert holdfast.copy(tmp_path / "a", there).sent_nbytes == 0
    with holdfast.open(there) as c:
        assert c.verify().ok
    assert [(c.path, c.step) for c in holdfast.list_checkpoints(server)] == [("run/step-7", 7)]
    holdfast.copy(server, tmp_path / "back", recursive=True)
    assert difference(state, holdfast.load(tmp_path / "back" / "run" / "step-7")) is None
    for command in ("show", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", "import holdfast.cli; holdfast.cli.main()", command, there],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.nightly(6)
def test_what_is_compressed_is_saved_copied_and_read_there(server: str) -> None:
    """An upload that ends long before the size that it was declared with: half of it is zeros, and
    some shrinks."""
    generator = torch.Generator().manual_seed(1)
    state = {
        "zeros": torch.zeros(5 << 20),
        "random": torch.randn(2 << 20, generator=generator),
        "mask": torch.randint(0, 2, (3 << 20,), generator=generator),
    }
    there = below(server, "run/step-8")
    report = holdfast.save(there, state, compression="lz4")
    assert report.stored_nbytes < report.nbytes / 2
    with holdfast.open(there) as c:
        assert torch.equal(
            c.read("mask", rows=slice(2_000_000, 2_000_010)), state["mask"][2_000_000:2_000_010]
        )
    holdfast.copy(there, below(server, "run/step-9"))
    assert difference(state, holdfast.load(below(server, "run/step-9"))) is None


@pytest.mark.nightly(7)
def test_a_copy_that_stops_goes_on(server: str, tmp_path: Path) -> None:
    """Images that are whole on the server are not sent again; nothing is visible before the end."""
    src, ours, done = source(tmp_path, 20 << 20), open_driver(server), itertools.count()

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


@pytest.mark.nightly(8)
@pytest.mark.parametrize(
    "server", ["s3", pytest.param("hdfs", marks=pytest.mark.drill)], indirect=True
)
def test_a_copy_that_is_killed_again_and_again_arrives(server: str, tmp_path: Path) -> None:
    """kill -9 of the command; each time it goes on, and in the end every byte is right."""
    src = source(tmp_path, 40 << 20)

    def killed(url: str, wait_s: float) -> bool:
        command = [
            sys.executable,
            "-c",
            "import holdfast.cli; holdfast.cli.main()",
            "cp",
            str(src),
            url,
        ]
        process = subprocess.Popen(command)
        time.sleep(wait_s)
        process.kill()
        return process.wait(60) == -9

    there, wait_s = below(server, "copy"), 1.0
    while killed(there, wait_s):
        wait_s += 0.5
    with holdfast.open(there) as c:
        assert c.verify().ok


@pytest.mark.nightly(4)
def test_a_copy_that_is_killed_while_it_commits_leaves_an_attempt_for_an_hour(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has claimed its fate, and might still be about to put the manifest, for all that others
    can know. The next copy does not go on with it, and spares it; once its time is over whoever
    writes there next collects it."""
    src = source(tmp_path, 1 << 20)
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


@pytest.mark.nightly(4)
def test_checkpoints_are_pruned(server: str) -> None:
    """With all of their files; the others stay whole."""
    for step in (1, 2, 3):
        holdfast.save(
            below(server, f"step-{step}"), {"x": torch.full((1000,), float(step)), "step": step}
        )
    report = holdfast.prune(server, keep_last=1)
    assert [c.step for c in report.checkpoints] == [1, 2]
    assert {key.split("/")[0] for key in keys(server)} == {"step-3"}
    assert (
        difference(
            {"x": torch.full((1000,), 3.0), "step": 3}, holdfast.load(below(server, "step-3"))
        )
        is None
    )
