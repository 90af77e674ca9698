"""The training script of ``holdfast demo``, which torchrun starts on every rank.

It uses Holdfast as any job would:

    torchrun --nproc-per-node=4 -m holdfast.cli.demo.train \
        --journal FOLDER --uri URI --steps 40 --every 8

It resumes from the newest checkpoint below the URI, on any number of ranks. With ``--kill-at 24
--victim 2`` rank 2 kills itself in the middle of saving step 24. Without a URI nothing is saved.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

import holdfast

from ...drivers.uri import join, parse
from .journal import Journal
from .model import Learner, ModelConfig
from .plan import checkpoint_uri
from .torn import image_is_begun

DEADLINE_S = 6.0


class Training:
    """One rank's part of the job."""

    def __init__(self, job: argparse.Namespace, journal: Journal) -> None:
        self._job = job
        self._journal = journal
        self._rank = dist.get_rank()
        self._learner = Learner(ModelConfig())
        self._state = self._learner.state
        self._state["rng"] = holdfast.RNGState()
        self._saving: tuple[int, holdfast.SaveHandle] | None = None
        self._stopping = False
        # torchrun sends SIGTERM to the other ranks as soon as one is dead. They first wait for the
        # result of the save: see main().
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def run(self) -> None:
        """Resume, train, and save every few steps."""
        self._resume()
        for step in range(self._state["step"] + 1, self._job.steps + 1):
            if self._stopping:
                raise InterruptedError("told to stop")
            began_s = time.perf_counter()
            loss = self._learner.take_step(step)
            seconds = time.perf_counter() - began_s
            self._journal.write("step", step=step, loss=loss, seconds=seconds)
            if self._saving is not None and self._saving[1].done():
                self.end_save()
            if self._job.uri and step % self._job.every == 0:
                self._save(step)
        self.end_save()

    def _resume(self) -> None:
        if not self._job.uri:
            return
        found = holdfast.list_checkpoints(self._job.uri)
        if found:
            uri = str(join(self._job.uri, found[-1].path))  # sorted by step: the last is newest
            holdfast.load(
                uri,
                into=self._state,
                deadline_s=DEADLINE_S,
                on_report=lambda report: self._journal.write("loaded", **asdict(report)),
            )

    def _save(self, step: int) -> None:
        """Start a save in the background."""
        self.end_save()
        uri = checkpoint_uri(self._job.uri, step)
        handle = holdfast.async_save(uri, self._state, deadline_s=DEADLINE_S)
        self._saving = step, handle
        if step == self._job.kill_at and self._rank == self._job.victim:
            self._die_in(handle, uri)

    def _die_in(self, handle: holdfast.SaveHandle, uri: str) -> None:
        """Die by SIGKILL while the image is being written: no handler, no clean-up, no message to
        the other ranks."""
        handle.sealed.wait()
        while (
            parse(uri).scheme == "file"
            and not image_is_begun(uri, self._rank)
            and not handle.done()
        ):
            time.sleep(0.0002)
        self._journal.write("killed", step=self._state["step"], pid=os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    def end_save(self) -> None:
        """Wait for the save in progress, if any, and raise its error."""
        if self._saving is not None:
            (step, handle), self._saving = self._saving, None
            handle.wait()
            assert handle.report is not None
            self._journal.write("saved", step=step, **asdict(handle.report))


def main() -> None:
    """Run one rank of the job. Raises the error of training, or of the last save."""
    job = _arguments()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    journal = Journal(job.journal, dist.get_rank())
    training = Training(job, journal)
    try:
        training.run()
    except Exception as error:
        _tell_failed(journal, error)
        try:
            training.end_save()
        except holdfast.HoldfastError as lost:
            _tell_failed(journal, lost)
        raise
    dist.destroy_process_group()
    # torch's threads may still be releasing tensors; they abort the process if Python is shutting
    # down.
    os._exit(0)


def _tell_failed(journal: Journal, error: Exception) -> None:
    ours = isinstance(error, holdfast.HoldfastError)
    journal.write("failed", ours=ours, type=type(error).__name__, message=str(error))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--journal", type=Path, required=True, help="folder for the journals of the ranks"
    )
    parser.add_argument("--uri", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two checkpoints")
    parser.add_argument(
        "--kill-at", type=int, default=-1, help="in the save of which step a rank dies"
    )
    parser.add_argument("--victim", type=int, default=-1, help="which rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
