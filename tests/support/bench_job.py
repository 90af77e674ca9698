"""Run ``holdfast bench`` in processes of its own, also under torchrun or interrupted; list
leftovers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.drivers.registry import open_driver

__all__ = ["HOLDFAST", "assert_interrupted_cleanly", "bench_by_torchrun", "keys_at"]

_HOLDFAST = "from holdfast.cli import main; main()"
# A shell's background jobs and their children ignore SIGINT unless a handler is set.
HOLDFAST = (
    sys.executable,
    "-c",
    f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {_HOLDFAST}",
)
"""The command, which heeds a Ctrl-C whatever started it."""


def bench_by_torchrun(uri: str, ranks: int) -> Any:
    """The document that one round of 4 MiB gives. So little is marked as invalid, which is a
    failure to torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command += [f"--nproc-per-node={ranks}", sys.executable, "-c", _HOLDFAST]
    command += ["bench", uri, "--size", "4MiB", "--runs", "1", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_interrupted_cleanly(
    folder: Path, *options: str, how: signal.Signals = signal.SIGINT
) -> None:
    """Interrupt a measurement in ``folder`` during a round; check that it ends as interrupted. It
    must also leave no files."""
    command = [*HOLDFAST, "bench", folder, "--size", "16MiB", "--runs", "1000", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("round 1" in line for line in process.stderr)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.endswith("holdfast: interrupted\n")
    assert "Traceback" not in said
    assert list(folder.iterdir()) == []


def keys_at(uri: str) -> list[str]:
    """Return all keys at a URI."""

    async def listed() -> list[str]:
        driver = open_driver(uri)
        try:
            return [info.key async for info in driver.list("")]
        finally:
            await driver.close()

    return asyncio.run(listed())
