"""The training script of ``holdfast keeper demo``, which torchrun starts on every rank.

It uses Holdfast as any job would, except that each rank stands for a host of its own. It resumes
from the newest step, trains until ``--until``, waits until that step is protected against the loss
of two hosts, and then waits to be killed. With ``--last`` it instead ends by training once more
from the beginning without interruption, so that the losses can be compared. HOLDFAST_KEEPER_DIR
names a folder that holds the keeper folder of each host.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

import holdfast

from ...storage.arenas.client import status_of
from ...storage.arenas.folder import KEEPER_DIR_VARIABLE, keeper_folders
from .hosts import HOSTS, LINGER, address_of, folder_of
from .journal import Journal
from .model import Learner, ModelConfig

CONFIG = ModelConfig(width=128)
KEEPER_S = 30.0
GUARD_S = 60.0
"""Long enough for a machine whose cores are all busy."""
SETTLE_S = 10.0
END_S = 120.0
_LOOK_EVERY_S = 0.02


def main() -> None:
    """Run one rank of the job. Raises the error of training, or of a save."""
    job = _arguments()
    rank = int(os.environ["RANK"])
    os.environ[KEEPER_DIR_VARIABLE] = str(folder_of(Path(os.environ[KEEPER_DIR_VARIABLE]), rank))
    journal = Journal(job.journal, rank)
    journal.write("ready", pid=os.getpid())
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        _train(job, Learner(CONFIG), journal)
    except Exception as error:
        journal.write("failed", message=f"{type(error).__name__}: {error}")
        raise
    again = Learner(CONFIG)
    for step in range(1, job.until + 1):
        journal.write("uninterrupted", step=step, loss=again.take_step(step))
    dist.destroy_process_group()
    journal.close()
    # torch's threads may still be releasing tensors; they abort the process if Python is shutting
    # down.
    os._exit(0)


def _train(job: argparse.Namespace, learner: Learner, journal: Journal) -> None:
    rank = dist.get_rank()
    keeper = holdfast.Keeper(
        every=1,
        serve=address_of(rank),
        domain=HOSTS[rank],
        protect="pq",
        linger=LINGER,
        deadline_s=KEEPER_S,
    )
    with holdfast.Checkpointer(
        job.uri, every=job.every, keeper=keeper, on_error="raise", grace_s=None
    ) as run:
        begin = run.resume(learner.state) + 1
        assert run.resumed is not None
        journal.write("resumed", **asdict(run.resumed))
        for step in range(begin, job.until + 1):
            loss = learner.take_step(step)
            journal.write("step", step=step, loss=loss)
            saving = run.step(step, learner.state)
            if saving is not None:
                _settle(saving)
        if not job.last:
            _wait_for_guard(job.until)
            journal.write("protected", step=job.until)
            time.sleep(END_S)
            raise TimeoutError("nobody has ended this job")


def _settle(saving: holdfast.SaveHandle) -> None:
    """Wait until the step is kept and protected. A step of so small a model takes less time than
    that, and the keeper would skip the next steps."""
    try:
        saving.wait()
        saving.protected.wait(SETTLE_S)
    except (holdfast.SaveError, holdfast.DeadlineError) as error:
        print(f"a step was not kept or not protected: {error}", file=sys.stderr)


def _wait_for_guard(step: int) -> None:
    """Wait until ``step`` has parity, which may lag behind the agreement on it."""
    end_s = time.monotonic() + GUARD_S
    while time.monotonic() < end_s:
        for folder in keeper_folders():
            if (status_of(folder) or {}).get("protected_step") == step:
                return
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError(f"no parity of step {step} after {GUARD_S:g} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--journal", type=Path, required=True, help="folder for the journals of the ranks"
    )
    parser.add_argument("--uri", required=True, help="where the checkpoints go")
    parser.add_argument("--until", type=int, required=True, help="the last step")
    parser.add_argument(
        "--every", type=int, required=True, help="steps between two that go to storage"
    )
    parser.add_argument(
        "--last", action="store_true", help="end, after the whole training without interruption"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
