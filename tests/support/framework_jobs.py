"""The harness of tests with other programs' trainers: jobs started as users start them, and the
code of how-to pages."""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast.storage.integrations.newest import newest_checkpoint

_DOCS = Path(__file__).parents[2] / "docs" / "how-to"
_RANK = int(os.environ.get("LOCAL_RANK", "0"))


def note_loss(folder: str | Path, step: int, loss: Any, rank: int = _RANK) -> None:
    """Record the loss of a step. Called by the job."""
    with Path(folder, f"losses-{rank}.jsonl").open("a") as file:
        print(json.dumps([step, float(loss)]), file=file)


def die() -> None:
    """Kill this process. Called by the job."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_job(
    name: str, folder: Path, *arguments: str | Path | None, world: int = 1, is_killed: bool = False
) -> None:
    """Run ``NAME_job.py``; with several ranks, under torchrun. Fails unless it ends as expected.

    ``folder`` is its first argument, and is created.
    """
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONWARNINGS": "ignore",
        "PYTHONFAULTHANDLER": "1",
    }
    script = Path(__file__).with_name(f"{name}_job.py")
    given = [str(each) for each in arguments if each is not None]
    ended = subprocess.run(
        [sys.executable, *(launcher if world > 1 else ()), str(script), str(folder), *given],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    expected = 0
    if is_killed:
        expected = 1 if world > 1 else -signal.SIGKILL
    assert ended.returncode == expected, ended.stderr[-3000:]


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    """Return a job's loss at each step. A repeated step must have computed the same one."""
    found: dict[int, float] = {}
    for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines():
        step, loss = json.loads(line)
        assert found.setdefault(step, loss) == loss, f"step {step} of rank {rank}"
    return found


def check_losses(cut: Path, whole: Path, world: int = 1) -> None:
    """Fail unless each rank of two jobs has computed the same at all steps, to the last bit."""
    for rank in range(world):
        assert losses(cut, rank) == losses(whole, rank)


def killed_in_clean_up(checkpoints: Path) -> set[str]:
    """Return the checkpoints whose save was killed between its commit and the end of its clean-up.

    Others must treat them as live until their grace period is over, so nobody deletes them.
    """
    return {
        manifest.parent.name
        for manifest in checkpoints.glob("*/manifest.safetensors")
        if any(manifest.parent.glob("data/*/attempt.json"))
    }


PAGE_TOTAL = 12
"""The steps of a job whose script is a page, which saves every fourth."""
_SHORTER = {"500": "4", "501": "5"}
"""Numbers of steps on the pages, and in their jobs."""


def check_page(
    page: str, folder: Path, *options: str, worlds: Sequence[int] = (1, 2, 1)
) -> dict[int, float]:
    """Run a page's script, kill it, resume it on another number of ranks, twice; return the losses.

    Fails unless each job resumes from the newest committed step, with the losses of the job before,
    and the last one ends. See :mod:`.page_job`.
    """
    known: dict[int, float] = {}
    newest = 0
    for world, die_at in zip(worlds, (6, 10, None), strict=True):
        killed = () if die_at is None else ("--die-at", str(die_at))
        run_job("page", folder, page, *options, *killed, world=world, is_killed=die_at is not None)
        noted = _noted(folder)
        assert [step for step, _ in noted] == list(range(newest + 1, newest + 1 + len(noted)))
        for step, loss in noted:
            assert known.setdefault(step, loss) == pytest.approx(loss, rel=1e-4), step
        assert max(known) == (PAGE_TOTAL if die_at is None else die_at)
        newest = newest_step(folder / "run")
        assert newest == (PAGE_TOTAL if die_at is None else die_at - 2)
    return known


def newest_step(run: Path) -> int:
    """Return the step that a run resumes from, 0 if nothing is saved yet."""
    newest = newest_checkpoint(run)
    if newest is None:
        theirs = [path.parent.name for path in run.glob("step-*/metadata.pkl")]  # in torch's format
        return max((int(name.removeprefix("step-")) for name in theirs), default=0)
    with holdfast.open(newest) as checkpoint:
        assert checkpoint.step is not None
        return checkpoint.step


def _noted(folder: Path) -> list[tuple[int, float]]:
    """Take the steps and losses of the first rank's last job."""
    file = folder / "losses-0.jsonl"
    noted = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    return noted


def documented(page: str) -> list[str]:
    """Return the Python blocks of a how-to page."""
    return re.findall(r"^```python\n(.*?)^```$", (_DOCS / page).read_text(), re.S | re.M)


def run_script(code: str, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run code of a page as it is, in ``folder`` instead of its storage, and with fewer steps."""
    return run_block(code, folder, names, {**_SHORTER, "s3://bucket": str(folder)})


def run_block(
    block: str, folder: Path, names: dict[str, Any], replaced: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Run a block of a page; return the names that it leaves.

    ``/scratch`` becomes ``folder``; ``replaced`` are further changes of the code.
    """
    for old, new in {**replaced, "/scratch": str(folder)}.items():  # the folder's name comes last
        block = block.replace(old, new)
    program = folder / f"block-{os.getpid()}.py"
    program.write_text(block)
    return runpy.run_path(str(program), names)


_MOMENT_S = 0.2


def leave() -> None:
    """Leave the process group, and let gloo's threads come to rest before the interpreter ends.

    Such a thread releases the tensors of a collective a moment after the collective has ended, and
    needs the interpreter's lock for Python tensors. If the interpreter ends just then, the process
    dies of SIGABRT. DDP keeps its process group alive, so destroying the group ends no thread.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_MOMENT_S)
