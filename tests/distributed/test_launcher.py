"""Jobs as users start them: under torchrun, and with a first rank that serves the store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import endings, restarted_job

import holdfast


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.nightly(32)
@pytest.mark.parametrize("what", ["cut_after_save", "leave_after_load"])
def test_a_job_whose_first_rank_serves_the_store_ends_well(what: str, tmp_path: Path) -> None:
    """As srun, mp.spawn and frameworks start them."""
    world, port = 3 if what == "made_anew" else 2, free_port()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    command = [sys.executable, endings.__file__, what]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    told = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(told)
    assert not any("never retrieved" in text or "Traceback" in text for text in told), "\n".join(
        told
    )
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["1", "2"][: world - 1]
    with holdfast.open(tmp_path / "c") as c:
        assert c.verify().ok


@pytest.mark.nightly(21)
def test_a_job_that_torchrun_starts_again_begins_afresh(tmp_path: Path) -> None:
    """A rank dies between two calls, while the other waits for it in a save."""
    job = [restarted_job.__file__, str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began_s = time.monotonic()
    done = subprocess.run(
        [*command, *job],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(p.name for p in tmp_path.glob("good *")) == ["good 0", "good 1"]
    assert time.monotonic() - began_s < 100
