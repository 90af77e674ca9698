"""Jobs as users start them: under torchrun, from a first rank, and by ``holdfast bench``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import endings, restarted_job
from support.commands import finished
from support.servers.ports import free_port

import holdfast


@pytest.mark.nightly(32)
@pytest.mark.parametrize("what", ["cut_after_save", "leave_after_load"])
def test_a_job_whose_first_rank_serves_the_store_ends_well(what: str, tmp_path: Path) -> None:
    """Jobs of srun, mp.spawn and frameworks start in this way."""
    world, port = 2, free_port()
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
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["1"]
    with holdfast.open(tmp_path / "c") as c:
        assert c.verify().ok


@pytest.mark.nightly(21)
def test_a_job_that_torchrun_starts_again_begins_afresh(tmp_path: Path) -> None:
    """A rank dies between two calls, while the other waits for it in a save."""
    job = [restarted_job.__file__, str(tmp_path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began_s = time.monotonic()
    done = finished([*command, *job], timeout_s=110, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(p.name for p in tmp_path.glob("good *")) == ["good 0", "good 1"]
    assert time.monotonic() - began_s < 100


# A shell's background jobs and their children ignore SIGINT unless a handler is set.
BENCH = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from holdfast.cli import main; main()",
    "bench",
]


@pytest.mark.nightly(13)
def test_ranks_of_this_host_need_no_launcher(tmp_path: Path) -> None:
    """``--ranks`` starts them. All save different parts of one state."""
    command = [*BENCH, tmp_path, "--size", "4MiB", "--runs", "1", "--ranks", "2", "--json"]
    done = finished(command, timeout_s=100)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    (save,) = [phase for phase in document["phases"] if phase["name"] == "save"]
    assert document["config"]["ranks"] == 2
    assert save["operations"]["write"]["nbytes"] >= save["nbytes"]
    assert save["nbytes"] == document["config"]["nbytes"]
    assert "round 1: save: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_all_of_them(tmp_path: Path) -> None:
    """The message comes from the failed rank, not from waiting ones. Nothing is left."""
    environment = os.environ | {"HOLDFAST_FILE_MAX_CONCURRENCY": "none"}
    command = [*BENCH, tmp_path, "--size", "4MiB", "--runs", "1", "--ranks", "2"]
    done = finished(command, timeout_s=100, env=environment)
    assert done.returncode == 2
    assert "MAX_CONCURRENCY" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly(16)
def test_interrupted_ranks_leave_nothing(tmp_path: Path) -> None:
    """A SIGTERM in the middle of a round leaves neither files nor processes."""
    command = [*BENCH, tmp_path, "--size", "16MiB", "--runs", "1000", "--ranks", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("round 1" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.endswith("holdfast: interrupted\n")
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert str(tmp_path).encode() not in b"\n".join(commands)
