"""The trainer of ``holdfast demo --weights``, which torchrun starts on every rank.

It trains at the learning rate of reinforcement learning, keeps fp32 masters under FSDP2, and
publishes a bf16 version after each step. It resumes from its newest checkpoint; versions continue
above the newest. With ``--kill-at 8`` rank 1 kills itself while version 8 is being published.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

import holdfast

from .journal import Journal
from .model import Learner, ModelConfig, digest_of

RATE = 1e-6
CHECKPOINT_EVERY = 3
ANCHOR = 6
VICTIM = 1
DEADLINE_S = 20.0


def main() -> None:
    """Run one rank of the job. Raises the error of training, of a save, or of a push."""
    job = _arguments()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    journal = Journal(job.journal, dist.get_rank())
    learner = Learner(ModelConfig(), RATE)
    weights = {"model": learner.state["model"]}
    with (
        holdfast.Checkpointer(job.uri, every=CHECKPOINT_EVERY, deadline_s=DEADLINE_S) as ckpt,
        holdfast.publish(
            job.channel, dtype="bf16", anchor=ANCHOR, deadline_s=DEADLINE_S
        ) as publisher,
    ):
        step = ckpt.resume(learner.state)
        version = publisher.newest or 0
        journal.write("resumed", step=step, newest=version)
        while version < job.versions:
            step += 1
            version += 1
            learner.take_step(step)
            ckpt.step(step, learner.state)
            journal.write("pushing", version=version, step=step, digest=digest_of(weights))
            began_s = time.perf_counter()
            handle = publisher.push(version, weights)
            blocked_s = time.perf_counter() - began_s
            if version == job.kill_at and dist.get_rank() == VICTIM:
                journal.write("killed", version=version)
                os.kill(os.getpid(), signal.SIGKILL)
            report = handle.wait()
            assert report is not None
            seconds = time.perf_counter() - began_s
            nbytes = report.stored_nbytes
            journal.write(
                "published", version=version, nbytes=nbytes, blocked_s=blocked_s, seconds=seconds
            )
            time.sleep(job.pace)
    dist.destroy_process_group()
    # torch's threads may still be releasing tensors; they abort the process if Python is shutting
    # down.
    os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--journal", type=Path, required=True, help="folder for the journals of the ranks")
    add("--uri", required=True, help="where the checkpoints go")
    add("--channel", required=True, help="where the versions go")
    add("--versions", type=int, required=True, help="the last version to publish")
    add("--kill-at", type=int, default=-1, help="in the push of which version a rank dies")
    add("--pace", type=float, default=0.5, help="seconds between two versions")
    return parser.parse_args()


if __name__ == "__main__":
    main()
