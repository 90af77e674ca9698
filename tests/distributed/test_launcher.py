"""As users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from support import torchrun_job

import holdfast


def test_a_job_under_torchrun_saves_and_loads(tmp_path: Path) -> None:
    """Two ranks over the launcher's own store, without a word about stores or ranks in the job."""
    (tmp_path / "out").mkdir()
    job = [torchrun_job.__file__, str(tmp_path / "c"), str(tmp_path / "out")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *job]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"0": "good", "1": "good"}
    with holdfast.open(tmp_path / "c") as c:
        assert (c.step, c.world) == (3, 2)
        assert torch.equal(c.read("w"), torch.arange(15.0).reshape(5, 3))
        assert c.tensors["own"].owners == (0, 1)
        assert c.tensors["plain"].owners == ()
