"""Checkpoints and objects on emulators of Azure Blob Storage and of Cloud Storage: what the
conformance kit does not ask."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.drivers import asynchronous, keys

import holdfast
from holdfast.drivers.conformance.place import held_now
from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import Uri, join, parse
from holdfast.errors import DamagedError, NotFoundError

MIB = 1 << 20

ROUNDS = 150
PAGE = 5000
LANES = 16


@pytest.fixture(params=["az", "gs"])
def root(request: pytest.FixtureRequest) -> Uri:
    """An empty root on an emulator."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return parse(url)


def bare(root: Uri, **options: str) -> Driver:
    """A driver without the layers that users get around it."""
    uri = Uri(root.scheme, root.location, root.options | options)
    return open_driver(uri, retries=0, op_timeout_s="off")


@pytest.mark.nightly(14)
def test_a_checkpoint_goes_there_and_back(root: Uri, tmp_path: Path) -> None:
    """Saved, replaced, loaded, read in part, copied to a disk and from it, listed, verified by the
    command, and pruned."""
    first = {"x": torch.randn(5 << 20), "small": [torch.arange(9), "text"], "step": 1}
    second = {"x": torch.randn(5 << 20), "small": [torch.arange(7), "other"], "step": 1}
    one, two = str(join(root, "run/step-1")), str(join(root, "run/step-2"))
    holdfast.save(one, first)
    assert difference(first, holdfast.load(one)) is None
    holdfast.save(one, second)
    assert difference(second, holdfast.load(one)) is None
    with holdfast.open(one) as checkpoint:
        assert torch.equal(
            checkpoint.read("x", rows=slice(5_000_000, 5_000_010)), second["x"][5_000_000:5_000_010]
        )

    holdfast.copy(one, tmp_path / "copy")
    assert difference(second, holdfast.load(tmp_path / "copy")) is None
    holdfast.copy(tmp_path / "copy", two)
    assert difference(second, holdfast.load(two)) is None
    assert [found.path for found in holdfast.list_checkpoints(str(root))] == [
        "run/step-1",
        "run/step-2",
    ]

    verify = [sys.executable, "-c", "import holdfast.cli; holdfast.cli.main()", "verify", two]
    done = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    holdfast.save(str(join(root, "run/step-3")), {"step": 3})
    assert len(holdfast.prune(str(join(root, "run")), keep_last=1).checkpoints) == 2
    assert [found.path for found in holdfast.list_checkpoints(str(root))] == ["run/step-3"]


@asynchronous
async def test_an_object_of_many_parts_comes_back_whole_and_by_ranges(root: Uri, seed: int) -> None:
    """Ranges within a part, across parts and to the end; one beyond the end is damage."""
    driver = bare(root, part_size="5MiB")
    content = random.Random(seed).randbytes(17 * MIB + 123)
    upload = await driver.create("a/x", len(content))
    for start in range(0, len(content), 5 * MIB):
        await upload.write(start, memoryview(content)[start : start + 5 * MIB])
    await upload.commit()
    assert (await driver.stat("a/x")).nbytes == len(content)
    for start, nbytes in (
        (0, 1),
        (5 * MIB - 7, 14),
        (3 * MIB, 9 * MIB),
        (len(content) - 5, 5),
        (0, len(content)),
    ):
        into = bytearray(nbytes)
        await driver.read("a/x", start, memoryview(into))
        assert into == content[start : start + nbytes]
    with pytest.raises(DamagedError):
        await driver.read("a/x", len(content) - 5, memoryview(bytearray(6)))
    await driver.close()


@asynchronous
async def test_an_upload_in_parts_that_is_interrupted_is_not_visible(root: Uri) -> None:
    """Its process dies, with two parts at the store. Nothing is listed or read; sweep and a new
    upload do not mind it, and what the new one stores is its own bytes."""
    dies = (
        "import asyncio, os, sys\n"
        "from holdfast.drivers.registry import open_driver\n"
        "async def main():\n"
        "    driver = open_driver(sys.argv[1], part_size='5MiB')\n"
        "    upload = await driver.create('a/x', 15 << 20)\n"
        "    await upload.write(0, memoryview(b'o' * (10 << 20)))\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", dies, str(root)]
    dead = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert dead.returncode == -9, dead.stderr

    driver = bare(root, part_size="5MiB")
    assert await keys(driver) == []
    with pytest.raises(NotFoundError):
        await driver.stat("a/x")
    await driver.sweep("a")
    upload = await driver.create("a/x", 11 * MIB)
    await upload.write(0, memoryview(b"n" * (11 * MIB)))
    assert await keys(driver) == []
    await upload.commit()
    into = bytearray(11 * MIB)
    await driver.read("a/x", 0, memoryview(into))
    assert into == b"n" * (11 * MIB)
    await driver.delete_all("a")
    assert await keys(driver) == []
    await driver.close()


@pytest.mark.nightly(13)
def test_no_socket_outlives_a_listing(root: Uri) -> None:
    """However often a driver is opened, asked for a listing and closed: the client's threads close
    its connections."""

    async def use() -> None:
        driver = bare(root)
        assert await keys(driver) == []
        await driver.close()

    asyncio.run(use())
    for _ in range(ROUNDS):
        held = held_now()
        asyncio.run(use())
        assert held.outlived_by() == []


@pytest.mark.drill
@asynchronous
async def test_a_listing_of_more_than_a_page_is_complete(az_url: str) -> None:
    """Azure lists 5,000 blobs at a time: all that there are come once each, in order."""
    driver = bare(parse(az_url))
    expected = [f"n/{n:04}" for n in range(PAGE + 10)]

    async def lane(first: int) -> None:
        for key in expected[first::LANES]:
            await driver.put(key, b"")

    await asyncio.gather(*(lane(first) for first in range(LANES)))
    assert await keys(driver, "n") == expected
    assert await keys(driver) == expected
    await driver.close()
