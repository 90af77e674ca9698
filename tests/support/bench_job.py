"""``holdfast bench`` under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["bench_by_torchrun"]

_HOLDFAST = "from holdfast.cli import main; main()"


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
