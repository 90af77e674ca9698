"""Jobs under trainers of others, as their users start them; and documents, whose code is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

__all__ = ["SIGKILLED", "documented", "killed_in_clean_up", "losses", "run_job"]

SIGKILLED = -9
_DOCS = Path(__file__).parents[2] / "docs" / "how-to"


def run_job(
    module: ModuleType | Path,
    *arguments: str | Path,
    world: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 110,
) -> subprocess.CompletedProcess[str]:
    """Run a script; with several ranks, under torchrun."""
    script = module if isinstance(module, Path) else Path(str(module.__file__))
    launcher: list[str] = []
    if world > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    tests = str(Path(__file__).parents[1])
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": tests,
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
    }
    return subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env=os.environ | settings | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    """What a job has computed at each step. Where a resumed job has repeated a step, it must have
    computed the same."""
    found: dict[int, float] = {}
    for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines():
        step, loss = json.loads(line)
        assert found.setdefault(step, loss) == loss, f"step {step} of rank {rank}"
    return found


def killed_in_clean_up(checkpoints: Path) -> set[str]:
    """The checkpoints below ``checkpoints``, by path, whose save was killed after its commit and
    before it had cleaned up: for others it may be under way, so nobody deletes them until their
    grace period is over."""
    return {
        manifest.parent.name
        for manifest in checkpoints.glob("*/manifest.safetensors")
        if any(manifest.parent.glob("data/*/attempt.json"))
    }


def documented(page: str) -> list[str]:
    """The blocks of Python of a page of how-to."""
    return re.findall(r"^```python\n(.*?)^```$", (_DOCS / page).read_text(), re.S | re.M)
