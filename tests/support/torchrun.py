"""Jobs that are started as users start them: two ranks under torchrun, on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["run_job"]

TESTS = Path(__file__).parents[1]


def run_job(program: ModuleType, folder: Path, uri: str | None = None) -> dict[str, str]:
    """Run ``program`` on two ranks, with where to save (None: in ``folder``), and a folder in which
    each rank leaves what it found. Returns that, by rank. Fails where the job does."""
    if uri is None:
        uri = str(folder / "c")
    out = folder / "out"
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(program.__file__), uri, str(out)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(TESTS),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name: path.read_text() for path in out.iterdir()}
