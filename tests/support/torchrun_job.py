"""A job under torchrun that saves a sharded state, changes it, and loads it again. Arguments: a
folder, and the URI."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast


def main() -> None:
    """Run on every rank."""
    _, uri = sys.argv[1:]
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
    assert torch.equal(into["w"].full_tensor(), full)
    assert into["rank"] == rank == into["own"]
    assert into["plain"].sum() == 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
