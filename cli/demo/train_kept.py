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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

from ...storage.arenas.client import status_of
from ...storage.arenas.folder import KEEPER_DIR_VARIABLE, keeper_folders
from .hosts import HOSTS, LINGER, address_of, folder_of
from .journal import Journal

WIDTH = 256
HIDDEN = 2048
ROWS = 32
"""Samples of a rank in a batch."""
RATE = 1e-3
KEEPER_S = 30.0
GUARD_S = 60.0
"""Long enough for a machine whose cores are all busy."""
SETTLE_S = 10.0
END_S = 120.0
_LOOK_EVERY_S = 0.02


class Training:
    """A two-layer perceptron that learns the function of another one, sharded over all ranks. With
    Adam's two moments it takes 12 MiB."""

    def __init__(self, seed: int) -> None:
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        torch.manual_seed(seed)
        self._teacher = _perceptron(64)
        self._model = _perceptron(HIDDEN)
        fully_shard(self._model, mesh=init_device_mesh("cpu", (self._world,)))
        self._optim = torch.optim.Adam(self._model.parameters(), lr=RATE)
        self.state: dict[str, Any] = {"model": self._model, "optim": self._optim, "step": 0}

    def take_step(self, step: int) -> float:
        """Train one step and return the mean loss of all ranks. The samples depend only on the step
        and the rank."""
        random = torch.Generator().manual_seed(step * self._world + self._rank)
        samples = torch.randn(ROWS, WIDTH, generator=random)
        with torch.no_grad():
            wanted = self._teacher(samples)
        loss = F.mse_loss(self._model(samples), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optim.step()
        self._optim.zero_grad()
        self.state["step"] = step
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / self._world


def _perceptron(hidden: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, WIDTH)
    )


def main() -> None:
    """Run one rank of the job. Raises the error of training, or of a save."""
    job = _arguments()
    rank = int(os.environ["RANK"])
    os.environ[KEEPER_DIR_VARIABLE] = str(folder_of(Path(os.environ[KEEPER_DIR_VARIABLE]), rank))
    journal = Journal(job.journal, rank)
    journal.write("ready", pid=os.getpid())
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    training = Training(job.seed)
    try:
        _train(job, training, journal)
    except Exception as error:
        journal.write("failed", message=f"{type(error).__name__}: {error}")
        raise
    again = Training(job.seed)
    for step in range(1, job.until + 1):
        journal.write("uninterrupted", step=step, loss=again.take_step(step))
    dist.destroy_process_group()
    journal.close()
    # torch's threads may still be releasing tensors; they abort the process if Python is shutting
    # down.
    os._exit(0)


def _train(job: argparse.Namespace, training: Training, journal: Journal) -> None:
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
        begin = run.resume(training.state) + 1
        assert run.resumed is not None
        journal.write("resumed", **asdict(run.resumed))
        for step in range(begin, job.until + 1):
            loss = training.take_step(step)
            journal.write("step", step=step, loss=loss)
            saving = run.step(step, training.state)
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--last", action="store_true", help="end, after the whole training without interruption"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
