"""A job as torchrun starts it: sharded, saved, changed, loaded again. Arguments: the URI, and where
to put the outcome."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast


def main() -> None:
    """Run on every rank."""
    uri, outcome = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(15.0).reshape(5, 3)
    state = {
        "w": distribute_tensor(full, mesh, [Shard(0)]),
        "rank": rank,
        "plain": torch.ones(4),
        "own": torch.tensor(rank),
    }
    holdfast.async_save(uri, state, step=3).wait()
    into = {
        "w": distribute_tensor(full * 0, mesh, [Shard(1)]),
        "rank": -1,
        "plain": torch.zeros(4),
        "own": torch.tensor(-1),
    }
    holdfast.load(uri, into=into)
    good = (
        torch.equal(into["w"].full_tensor(), full)
        and into["rank"] == rank == into["own"]
        and into["plain"].sum() == 4
    )
    Path(outcome, str(rank)).write_text("good" if good else f"bad: {into}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
