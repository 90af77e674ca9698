"""An engine of ``holdfast demo --weights``: follows the channel, and tells the digest of its
weights after each update.

Under torchrun its ranks share each matrix by columns. Alone it has a whole model, whose weights are
updated in place. With ``--kill-at 4`` it kills itself in the middle of the first update to that
version or a later one.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast

from .journal import Journal
from .model import ModelConfig, Transformer, digest_of

DEADLINE_S = 20.0
WAIT_S = 120.0


def main() -> None:
    """Follow up to the last version. Raises the error of an update."""
    job = _arguments()
    is_alone = "RANK" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
    journal = Journal(job.journal, 0 if is_alone else dist.get_rank())
    model = Transformer(ModelConfig()).bfloat16().requires_grad_(False)
    weights = {"model": model if is_alone else _sharded(model)}
    with holdfast.subscribe(
        job.channel, weights, in_place=is_alone, deadline_s=WAIT_S
    ) as subscriber:
        last_s = 0.0
        while (subscriber.version or 0) < job.versions:
            dies = 0 < job.kill_at <= (subscriber.newest() or 0)
            if dies:
                journal.write("killed", version=subscriber.newest())
                threading.Timer(last_s / 2, _die).start()
            prepared = subscriber.prepare(timeout_s=WAIT_S)
            if prepared is None:
                raise holdfast.DeadlineError(f"no version for {WAIT_S:g} s")
            if dies:
                _die()
            update = prepared.commit()
            last_s = update.prepare_s
            journal.write("updated", digest=digest_of(weights), **asdict(update))
    # torch's threads may still be releasing tensors; they abort the process if Python is shutting
    # down.
    os._exit(0)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sharded(model: Transformer) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            tensor, mesh, [Shard(1) if tensor.dim() > 1 else Replicate()], src_data_rank=None
        )
        for name, tensor in model.state_dict().items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--journal", type=Path, required=True, help="folder for the journals of the ranks")
    add("--channel", required=True, help="the channel to follow")
    add("--versions", type=int, required=True, help="the last version")
    add("--kill-at", type=int, default=-1, help="in the update to which version it dies")
    return parser.parse_args()


if __name__ == "__main__":
    main()
