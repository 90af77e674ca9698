"""``kill -9`` of a process that stores."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.drivers.local.driver import LocalDriver

# Every object is one byte value, repeated; its key tells which, and how often.
WRITER = """
import asyncio, sys
from holdfast.drivers.local.driver import LocalDriver
async def upload(driver, key, content):
    new = await driver.create(key, len(content))
    view = memoryview(content)
    await asyncio.gather(*(new.write(at, view[at : at + 100_000]) for at in range(0, len(content), 100_000)))
    await new.commit()
async def main(root):
    driver = LocalDriver(root)
    for n in range(1_000_000):
        content = bytes([n % 251]) * (200_000 + n)
        await asyncio.gather(
            upload(driver, f"data/{n}", content),
            driver.put("latest", content),
            driver.put(f"lock/{n}", content, exclusive=True),
        )
        if n == 0:
            print("ready", flush=True)
asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("round_", range(5))
def test_a_killed_process_leaves_whole_objects(tmp_path: Path, round_: int) -> None:
    """At whatever moment it dies."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "root")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(random.Random(round_).uniform(0.02, 0.2))
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
    assert asyncio.run(_all_whole(tmp_path / "root")) > 0
    assert os.listdir(tmp_path / "root") == ["latest"]


async def _all_whole(root: Path) -> int:
    driver = LocalDriver(root)
    count = 0
    async for info in driver.list():
        content = await driver.get(info.key)
        n = len(content) - 200_000
        assert content == bytes([n % 251]) * (200_000 + n)
        assert info.key in ("latest", f"data/{n}", f"lock/{n}")
        count += 1
    await driver.delete_all("data")
    await driver.delete_all("lock")
    for name in os.listdir(root):
        if name.startswith(".latest."):  # beside "latest", below no prefix that could be deleted
            (root / name).unlink()
    await driver.close()
    return count
